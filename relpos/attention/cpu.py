"""Plain causal attention without gradients on a CPU, by PyTorch's own kernel: several times as fast as the reference.

`scaled_dot_product_attention` holds neither scores nor weights on a CPU. What the terms add goes in as its mask, a few
rows of queries at a time. Where a bias depends on the distance alone, and nothing else, that mask is a view of one
line: `bias[h, r, c] = line[h, r + c]` with the rows turned upside down, -inf where the distance is negative. It takes
no memory and no time to make. A difference of potentials, `-g_i (S_i - S_j)`, needs no mask either: its row's part
cancels in the softmax, and `g_i S_j` is one more feature of q and k. (Not in 16 bits: sums need float32.)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.attention import reference
from relpos.terms import Layout, Potential, Profile, Term

ROWS = 256  # queries of a block whose mask is a view


def serves(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout) -> bool:
    """Whether a call is one for this file."""
    if q.device.type != "cpu" or not layout.plain or not layout.causal or layout.window is not None:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):  # which would round what is to stay float32
        return False
    offset = layout.Tk - layout.Tq if layout.q_offset is None else layout.q_offset
    if not isinstance(offset, int) or q.dtype == torch.float16:
        return False
    if v.shape[-1] != q.shape[-1] or v.dtype != q.dtype:
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = [q, k, v, *(x for term in terms for x in vars(term).values())]
    return not any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def line_of(terms: list[Term], layout: Layout, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of all terms, [H, Tk] for d = 0 .. Tk - 1, or None where it is no function of the distance alone."""
    d = torch.arange(layout.Tk)
    total = torch.zeros(heads, layout.Tk, dtype=torch.promote_types(dtype, torch.float32))
    for term in terms:
        one_rho = isinstance(term, Profile) and bool((term.rho == term.rho[:1, :1]).all())
        line = reference.line(term, d, one_rho)
        if line is None:
            return None
        total = total + line
    return total


def attend(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float, cells: int) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated, with one head of k and v per head of q."""
    B, H, Tq, D = q.shape
    first = layout.Tk - Tq if layout.q_offset is None else layout.q_offset
    assert isinstance(first, int)
    if not terms and first == 0 and Tq == layout.Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [term for term in terms if isinstance(term, Potential) and not term.log and q.dtype == wide]
    line = line_of([term for term in terms if not any(term is x for x in sums)], layout, H, q.dtype)
    if line is None:
        return _with_dense_masks(q, k, v, terms, layout, scale, max(1, cells // (B * H * layout.Tk)))
    # By falling distance, from Tk - 1 to -ROWS.
    line = torch.cat([line.flip(1), line.new_full((H, ROWS), -math.inf)], 1).to(wide)
    if sums:  # the product with these features is g_i S_j; v gets zeros, for a kernel that wants equal sizes
        gates = [torch.ones_like(t.query) if t.gate is None else t.gate for t in sums]
        q = torch.cat([q, *(gate.to(wide)[..., None].expand(B, -1, -1, -1) / scale for gate in gates)], -1)
        k = torch.cat([k, k.new_zeros(*k.shape[:3], len(sums))], -1)
        v = F.pad(v, (0, len(sums)))
    out = torch.empty(B, H, Tq, D, dtype=q.dtype)
    step = max(1, ROWS // 4) if sums else ROWS
    for start in range(0, Tq, step):
        stop = min(start + step, Tq)
        keys = min(layout.Tk, first + stop)
        for n, term in enumerate(sums):  # counted from the block, where the sums differ by little: so they stay exact
            k[..., :keys, D + n] = term.key[..., :keys] - term.key[..., first + start, None]
        # Row r from below stands at column first + stop - 1 - r: its distance to key c is that minus c.
        own = line[:, layout.Tk - first - stop :]
        mask = own.as_strided((1, H, stop - start, keys), (0, own.stride(0), 1, 1), own.storage_offset())
        rows = q[:, :, start:stop].flip(2)
        found = F.scaled_dot_product_attention(rows, k[:, :, :keys], v[:, :, :keys], attn_mask=mask, scale=scale)
        out[:, :, start:stop] = found[..., :D].flip(2)
    return out


def _with_dense_masks(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float, step: int
) -> Tensor:
    """Any terms: the reference computes what they add to a block of rows."""
    out = torch.empty_like(q)
    first = layout.columns()[0, 0]
    for start in range(0, layout.Tq, step):
        rows = slice(start, min(start + step, layout.Tq))
        keys = min(layout.Tk, int(first) + rows.stop)
        bias = reference.bias_of(terms, layout, q.shape[1], rows, keys).to(torch.promote_types(q.dtype, torch.float32))
        mask = bias.expand(-1, q.shape[1], rows.stop - start, keys).masked_fill(
            ~layout.allowed(rows, keys)[:, None], -math.inf
        )
        out[:, :, rows] = F.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, :keys], v[:, :, :keys], attn_mask=mask, scale=scale
        )
    return out
