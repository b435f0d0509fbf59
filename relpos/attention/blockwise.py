"""The reference, a few rows of queries at a time: the same numbers with memory linear in the length.

Each block of rows runs under activation checkpointing, so the backward pass holds one block too. Works on any device
and for every encoding, rescoring ones included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.attention import reference
from relpos.terms import Layout, Term

CELLS = 1 << 22  # score cells held at once: 16 MiB in float32, a few times that with the temporaries


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Term],
    layout: Layout,
    scale: float,
    rescore: reference.Rescore | None = None,
) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated."""
    B, H, Tq, _ = q.shape
    k, v = reference.repeat_heads(k, H), reference.repeat_heads(v, H)
    step = max(1, CELLS // max(1, B * H * layout.Tk))
    offset = layout.Tk - Tq if layout.q_offset is None else layout.q_offset

    def block(start: int) -> Tensor:
        stop = min(start + step, Tq)
        keys = None
        if layout.causal and isinstance(offset, int):
            keys = max(1, min(layout.Tk, offset + stop))  # the keys behind it are masked for the whole block
        return reference.attend_rows(q, k, v, terms, layout, scale, rescore, slice(start, stop), keys)[0]

    def run(start: int) -> Tensor:
        if not torch.is_grad_enabled():
            return block(start)
        return checkpoint(block, start, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    blocks = [run(start) for start in range(0, Tq, step)]
    return torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
