"""Attention with positional terms, written for reading: dense, plain, any device and dtype.

This file is the specification. Every other implementation is tested against it, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relpos.terms import Bank, Distance, Layout, Potential, Profile, Rotation, Slope, Term, full_precision

Rescore = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # Encoding.rescore


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first 2R features of x [B,H,T,D] by cos and sin [1 or B, T, R], in float32 or wider."""
    R = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * R].to(torch.promote_types(x.dtype, cos.dtype)), x[..., 2 * R :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned[..., :R], turned[..., R:]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1) if rest.shape[-1] else turned.to(x.dtype)


def apply_rotation(
    q: Tensor, k: Tensor, rotation: Rotation | None, turn: Callable[..., Tensor] = rotate
) -> tuple[Tensor, Tensor]:
    """q and k turned, if there is a rotation; `turn` does what `rotate` does."""
    if rotation is None:
        return q, k
    return (
        turn(q, rotation.q_cos, rotation.q_sin, rotation.interleaved),
        turn(k, rotation.k_cos, rotation.k_sin, rotation.interleaved),
    )


def term_bias(term: Term, layout: Layout, rows: slice | None = None, keys: int | None = None) -> Tensor:
    """What one term adds to the scores of the rows and the first `keys` keys, [1 or B, H, q, keys]. Masked cells hold
    any finite value."""
    rows = rows or slice(None)  # not as the default: torch 2.11 cannot compile that
    if isinstance(term, Potential):
        term = term.rows(rows)
        difference = term.query[..., None] - term.key[..., None, :keys]
        if not layout.causal:
            difference = difference.abs()
        bias = -torch.log(difference.square() + 1) if term.log else -difference
        return bias if term.gate is None else bias * term.gate[..., None]
    if isinstance(term, Distance) and layout.plain:
        return diagonals(term, layout, rows, keys)[None]
    d = layout.distances(rows, keys)  # [1 or B, q, keys]
    if isinstance(term, Slope):
        return -term.slopes[None, :, None, None] * d.abs()[:, None].to(term.slopes.dtype)
    if isinstance(term, Distance):
        if layout.positions is not None and term.formula is not None:
            return term.formula(d).transpose(0, 1)
        index = (d + term.origin).clamp(0, term.values.shape[1] - 1)
        return term.values[:, index].transpose(0, 1)
    if isinstance(term, Profile):
        u = term.psi(d).transpose(0, 1) * term.rho[:, None, rows, None]
        if not term.knots.numel():
            return term.offset[:, :, None] + term.slope[:, :, None] * u
        piece = torch.bucketize(u.detach(), term.knots)  # [1 or B, 1 or H, q, keys]
        head = torch.arange(term.slope.shape[0], device=u.device)[:, None, None]
        return term.offset[head, piece] + term.slope[head, piece] * u
    if isinstance(term, Bank):
        with full_precision(term.bank):
            profile = term.query[:, :, rows] @ term.bank  # [B, H, q, size]: the query's own value per distance
        size = term.bank.shape[1]
        index = d[:, None].clamp(0, size - 1).expand(*profile.shape[:2], -1, -1)
        return profile.gather(-1, index).masked_fill(((d < 0) | (d >= size))[:, None], 0.0)
    raise TypeError(f"unknown term {type(term).__name__}")


def line(term: Term, d: Tensor, one_rho: bool) -> Tensor | None:
    """What one term adds at the distances d >= 0 [n], [H, n], if nothing but the distance counts, else None. Of a
    profile that holds for queries of one rho."""
    if isinstance(term, Slope):
        return -term.slopes[:, None] * d
    if isinstance(term, Distance):
        return term.values[:, (d + term.origin).clamp(0, term.values.shape[1] - 1)]
    if isinstance(term, Profile) and one_rho:
        u = term.psi(d) * term.rho[:1, :1]
        if not term.knots.numel():
            return term.offset + term.slope * u
        piece = torch.bucketize(u, term.knots).expand(term.slope.shape[0], -1)
        return term.offset.gather(1, piece) + term.slope.gather(1, piece) * u
    return None


def diagonals(term: Distance, layout: Layout, rows: slice, keys: int | None) -> Tensor:
    """The values of a Distance term laid out along the diagonals, [H, q, keys], for positions that are the columns.

    Without a gather, whose gradient is slow: one line holds the distances of all diagonals. Written once per row and
    read back with a row length one shorter, it slides by one from row to row.
    """
    first, last = rows.start or 0, layout.Tq if rows.stop is None else rows.stop
    q, k = last - first, layout.Tk if keys is None else keys
    offset = layout.Tk - layout.Tq if layout.q_offset is None else layout.q_offset
    d = offset + last - 1 - torch.arange(q + k, device=layout.device)  # one more than needed, for the row length
    line = term.values[:, (d + term.origin).clamp(0, term.values.shape[1] - 1)]
    tiled = line[:, None].expand(-1, q, -1).reshape(line.shape[0], -1)  # [H, q (q + k)]
    return tiled[:, q - 1 : -1].unflatten(1, (q, q + k - 1))[..., :k]


def bias_of(
    terms: list[Term], layout: Layout, heads: int, rows: slice | None = None, keys: int | None = None
) -> Tensor:
    """The sum of all terms, [1 or B, H, q, keys]."""
    total = torch.zeros(1, heads, 1, 1, device=layout.device)
    for term in terms:
        total = total + term_bias(term, layout, rows, keys)
    return total


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Term],
    layout: Layout,
    scale: float,
    rescore: Rescore | None = None,
    rows: slice | None = None,
    keys: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights of some rows of queries against the first `keys` keys (all of them by default): q [B,H,q,D]
    holds those rows only, k and v [B,H,keys,D] those keys, with one head per query head. Terms and layout are whole."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * scale
    bias = bias_of(terms, layout, q.shape[1], rows, keys).to(wide)
    allowed = layout.allowed(rows, keys)[:, None]
    scores = rescore(scores, bias, q, k, allowed) if rescore is not None else scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    # A row with no key gives zeros; the detour keeps NaN out of its gradient too.
    empty = ~allowed.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return weights.to(v.dtype) @ v, weights


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: one copy of a key head per query head it serves."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Term],
    layout: Layout,
    scale: float,
    rescore: Rescore | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B,H,Tq,D] and weights [B,H,Tq,Tk] of q, k, v that are already rotated."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return attend_block(q, k, v, terms, layout, scale, rescore)


__all__ = [
    "apply_rotation",
    "attend",
    "attend_block",
    "bias_of",
    "diagonals",
    "line",
    "repeat_heads",
    "rotate",
    "term_bias",
]
