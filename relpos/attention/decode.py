"""A few queries against a long cache: split over the keys, so that one text fills a GPU.

Decoding reads every key and value once; that is its floor. Against it the rows of the bias, one float32 per query head
and key, weigh little (3% for one query of 64 features in 16 bits), so they are computed by the reference and handed
over with the mask folded in: every additive encoding, position and mask works, and the kernels know none of them.

Two kernels: `partial` takes a stretch of keys for all queries of one key head, `combine` joins the stretches.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import torch
from torch import Tensor

from relpos.attention import reference
from relpos.terms import Layout, Term

ROWS = 16  # query rows of one key head (grouped heads times queries) that a program holds: the least a matmul takes
STRETCH = 256  # keys of one program, at least
PROGRAMS = 528  # enough to fill a large GPU four times over


@functools.cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def partial(
        Q, K, V, Bias, Part, Top, Sum, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, b_b, H, GROUP, Tq, Tk, c2, stretch,
        D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
        BIASED: tl.constexpr, LOG2E: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0)
        HKV = H // GROUP
        b = (tl.program_id(1) // HKV).to(tl.int64)
        hk = (tl.program_id(1) % HKV).to(tl.int64)
        r = tl.arange(0, ROWS)  # row r is query r % Tq of head r // Tq of the group
        e = tl.arange(0, DP)
        h = hk * GROUP + r // Tq
        real = r < GROUP * Tq
        ok_q = real[:, None] & (e[None, :] < D)
        q = tl.load(Q + b * q_b + h[:, None] * q_h + (r % Tq)[:, None] * q_t + e[None, :], mask=ok_q, other=0.0)
        rows = Bias + b * b_b + (h * Tq + r % Tq)[:, None] * Tk
        acc = tl.zeros((ROWS, DP), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in range(n * stretch, tl.minimum((n + 1) * stretch, Tk), BN):
            j = start + tl.arange(0, BN)
            ok = j < Tk
            at = j[:, None].to(tl.int64)
            ok_k = ok[:, None] & (e[None, :] < D)
            k = tl.load(K + b * k_b + hk * k_h + at * k_t + e[None, :], mask=ok_k, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * c2
            if BIASED:
                s += tl.load(rows + j[None, :], mask=real[:, None] & ok[None, :], other=float("-inf")) * LOG2E
            else:
                s = tl.where(ok[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            w = tl.exp2(s - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(w, 1)
            top = higher
            v = tl.load(V + b * v_b + hk * v_h + at * v_t + e[None, :], mask=ok_k, other=0.0)
            acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        out = (tl.program_id(1) * tl.num_programs(0) + n).to(tl.int64) * ROWS + r
        tl.store(Part + out[:, None] * DP + e[None, :], acc)
        tl.store(Top + out, top)
        tl.store(Sum + out, total)

    @triton.jit
    def combine(
        Part, Top, Sum, Out, o_b, o_h, o_t, H, GROUP, Tq, stretches,
        D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        HKV = H // GROUP
        b = (tl.program_id(0) // HKV).to(tl.int64)
        hk = (tl.program_id(0) % HKV).to(tl.int64)
        r = tl.arange(0, ROWS)
        e = tl.arange(0, DP)
        acc = tl.zeros((ROWS, DP), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for n in range(stretches):
            at = (tl.program_id(0) * stretches + n).to(tl.int64) * ROWS + r
            its = tl.load(Top + at)
            higher = tl.maximum(top, its)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp2(top - base)
            grow = tl.exp2(its - base)
            total = total * fade + tl.load(Sum + at) * grow
            acc = acc * fade[:, None] + tl.load(Part + at[:, None] * DP + e[None, :]) * grow[:, None]
            top = higher
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row with no key gives zeros
        h = hk * GROUP + r // Tq
        ok = (r < GROUP * Tq)[:, None] & (e[None, :] < D)
        at = b * o_b + h[:, None] * o_h + (r % Tq)[:, None] * o_t + e[None, :]
        tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=ok)

    return partial, combine


def _decode(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], scale: float) -> Tensor:  # noqa: UP045
    """q [B,H,Tq,D], k and v [B,Hkv,Tk,D], bias [1 or B,H,Tq,Tk] float32, -inf where masked."""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    group = H // Hkv
    out = q.new_empty(B, Tq, H, D).transpose(1, 2)
    partial, combine = _kernels()
    DP = max(16, 1 << (D - 1).bit_length())
    stretches = max(1, min(-(-Tk // STRETCH), -(-PROGRAMS // (B * Hkv))))
    stretch = -(-Tk // stretches)
    stretch = -(-stretch // 64) * 64
    stretches = -(-Tk // stretch)
    part = q.new_empty(B * Hkv * stretches, ROWS, DP, dtype=torch.float32)
    top, total = (q.new_empty(B * Hkv * stretches, ROWS, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        partial[(stretches, B * Hkv)](
            q, k, v, q if bias is None else bias, part, top, total, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            0 if bias is None or bias.shape[0] == 1 else H * Tq * Tk, H, group, Tq, Tk, scale / math.log(2), stretch,
            D=D, DP=DP, ROWS=ROWS, BN=64, BIASED=bias is not None, LOG2E=math.log2(math.e), num_warps=4,
            num_stages=1 if q.dtype == torch.float32 and DP > 64 else 3,  # more do not fit on small GPUs
        )  # fmt: skip
        combine[(B * Hkv,)](
            part, top, total, out, *out.stride()[:3], H, group, Tq, stretches, D=D, DP=DP, ROWS=ROWS, num_warps=4
        )
    return out


_operator = torch.library.custom_op("relpos::decode", _decode, mutates_args=())


@_operator.register_fake
def _(q, k, v, bias, scale):
    B, H, Tq, D = q.shape
    return q.new_empty(B, Tq, H, D).transpose(1, 2)


def serves(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout) -> bool:
    """Whether a call is one of few queries and many keys that wants no gradient."""
    few = q.shape[1] // k.shape[1] * layout.Tq <= ROWS and layout.Tk >= 4 * layout.Tq
    if not few or not torch.is_grad_enabled():
        return few
    tensors = [q, k, v]
    tensors += [x for term in terms for x in vars(term).values() if isinstance(x, Tensor)]
    return not any(x.requires_grad for x in tensors)


def attend(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated."""
    if not q.numel() or not layout.Tk:
        return torch.zeros_like(q)
    # The last token of a plain text sees every key.
    sees_all = layout.Tq == 1 and layout.plain and layout.q_offset in (None, layout.Tk - 1) and layout.window is None
    bias = None
    if sees_all and len(terms) == 1:  # as a rule: few operations, each as long as a small kernel
        rho = getattr(terms[0], "rho", None)
        row = reference.line(
            terms[0], torch.arange(layout.Tk - 1, -1, -1, device=q.device), rho is not None and rho.numel() == 1
        )
        bias = None if row is None else row.float()[None, :, None]
    if bias is None and (terms or not sees_all):
        bias = reference.bias_of(terms, layout, q.shape[1]).float()
    if bias is not None and not sees_all:
        bias = bias.masked_fill(~layout.allowed()[:, None], float("-inf"))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    run = _operator if torch.compiler.is_compiling() else _decode
    return run(q, k, v, None if bias is None else bias.contiguous(), scale)
