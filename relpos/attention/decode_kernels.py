"""Triton kernels for a few queries against a long cache: `partial` takes a stretch of keys for all queries of one key
head, `combine` joins the stretches of one row.

What is added to the scores comes by KIND as in kernels.py, and is computed here for the last token of a text: row r is
head r of the group, and key j is Tk - 1 - j tokens back, or with META, where some keys are padding, as many as the
running count of real ones says. Of a BANK it is the float32 bank itself that comes, as `b`: with its rank, and the
stride of its rows' heads, where other kinds keep strides of their own. Other positions and several queries come as ROW:
the bias itself, [1 or B, H, Tq, Tk].
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.attention.kernels import (
    BANK,
    DISTANCE,
    LOG,
    LOG2E,
    POTENTIAL,
    PROFILE,
    SLOPE,
    Term,
    _log2,
    _nothing,
    _psi,
    _zeros,
)

ROW = tl.constexpr(9)


@triton.jit
def _of_rows(h, ok, b, t, F: tl.constexpr):
    """What the term keeps of each row, [rows, 1]: slope, S or rate; gate, or slope by rate. Of a profile with knots
    these, [KP, 1], and rho. Of a bank the row's own weights, [rows, RP]."""
    x = h.to(tl.float32)
    y = x
    if F.KIND == SLOPE:
        x = tl.load(t.a + h, mask=ok, other=0.0) * -LOG2E
    if F.KIND == POTENTIAL or F.KIND == LOG:
        x = tl.load(t.a + b * t.q_b + h, mask=ok, other=0.0)
        if F.GATED:
            y = tl.load(t.c + b * t.g_b + h, mask=ok, other=0.0)
    if F.KIND == PROFILE and F.KNOTS == 0:  # its offset is constant along the row, and cancels
        x = tl.load(t.a + h * t.size, mask=ok, other=0.0)
        y = tl.load(t.d + h, mask=ok, other=0.0) * (tl.load(t.b + b * t.q_b) * LOG2E)
    if F.KNOTS > 0:
        n = tl.arange(0, F.KP)[:, None]
        x = tl.load(t.c + n, mask=n < F.KNOTS, other=float("inf"))
        y = tl.load(t.b + b * t.q_b)
    if F.KIND == BANK:
        r = tl.arange(0, F.RP)[None, :]
        x = tl.load(t.a + b * t.q_b + h * t.k_b + r, mask=ok & (r < t.g_b), other=0.0)
    return x, y


@triton.jit
def _add_row(s, x, y, rate, h, ok, j, d, b, Tk, c2, t, F: tl.constexpr):
    """Scores [ROWS, BN] in units of log 2 with the term of the keys j [BN], at distances d >= 0, added; s comes as
    q . k. `ok` [rows, BN]."""
    s *= c2
    if F.KIND == BANK:  # in float32: where there is one query, rounding it would save nothing
        r = tl.arange(0, F.RP)[:, None]
        of_key = tl.load(t.b + r * t.size + d[None, :], mask=(r < t.g_b) & (d < t.size)[None, :], other=0.0)
        if x.shape[0] == 1:
            s += tl.sum(tl.trans(x) * of_key, 0)[None, :] * LOG2E
        else:
            s += tl.dot(x, of_key, input_precision="ieee") * LOG2E
    if F.KIND == SLOPE:
        s += x * d.to(tl.float32)[None, :]
    if F.KIND == POTENTIAL or F.KIND == LOG:
        gap = x - tl.load(t.b + b * t.k_b + h * Tk + j[None, :], mask=ok, other=0.0)
        if F.KIND == LOG:
            log = _log2(gap * gap + 1.0, F.EXACT)
            s -= y * log if F.GATED else log
        else:
            s -= y * gap * c2 if F.GATED else gap * LOG2E
    if F.KIND == PROFILE:
        if F.KNOTS == 0:
            s += y * _psi(d[None, :], x, F)
        else:
            u = _psi(d, rate, F)[None, :] * y
            at = h * (F.KNOTS + 1) + tl.sum((x < u).to(tl.int32), 0)[None, :]
            slope = tl.load(t.d + at, mask=ok, other=0.0)
            s += (tl.load(t.e + at, mask=ok, other=0.0) + slope * u) * LOG2E
    if F.KIND == DISTANCE:
        at = h * t.size + tl.minimum(d + t.origin, t.size - 1)[None, :]
        s += tl.load(t.a + at, mask=ok, other=0.0) * LOG2E
    return s


