"""The reference, a few rows of queries at a time: the same numbers with memory linear in the length.

The forward pass keeps nothing but its inputs; the backward pass computes each block of rows again and adds its
gradients into place, so neither holds more than one block. Works on any device and for every encoding, rescoring ones
included.

Under `torch.compile`, and where a gradient flows through something that is not an input (a term's formula for explicit
positions), the blocks run under activation checkpointing instead: the same numbers. It is the second choice because it
keeps a graph per block, and on a CPU those many small objects between large freed blocks leave the allocator unable to
use the space again (4,096 tokens, 12 heads: 1.7 GiB instead of 0.5).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relpos.attention import cpu, reference
from relpos.errors import once
from relpos.terms import Distance, Layout, Term

# Score cells held at once: 16 MiB in float32, a few times that with the temporaries; on a GPU eight times as many, or
# launches would take longest.
CELLS = 1 << 22

Block = tuple[slice, int | None]  # rows of queries, number of keys


def plan(B: int, H: int, layout: Layout) -> list[Block]:
    cells = CELLS if layout.device.type == "cpu" else 8 * CELLS
    step = max(1, cells // max(1, B * H * layout.Tk))
    offset = layout.Tk - layout.Tq if layout.q_offset is None else layout.q_offset
    blocks: list[Block] = []
    for start in range(0, layout.Tq, step):
        stop = min(start + step, layout.Tq)
        keys = None
        if layout.causal and isinstance(offset, int):
            keys = max(1, min(layout.Tk, offset + stop))  # the keys behind it are masked for the whole block
        blocks.append((slice(start, stop), keys))
    return blocks


@dataclasses.dataclass
class Work:
    """What stays the same from block to block, and how to put other tensors into the terms."""

    terms: list[Term]
    layout: Layout
    scale: float
    rescore: reference.Rescore | None

    def inputs(self) -> list[Tensor]:
        """The tensors beside q, k and v that a gradient may flow to: those of the terms, then rescore's parameters."""
        found = [getattr(term, name) for term in self.terms for name in tensor_fields(term)]
        module = getattr(self.rescore, "__self__", None)
        return found + (list(module.parameters()) if isinstance(module, nn.Module) else [])

    def explicit(self) -> bool:
        """Whether a gradient can flow to `inputs` only."""
        if self.rescore is not None and not isinstance(getattr(self.rescore, "__self__", None), nn.Module):
            return False
        return self.layout.positions is None or not any(isinstance(term, Distance) for term in self.terms)

    def block(self, q: Tensor, k: Tensor, v: Tensor, block: Block, others: list[Tensor] | None = None) -> Tensor:
        """Output of the rows q against the keys k and v; `others` take the place of the terms' tensors."""
        terms = self.terms
        if others is not None:
            rest = iter(others)
            terms = [replaced(term, {name: next(rest) for name in tensor_fields(term)}) for term in terms]
        return reference.attend_block(q, k, v, terms, self.layout, self.scale, self.rescore, *block)[0]


def tensor_fields(term: Term) -> list[str]:
    return [f.name for f in dataclasses.fields(term) if isinstance(getattr(term, f.name), Tensor)]


def replaced(term: Any, tensors: dict[str, Tensor]) -> Any:
    return dataclasses.replace(term, **tensors)


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, blocks: list[Block], q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        ctx.work, ctx.blocks = work, blocks
        ctx.save_for_backward(q, k, v, *others)
        kind = q.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        out = None
        for rows, keys in blocks:
            part = work.block(q[:, :, rows], k[:, :, :keys], v[:, :, :keys], (rows, keys))
            out = part.new_empty(*q.shape[:3], v.shape[-1]) if out is None else out  # autocast chooses its dtype
            out[:, :, rows] = part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        once("blockwise attention", "impl='reference' has one")
        work: Work = ctx.work
        q, k, v, *others = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        totals = [torch.zeros_like(x) if need else None for x, need in zip(ctx.saved_tensors, needs)]
        parameters = len(others) - sum(len(tensor_fields(term)) for term in work.terms)
        kind, dtype, enabled = ctx.autocast
        for rows, keys in ctx.blocks:
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                parts = [q[:, :, rows], k[:, :, :keys], v[:, :, :keys], *others]
                # rescore reads its parameters from its module, so those stay themselves.
                fresh = [x.detach().requires_grad_(n) for x, n in zip(parts, needs)]
                fresh[len(fresh) - parameters :] = others[len(others) - parameters :]
                out = work.block(fresh[0], fresh[1], fresh[2], (rows, keys), fresh[3:])
            wanted = [i for i, need in enumerate(needs) if need]
            found = torch.autograd.grad(out, [fresh[i] for i in wanted], grad[:, :, rows], allow_unused=True)
            for i, gradient in zip(wanted, found):
                total = totals[i]
                if gradient is None or total is None:
                    continue
                place = total[:, :, rows] if i == 0 else total[:, :, :keys] if i < 3 else total
                place += gradient
        return (None, None, *totals)


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
    B, H = q.shape[:2]
    k, v = reference.repeat_heads(k, H), reference.repeat_heads(v, H)
    if rescore is None and cpu.serves(q, k, v, terms, layout):
        return cpu.attend(q, k, v, terms, layout, scale, CELLS)
    work, blocks = Work(terms, layout, scale, rescore), plan(B, H, layout)
    if work.explicit() and not torch.compiler.is_compiling():
        return Blocks.apply(work, blocks, q, k, v, *work.inputs())  # type: ignore[no-any-return]

    def run(block: Block) -> Tensor:
        rows, keys = block
        return work.block(q[:, :, rows], k[:, :, :keys], v[:, :, :keys], block)

    if torch.is_grad_enabled():
        outs = [checkpoint(run, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
    else:
        outs = [run(block) for block in blocks]
    return torch.cat(outs, 2) if len(outs) > 1 else outs[0]
