"""A few queries against a long cache: split over the keys, so that one text fills a GPU (kernels: decode_kernels.py).

Decoding reads every key and value once; that is its floor. The last token of each text, which is what generating asks
for, needs little else, padded or not: the kernel computes what the term adds as it goes. For everything else (positions
of one's own, several queries, several terms) the rows of the bias, one float32 per query head and key, are computed by
the reference and handed over with the mask folded in: every additive encoding works.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import torch
from torch import Tensor

from relpos.attention import reference
from relpos.terms import Bank, Layout, Potential, Profile, Term

ROWS = 16  # query rows of one key head (grouped heads times queries) that a program holds: the least a matmul takes
STRETCH = 128  # keys of one program, at least
PROGRAMS = 528  # enough to fill a large GPU four times over
KNOTS = 128  # of a profile that a program compares with at once
RANK = 128  # of a bank, a tile of which takes shared memory
PROFILE, BANK, POWER, ROW = 4, 6, 8, 9  # as in kernels.py, fused.py and decode_kernels.py


@functools.cache
def _kernels() -> Any:
    from relpos.attention import decode_kernels, kernels

    return decode_kernels.partial, decode_kernels.combine, kernels.Flags


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def like(x: Tensor) -> Tensor:
    """An empty [B,H,T,D] laid out as [B,T,H,D], so that merging the heads is free."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


_T = Tensor
_O = Optional[Tensor]  # noqa: UP045 - the operator's schema is read from it


def _decode(q: _T, k: _T, v: _T, bias: _O, real: _O, count: _O, a: _O, b: _O, c: _O, d: _O, e: _O, kind: int,
            origin: int, window: int, scale: float) -> _T:  # fmt: skip
    """q [B,H,Tq,D], k and v [B,Hkv,Tk,D]; and either bias [1 or B,H,Tq,Tk] float32, -inf where masked, or for the last
    token of each text the operands of a term (fused.py), which keys are real [B,Tk] and their running count."""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    partial, combine, Flags = _kernels()
    out = like(q)
    DP = max(16, power(D))
    flags = dict(KIND=PROFILE if kind == POWER else kind, POWER=kind == POWER, GATED=False)
    strides, size = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (a, b, c)], 0
    if a is not None and c is not None and kind in (PROFILE, POWER):
        strides = [0 if b is None or b.shape[0] == 1 else b.stride(0), 0, 0]
        size, knots = int(a.numel() > 1), c.numel()
        flags |= {"KNOTS": knots, "KP": max(2, power(knots))}
    elif a is not None and b is not None and kind == BANK:
        rank, size = b.shape
        strides = [0 if a.shape[0] == 1 else a.stride(0), a.stride(1), rank]  # a gate has no place here
        flags["RP"] = max(16, power(rank))
    elif a is not None:
        size = a.shape[-1]
        flags["GATED"] = c is not None
    F = Flags(
        **flags, CAUSAL=True, CANCEL=False, EXACT=q.dtype == torch.float32, D=D, DP=DP, DOCS=False,
        META=real is not None, WINDOW=window, EVEN=False, BM=ROWS, BN=64,
    )  # fmt: skip
    # Of a window no more than it can see, unless some of that is padding.
    first = max(0, Tk - window) // 64 * 64 if window and real is None else 0
    stretches = max(1, min(-(-(Tk - first) // STRETCH), -(-PROGRAMS // (B * Hkv))))
    stretch = -(-(Tk - first) // (64 * stretches)) * 64
    stretches = -(-(Tk - first) // stretch)
    part, top, total = out, out, out  # never read
    if stretches > 1:
        part = q.new_empty(B, H, Tq, stretches, DP, dtype=torch.float32)
        top, total = (q.new_empty(B, H, Tq, stretches, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        partial[(stretches, B * Hkv)](
            q, k, v, *(q if x is None else x for x in (bias, real, count)), out, part, top, total,
            *(q if x is None else x for x in (a, b, c, d, e)), *strides, size, origin,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            0 if bias is None or bias.shape[0] == 1 else H * Tq * Tk, H, H // Hkv, Tq, Tk, scale / math.log(2), first,
            stretch, H * Tq == Hkv, stretches == 1, F, num_warps=4,
            num_stages=1 if F.EXACT and max(DP, 2 * F.RP) > 64 else 2 if F.RP > 32 else 3,  # small GPUs hold no more
        )  # fmt: skip
        if stretches > 1:
            combine[(B * H * Tq,)](out, part, top, total, *out.stride()[:3], H, Tq, stretches, 32, F, num_warps=4)
    return out


_operator = torch.library.custom_op("relpos::decode", _decode, mutates_args=())


@_operator.register_fake
def _(q, k, v, bias, real, count, a, b, c, d, e, kind, origin, window, scale):
    return like(q)


def serves(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout) -> bool:
    """Whether a call is one of few queries and many keys that wants no gradient."""
    few = q.shape[1] // k.shape[1] * layout.Tq <= ROWS and layout.Tk >= 4 * layout.Tq
    if not few or not torch.is_grad_enabled():
        return few
    tensors = [q, k, v]
    tensors += [x for term in terms for x in vars(term).values() if isinstance(x, Tensor)]
    return not any(x.requires_grad for x in tensors)


def computes(terms: list[Term], layout: Layout) -> bool:
    """Whether the kernel computes what the terms add: for the last token, where positions count the real ones. Else it
    is told."""
    if layout.Tq > 1 or len(terms) > 1 or layout.positions is not None or layout.cu_seqlens is not None:
        return False
    if isinstance(layout.q_offset, Tensor) or layout.q_offset not in (None, layout.Tk - 1):
        return False
    term = terms[0] if terms else None
    if isinstance(term, Potential):
        return layout.causal or term.log  # else |S_i - S_j| counts
    if isinstance(term, Bank):
        return term.bank.shape[0] <= RANK
    if not isinstance(term, Profile):
        return True
    knots = term.knots.numel()
    return not knots or (knots <= KNOTS and term.rate.numel() == 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float, operands: tuple | None
) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated. `operands`: those of the term, its kind and its origin,
    where the kernel `computes` it."""
    if not q.numel() or not layout.Tk:
        return torch.zeros_like(q)
    bias = real = count = None
    window = 0
    if operands is None:
        operands = [None] * 5, ROW, 0
        bias = reference.bias_of(terms, layout, q.shape[1]).float()
        bias = bias.masked_fill(~layout.allowed()[:, None], float("-inf")).contiguous()
    else:
        window = layout.window or 0
        if layout.key_padding_mask is not None:
            real = layout.key_padding_mask.bool().contiguous()
            count = real.cumsum(-1, dtype=torch.int32)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    run: Any = _operator if torch.compiler.is_compiling() else _decode
    given, kind, origin = operands
    return run(q, k, v, bias, real, count, *given, kind, origin, window, scale)