# What changes with every token, and what lies in a cache at changing places, must not be compiled for again.
@triton.jit(do_not_specialize=["Tk", "first", "t_q", "t_k", "t_g", "t_size", "TA", "TB", "TC"])
def partial(
    Q, K, V, Bias, Real, Count, Out, Part, Top, Sum, TA, TB, TC, TD, TE, t_q, t_k, t_g, t_size, t_origin, q_b, q_h,
    q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, bias_b, H, GROUP, Tq, Tk, c2, first, stretch, ALONE: tl.constexpr,
    WHOLE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Of each row and stretch of the keys from `first` on the sum of the values, `Part` [B, H, Tq, stretches, DP], the
    largest score and the sum of the weights; or, if one stretch is the WHOLE of them, the output. ALONE: there is one
    row, and no term of others. `Real` [B, Tk]: whether a key is none of padding; `Count` [B, Tk]: how many are not, up
    to it."""
    n = tl.program_id(0)
    HKV = H // GROUP
    b = (tl.program_id(1) // HKV).to(tl.int64)
    hk = (tl.program_id(1) % HKV).to(tl.int64)
    t = Term(TA, TB, TC, TD, TE, TA, t_q, t_k, t_g, t_g, t_size, t_origin)  # no first queries
    r = tl.arange(0, F.BM)  # row r is query r % Tq of head r // Tq of the group
    e = tl.arange(0, F.DP)
    real = r < GROUP * Tq
    h = hk * GROUP + tl.where(real, r // Tq, 0)
    ok_q = real[:, None] & (e[None, :] < F.D)
    q = tl.load(Q + b * q_b + h[:, None] * q_h + (r % Tq)[:, None] * q_t + e[None, :], mask=ok_q, other=0.0)
    rows: tl.constexpr = 1 if ALONE else F.BM
    own = tl.arange(0, rows)[:, None]
    shown = own < GROUP * Tq
    own = hk * GROUP + tl.where(shown, own // Tq, 0)
    x, y = _of_rows(own, shown, b, t, F)
    rate = tl.load(TA) if F.KNOTS > 0 else 0.0  # that all heads share
    K += b * k_b + hk * k_h
    V += b * v_b + hk * v_h
    Bias += b * bias_b
    acc = _zeros(F.BM, F.DP)
    top = _nothing(F.BM)
    total = tl.zeros_like(top)
    if F.META:
        Real += b * Tk
        Count += b * Tk
        last = tl.load(Count + Tk - 1)
        seen = tl.load(Real + Tk - 1) != 0  # a query that is padding sees nothing
    begin = first + n * stretch
    for start in range(begin, tl.minimum(begin + stretch, Tk), F.BN):
        j = start + tl.arange(0, F.BN)
        ok = j < Tk
        d = tl.maximum(Tk - 1 - j, 0)
        if F.META:
            d = tl.maximum(last - tl.load(Count + j, mask=ok, other=0), 0)
            ok = ok & seen & (tl.load(Real + j, mask=ok, other=0) != 0)
        if F.WINDOW > 0:
            ok = ok & (d < F.WINDOW)
        at = j[:, None].to(tl.int64)
        ok_k = ok[:, None] & (e[None, :] < F.D)
        k = tl.load(K + at * k_t + e[None, :], mask=ok_k, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = _add_row(s, x, y, rate, own, shown & ok[None, :], j, d, b, Tk, c2, t, F)
        if F.KIND == ROW:
            at_row = (own * Tq + tl.arange(0, rows)[:, None] % Tq) * Tk
            s += tl.load(Bias + at_row + j[None, :], mask=shown & ok[None, :], other=0.0) * LOG2E
        s = tl.where(ok[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        w = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(w, 1)
        top = higher
        v = tl.load(V + at * v_t + e[None, :], mask=ok_k, other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row with no key gives zeros
        at = b * o_b + h[:, None] * o_h + (r % Tq)[:, None] * o_t + e[None, :]
        tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=ok_q)
    else:
        at = ((b * H + h) * Tq + r % Tq) * tl.num_programs(0) + n
        tl.store(Part + at[:, None] * F.DP + e[None, :], acc, mask=real[:, None])
        tl.store(Top + at, top, mask=real)
        tl.store(Sum + at, total, mask=real)


@triton.jit(do_not_specialize=["stretches"])
def combine(Out, Part, Top, Sum, o_b, o_h, o_t, H, Tq, stretches, N: tl.constexpr, F: tl.constexpr):
    """One row: N stretches at a time, side by side."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, F.DP)
    acc = tl.zeros_like(e).to(tl.float32)
    total = 0.0
    top = float("-inf")
    for first in range(0, stretches, N):
        n = first + tl.arange(0, N)
        at = row * stretches + n
        its = tl.load(Top + at, mask=n < stretches, other=float("-inf"))
        higher = tl.maximum(top, tl.max(its, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        grow = tl.exp2(its - base)
        total = total * fade + tl.sum(tl.load(Sum + at, mask=n < stretches, other=0.0) * grow, 0)
        part = tl.load(Part + at[:, None] * F.DP + e[None, :], mask=(n < stretches)[:, None], other=0.0)
        acc = acc * fade + tl.sum(part * grow[:, None], 0)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    Out += row // (H * Tq) * o_b + row // Tq % H * o_h + row % Tq * o_t
    tl.store(Out + e, acc.to(Out.dtype.element_ty), mask=e < F.D)
