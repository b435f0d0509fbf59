"""Triton kernels: softmax attention with positional terms, forward and backward. They know terms, never an encoding.

Three kernels walk the tiles of the score matrix: `forward` and `backward_q` own a block of queries and walk the keys,
`backward_k` owns a block of keys and walks the queries. A fourth, `backward_distance`,
owns a block diagonal and adds up
the gradient of a by-distance bias along it, over every batch entry. Nothing is summed with atomics: whoever owns a sum
writes it, so results repeat bit by bit.

Conventions
- Scores are in units of log 2 (`exp2` is the hardware's exponential); the host multiplies every bias by log2(e).
- `ref` is the key column of the tile's first query. Distances and potentials enter relative to it, so that float32
  holds them to the last digit however long the text is.
- A constant along a row of scores cancels in the softmax. With CANCEL,
causal slopes and linear potentials are therefore
  added as one value per key; the row's part, `_row_constant`, is put back into the saved log-sum-exp, which is the true
  one. float32 inputs do without: the detour costs their last digits.
- Per-query vectors reach `_bias` in the shape of the tile ([BM, 1] or, in `backward_k`, [1, BM]), so that one function
  serves both orientations.
- No branch for the interpreter: what runs on a CPU with TRITON_INTERPRET=1 is what runs on the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
SKEW = tl.constexpr(16)  # shifted copies of a by-distance table, see `strip` in fused.py


@triton.jit
def _row_constant(fi, si, sref, gi, slope, SLOPE: tl.constexpr, GATED: tl.constexpr):
    """With CANCEL, what `_bias` leaves out per row: the true score is `_bias`'s minus this."""
    if SLOPE:
        r = slope * fi
    else:
        r = si - sref
        r = r * gi if GATED else r * LOG2E
    return r


@triton.jit
def _log2(x, EXACT: tl.constexpr):
    """log2 of x >= 1. With 16-bit inputs a polynomial that is off by 2e-6 will do, and is cheaper."""
    if EXACT:
        return tl.log2(x)
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F2AAAAB) & -8388608  # x = m * 2^e with m in [2/3, 4/3)
    f = (bits - power).to(tl.float32, bitcast=True) - 1.0
    e = ((power >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    y = -0.29101085662841797 * f + 0.33288511633872986
    y = y * f - 0.3566596210002899
    y = y * f + 0.4784080982208252
    y = y * f - 0.7214409112930298
    y = y * f + 1.442728042602539
    return y * f + e


@triton.jit
def _knots_below(Knots, u, KNOTS: tl.constexpr, KP: tl.constexpr):
    n = tl.arange(0, KP)
    t = tl.load(Knots + n, mask=n < KNOTS, other=float("inf"))
    return tl.sum((t < u).to(tl.int32), 0)


@triton.jit
def _pieces_in(Knots, near, far, rate, rho_lo, rho_hi, CAUSAL: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr):
    """Knots below the smallest and below the largest u of a tile whose distances run from `near` to `far`."""
    r0 = 0
    r1 = 0
    if KNOTS > 0:
        a = near.to(tl.float32)
        b = far.to(tl.float32)
        lo = tl.maximum(a, 0.0)
        hi = tl.maximum(b, 0.0)
        if not CAUSAL:
            lo = tl.maximum(lo, -b)
            hi = tl.maximum(hi, -a)
        # The strip's logarithms may be float16: widen the range, a knot too many costs nothing but time.
        r0 = _knots_below(Knots, tl.log2(rate * lo + 1.0) * rho_lo * 0.999 - 1e-6, KNOTS, KP)
        r1 = _knots_below(Knots, tl.log2(rate * hi + 1.0) * rho_hi * 1.001 + 1e-6, KNOTS, KP)
    return r0, r1


@triton.jit
def _profile(u, Knots, PSlope, POffset, p, r0, r1, KNOTS: tl.constexpr):
    """The piecewise linear function at u (log 2 units); of its knots, r0 .. r1-1 lie inside the tile's range."""
    b = tl.load(POffset + p + r0) + tl.load(PSlope + p + r0) * u
    if r1 > r0:
        for n in tl.static_range(KNOTS):
            if r0 + n < r1:
                k = r0 + n
                ds = tl.load(PSlope + p + k + 1) - tl.load(PSlope + p + k)
                do = tl.load(POffset + p + k + 1) - tl.load(POffset + p + k)
                b += tl.where(u > tl.load(Knots + k), ds * u + do, 0.0)
    return b


@triton.jit
def _profile_slope(u, Knots, PSlope, p, r0, r1, KNOTS: tl.constexpr):
    """Its derivative by u."""
    g = u * 0.0 + tl.load(PSlope + p + r0)
    if r1 > r0:
        for n in tl.static_range(KNOTS):
            if r0 + n < r1:
                k = r0 + n
                ds = tl.load(PSlope + p + k + 1) - tl.load(PSlope + p + k)
                g += tl.where(u > tl.load(Knots + k), ds, 0.0)
    return g


@triton.jit
def _bias(
    s, fi, fj, si, sj, sref, gi, rho, slope, rate, strip, far_value, Knots, PSlope, POffset, p, r0, r1,
    CAUSAL: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr, SLOPE: tl.constexpr, POT: tl.constexpr,
    GATED: tl.constexpr,
    PROFILE: tl.constexpr, KNOTS: tl.constexpr, DIST: tl.constexpr,
):  # fmt: skip
    """Scores s of a tile plus every term, less what is constant along a row (`_row_constant`)."""
    if SLOPE:
        if CANCEL:
            s += slope * fj
        elif CAUSAL:
            s -= slope * (fi - fj)
        else:
            s -= slope * tl.abs(fi - fj)
    if POT == 1:
        if CANCEL:
            gap = sref - sj
        elif CAUSAL:
            gap = si - sj
        else:
            gap = tl.abs(si - sj)
        s -= gi * gap if GATED else gap * LOG2E
    if POT == 2:
        gap = si - sj
        log = _log2(gap * gap + 1.0, EXACT)
        s -= gi * (log * LN2) if GATED else log
    if PROFILE:
        if KNOTS == 0:
            s += slope * (strip * rho)
        else:
            s += _profile(strip * rho, Knots, PSlope, POffset, p, r0, r1, KNOTS)
    if DIST == 1:
        s += strip
    if DIST == 2:
        s += far_value
    return s


@triton.jit
def _strip(Strip, h, mcol, n0, r, c, zero, length, per_head, CLAMP: tl.constexpr):
    """A tile of a by-distance table. `Strip[h, a, y]` holds distance `a - (y - zero)`, so the rows of a tile are
    contiguous and `n0 - mcol`, a multiple of 16 as a rule, keeps them aligned. r and c carry the tile's shape."""
    y = zero + (n0 - mcol) + c - (r // SKEW) * SKEW
    if CLAMP:
        y = tl.maximum(y, 0)  # with documents or a window far tiles come here too; column 0 holds the far value
    return tl.load(Strip + h * per_head + (r % SKEW) * length + y).to(tl.float32)


@triton.jit
def _strip_across(Strip, h, mcol, n0, r, c, zero, length, per_head, CLAMP: tl.constexpr):
    """The same for a tile that lies across, [keys, queries]: the second half of a head's strip runs the other way."""
    y = length - zero + (mcol - n0) + r - (c // SKEW) * SKEW
    if CLAMP:
        y = tl.minimum(y, length - 1)
    return tl.load(Strip + h * per_head + (SKEW + c % SKEW) * length + y).to(tl.float32)


@triton.jit
def _visible(i, j, klen, other, lo, hi, CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr):
    """lo and hi are the document borders of the block that is owned, `other` the index of the one that is walked."""
    ok = j < klen
    if CAUSAL:
        ok = ok & (j <= i)
    else:
        ok = ok & (i >= 0)
    if HAS_DOCS:
        ok = ok & (other >= lo) & (other < hi)
    if WINDOW > 0:
        ok = ok & (i - j < WINDOW) & (j - i < WINDOW)
    return ok


@triton.jit
def _fold(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] summed to [M, 8] over columns that one thread holds: no traffic between threads inside a loop. The last
    sum, over 8, is taken once behind it."""
    return tl.sum(tl.reshape(x, (M, N // 8, 8)), 1)


@triton.jit
def _forward_tiles(
    acc, l, m, q, K, V, k_base, v_base, k_t, v_t, begin, end, mcol, klen, i, fi, si, sref, gi, rho, rho_lo, rho_hi,
    doc_lo, doc_hi, slope, rate, far_value, SK, sk_base, Strip, strip_zero, strip_len, per_head, Knots, PSlope,
    POffset, h, p, c2,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, DIST: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr,
    SLOPE: tl.constexpr, POT: tl.constexpr,
    GATED: tl.constexpr, PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    e = tl.arange(0, DP)
    # 64-bit arithmetic on a tile's base alone: offsets inside it are small, and registers are dear.
    k_at = n[:, None] * k_t + e[None, :]
    v_at = n[:, None] * v_t + e[None, :]
    for n0 in range(begin, end, BN):
        Kn = K + k_base + tl.cast(n0, tl.int64) * k_t
        Vn = V + v_base + tl.cast(n0, tl.int64) * v_t
        j = n0 + n
        ok_k = (j[:, None] < klen) if MASKED else (j[:, None] >= 0)
        if D != DP:
            ok_k = ok_k & (e[None, :] < D)
        if MASKED or D != DP:
            k = tl.load(Kn + k_at, mask=ok_k, other=0.0)
        else:
            k = tl.load(Kn + k_at)
        s = tl.dot(q, tl.trans(k), input_precision=PREC) * c2
        fj = (j - mcol).to(tl.float32)[None, :]
        sj = fj
        if POT > 0:
            sj = tl.load(SK + sk_base + j, mask=j < klen, other=0.0)[None, :]
        r0, r1 = _pieces_in(Knots, mcol - (n0 + BN - 1), mcol + BM - 1 - n0, rate, rho_lo, rho_hi, CAUSAL, KNOTS, KP)
        strip = s
        if DIST == 1 or PROFILE:
            strip = _strip(Strip, h, mcol, n0, tl.arange(0, BM)[:, None], n[None, :], strip_zero, strip_len,
                per_head, HAS_DOCS or WINDOW > 0)
        s = _bias(s, fi, fj, si, sj, sref, gi, rho, slope, rate, strip, far_value, Knots, PSlope, POffset, p, r0, r1,
                  CAUSAL, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, DIST)  # fmt: skip
        if MASKED:
            s = tl.where(_visible(i, j[None, :], klen, j[None, :], doc_lo, doc_hi, CAUSAL, HAS_DOCS, WINDOW), s,
                float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = top
        if MASKED:
            base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
        w = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        l = l * fade[:, None] + _fold(w, BM, BN)
        m = top
        if MASKED or D != DP:
            v = tl.load(Vn + v_at, mask=ok_k, other=0.0)
        else:
            v = tl.load(Vn + v_at)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision=PREC)
    return acc, l, m


@triton.jit
def _query_range(mcol, klen, first_doc, last_doc, reach, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
                 HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, DIST: tl.constexpr):  # fmt: skip
    """For a block of queries: where the keys begin; where tiles stop being far (one constant for all distances); where
    they stop being visible throughout; where they end. All but the last are multiples of BN."""
    begin = 0
    end = klen
    full = klen // BN * BN
    if CAUSAL:
        end = tl.minimum(end, mcol + BM)
        full = tl.minimum(full, (mcol + 1) // BN * BN)
    if HAS_DOCS:
        begin = tl.maximum(begin, first_doc // BN * BN)
        end = tl.minimum(end, last_doc)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(mcol - WINDOW + 1, 0) // BN * BN)
        if not CAUSAL:
            end = tl.minimum(end, mcol + BM + WINDOW)
    if HAS_DOCS or WINDOW > 0:
        full = begin
    far = begin
    if DIST and CAUSAL:
        far = tl.minimum(full, tl.maximum(mcol - reach + 1, 0) // BN * BN)
        far = tl.maximum(far, begin)
    return begin, far, full, end


@triton.jit
def forward(
    Q, K, V, O, Lse, Meta, Docs, Slopes, SQ, SK, G, Rate, Rho, Knots, PSlope, POffset, Strip, Far,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, s_b, g_b, rho_b,
    H, GROUP, Tq, Tk, q_off, c2, reach, strip_zero, strip_len, per_head,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_META: tl.constexpr,
    HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr, SLOPE: tl.constexpr,
    POT: tl.constexpr, GATED: tl.constexpr,
    PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, DIST: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # Long rows first: the last blocks of a causal matrix have the most to do.
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    klen = Tk
    if HAS_META:
        q_off = tl.load(Meta + b * 2)
        klen = tl.load(Meta + b * 2 + 1)
    mcol = q_off + m0
    r = m0 + tl.arange(0, BM)
    i = (mcol + tl.arange(0, BM))[:, None]
    e = tl.arange(0, DP)
    ok_q = r[:, None] < Tq
    if D != DP:
        ok_q = ok_q & (e[None, :] < D)
    q = tl.load(Q + b * q_b + h * q_h + r[:, None].to(tl.int64) * q_t + e[None, :], mask=ok_q, other=0.0)

    fi = tl.arange(0, BM).to(tl.float32)[:, None]
    si = fi
    gi = fi
    rho = 1.0
    rho_lo = 1.0
    rho_hi = 1.0
    sref = 0.0
    slope = 0.0
    rate = 0.0
    far_value = 0.0
    if SLOPE:
        slope = tl.load(Slopes + h)
    if PROFILE and KNOTS == 0:
        slope = tl.load(PSlope + h)
    if POT > 0:
        si = tl.load(SQ + b * s_b * Tq + h * Tq + r, mask=r < Tq, other=0.0)[:, None]
        sref = tl.load(SQ + b * s_b * Tq + h * Tq + m0)
        if GATED:
            gi = tl.load(G + b * g_b * Tq + h * Tq + r, mask=r < Tq, other=0.0)[:, None]
    if PROFILE:
        rate = tl.load(Rate + h)
        rho1 = tl.load(Rho + b * rho_b * Tq + r, mask=r < Tq, other=0.0)
        rho = rho1[:, None]
        rho_lo = tl.min(rho1, 0)
        rho_hi = tl.max(rho1, 0)
    if DIST:
        far_value = tl.load(Far + h)
    doc_lo = 0
    doc_hi = Tk
    first_doc = 0
    last_doc = Tk
    if HAS_DOCS:
        doc_lo = tl.load(Docs + i, mask=i < Tk, other=0)
        doc_hi = tl.load(Docs + Tk + i, mask=i < Tk, other=0)
        first_doc = tl.load(Docs + mcol)
        last_doc = tl.load(Docs + Tk + tl.minimum(mcol + BM, Tk) - 1)

    begin, far, full, end = _query_range(mcol, klen, first_doc, last_doc, reach, BM, BN, CAUSAL, HAS_DOCS, WINDOW, DIST)
    acc = tl.zeros((BM, DP), tl.float32)
    l = tl.zeros((BM, 8), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    k_base = b * k_b + (h // GROUP) * k_h
    v_base = b * v_b + (h // GROUP) * v_h
    sk_base = b * s_b * Tk + h * Tk
    p = h * (KNOTS + 1)
    if DIST and CAUSAL:
        acc, l, m = _forward_tiles(
            acc, l, m, q, K, V, k_base, v_base, k_t, v_t, begin, far, mcol, klen, i, fi, si, sref, gi, rho, rho_lo,
            rho_hi,
            doc_lo, doc_hi, slope, rate, far_value, SK, sk_base, Strip, strip_zero, strip_len, per_head, Knots,
            PSlope, POffset, h, p,
            c2, D, DP, BM, BN, False, 2, CAUSAL, HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS,
            KP, PREC)  # fmt: skip
    if not (HAS_DOCS or WINDOW > 0):
        acc, l, m = _forward_tiles(
            acc, l, m, q, K, V, k_base, v_base, k_t, v_t, far, full, mcol, klen, i, fi, si, sref, gi, rho, rho_lo,
            rho_hi,
            doc_lo, doc_hi, slope, rate, far_value, SK, sk_base, Strip, strip_zero, strip_len, per_head, Knots,
            PSlope, POffset, h, p,
            c2, D, DP, BM, BN, False, DIST, CAUSAL, HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE,
            KNOTS, KP, PREC)  # fmt: skip
    acc, l, m = _forward_tiles(
        acc, l, m, q, K, V, k_base, v_base, k_t, v_t, full, end, mcol, klen, i, fi, si, sref, gi, rho, rho_lo, rho_hi,
        doc_lo, doc_hi, slope, rate, far_value, SK, sk_base, Strip, strip_zero, strip_len, per_head, Knots, PSlope,
        POffset, h, p,
        c2, D, DP, BM, BN, True, DIST, CAUSAL, HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS,
        KP, PREC)  # fmt: skip

    l = tl.sum(l, 1)
    empty = l == 0.0
    acc = acc / tl.where(empty, 1.0, l)[:, None]
    lse = tl.where(empty, float("inf"), m + tl.log2(tl.where(empty, 1.0, l)))
    if CANCEL and (SLOPE or POT == 1):
        lse -= tl.sum(_row_constant(fi, si, sref, gi, slope, SLOPE, GATED), 1)
    tl.store(O + b * o_b + h * o_h + r[:, None].to(tl.int64) * o_t + e[None, :], acc.to(O.dtype.element_ty), mask=ok_q)
    tl.store(Lse + (b * H + h) * Tq + r, lse, mask=r < Tq)


@triton.jit
def _add_to(P, x):
    """Add to a sum this program owns."""
    tl.store(P, tl.load(P) + x)


@triton.jit
def _backward_q_tiles(
    dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho, q, do, delta, lse, K, V, k_base, v_base, k_t,
    v_t, begin, end, mcol, klen,
    i, fi, si, sref, gi, rho, rho_lo, rho_hi, doc_lo, doc_hi, slope, rate, far_value, SK, sk_base, Strip, strip_zero,
    strip_len, per_head, Knots, PSlope, POffset, h, p, c2,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, DIST: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr,
    SLOPE: tl.constexpr, POT: tl.constexpr,
    GATED: tl.constexpr, PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, GRAD: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    e = tl.arange(0, DP)
    # 64-bit arithmetic on a tile's base alone: offsets inside it are small, and registers are dear.
    k_at = n[:, None] * k_t + e[None, :]
    v_at = n[:, None] * v_t + e[None, :]
    for n0 in range(begin, end, BN):
        Kn = K + k_base + tl.cast(n0, tl.int64) * k_t
        Vn = V + v_base + tl.cast(n0, tl.int64) * v_t
        j = n0 + n
        ok_k = (j[:, None] < klen) if MASKED else (j[:, None] >= 0)
        if D != DP:
            ok_k = ok_k & (e[None, :] < D)
        if MASKED or D != DP:
            k = tl.load(Kn + k_at, mask=ok_k, other=0.0)
            v = tl.load(Vn + v_at, mask=ok_k, other=0.0)
        else:
            k = tl.load(Kn + k_at)
            v = tl.load(Vn + v_at)
        s = tl.dot(q, tl.trans(k), input_precision=PREC) * c2
        dp = tl.dot(do, tl.trans(v), input_precision=PREC)
        fj = (j - mcol).to(tl.float32)[None, :]
        sj = fj
        if POT > 0:
            sj = tl.load(SK + sk_base + j, mask=j < klen, other=0.0)[None, :]
        r0, r1 = _pieces_in(Knots, mcol - (n0 + BN - 1), mcol + BM - 1 - n0, rate, rho_lo, rho_hi, CAUSAL, KNOTS, KP)
        strip = s
        if DIST == 1 or PROFILE:
            strip = _strip(Strip, h, mcol, n0, tl.arange(0, BM)[:, None], n[None, :], strip_zero, strip_len,
                per_head, HAS_DOCS or WINDOW > 0)
        s = _bias(s, fi, fj, si, sj, sref, gi, rho, slope, rate, strip, far_value, Knots, PSlope, POffset, p, r0, r1,
                  CAUSAL, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, DIST)  # fmt: skip
        w = tl.exp2(s - lse[:, None])
        if MASKED:
            w = tl.where(_visible(i, j[None, :], klen, j[None, :], doc_lo, doc_hi, CAUSAL, HAS_DOCS, WINDOW), w, 0.0)
        ds = w * (dp - delta[:, None])
        if GRAD:
            rowsum += _fold(ds, BM, BN)
            if POT == 1:
                gap = (sj - sref) if CANCEL else (sj - si)
                if not CAUSAL:
                    sign = tl.where(gap < 0, 1.0, tl.where(gap > 0, -1.0, 0.0))
                    by_query += _fold(ds * sign, BM, BN)
                    of_query += _fold(w * sign, BM, BN)
                    gap = -tl.abs(gap)
                if GATED:
                    by_gate += _fold(ds * gap, BM, BN)
                    of_gate += _fold(w * gap, BM, BN)
            if POT == 2:
                gap = si - sj
                log = _log2(gap * gap + 1.0, EXACT)
                pull = gap * tl.exp2(-log)
                by_query += _fold(ds * pull, BM, BN)
                of_query += _fold(w * pull, BM, BN)
                if GATED:
                    by_gate -= _fold(ds * log, BM, BN)
                    of_gate -= _fold(w * log, BM, BN)
            if PROFILE and KNOTS > 0:
                by = strip * _profile_slope(strip * rho, Knots, PSlope, p, r0, r1, KNOTS)
                by_rho += _fold(ds * by, BM, BN)
                of_rho += _fold(w * by, BM, BN)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PREC)
    return dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho


@triton.jit
def backward_q(
    Q, K, V, O, DO, Lse, Local, Delta, DQ, ByQuery, ByGate, ByRho, Meta, Docs, Slopes, SQ, SK, G, Rate, Rho, Knots,
    PSlope, POffset,
    Strip, Far,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, s_b, g_b, rho_b,
    H, GROUP, Tq, Tk, q_off, c2, scale, reach, strip_zero, strip_len, per_head,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_META: tl.constexpr,
    HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr, SLOPE: tl.constexpr,
    POT: tl.constexpr, GATED: tl.constexpr,
    PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, DIST: tl.constexpr, GRAD: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dQ, the delta that the other kernels use, and the gradients of what belongs to a row [B, H, Tq]: potentials at
    the queries, gates, rho."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    klen = Tk
    if HAS_META:
        q_off = tl.load(Meta + b * 2)
        klen = tl.load(Meta + b * 2 + 1)
    mcol = q_off + m0
    r = m0 + tl.arange(0, BM)
    r64 = r[:, None].to(tl.int64)
    i = (mcol + tl.arange(0, BM))[:, None]
    e = tl.arange(0, DP)
    ok_q = r[:, None] < Tq
    if D != DP:
        ok_q = ok_q & (e[None, :] < D)
    q = tl.load(Q + b * q_b + h * q_h + r64 * q_t + e[None, :], mask=ok_q, other=0.0)
    do = tl.load(DO + b * do_b + h * do_h + r64 * do_t + e[None, :], mask=ok_q, other=0.0)
    o = tl.load(O + b * o_b + h * o_h + r64 * o_t + e[None, :], mask=ok_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row = (b * H + h) * Tq + r

    fi = tl.arange(0, BM).to(tl.float32)[:, None]
    si = fi
    gi = fi
    rho = 1.0
    rho_lo = 1.0
    rho_hi = 1.0
    sref = 0.0
    slope = 0.0
    rate = 0.0
    far_value = 0.0
    if SLOPE:
        slope = tl.load(Slopes + h)
    if PROFILE and KNOTS == 0:
        slope = tl.load(PSlope + h)
    if POT > 0:
        si = tl.load(SQ + b * s_b * Tq + h * Tq + r, mask=r < Tq, other=0.0)[:, None]
        sref = tl.load(SQ + b * s_b * Tq + h * Tq + m0)
        if GATED:
            gi = tl.load(G + b * g_b * Tq + h * Tq + r, mask=r < Tq, other=0.0)[:, None]
    if PROFILE:
        rate = tl.load(Rate + h)
        rho1 = tl.load(Rho + b * rho_b * Tq + r, mask=r < Tq, other=0.0)
        rho = rho1[:, None]
        rho_lo = tl.min(rho1, 0)
        rho_hi = tl.max(rho1, 0)
    if DIST:
        far_value = tl.load(Far + h)
    doc_lo = 0
    doc_hi = Tk
    first_doc = 0
    last_doc = Tk
    if HAS_DOCS:
        doc_lo = tl.load(Docs + i, mask=i < Tk, other=0)
        doc_hi = tl.load(Docs + Tk + i, mask=i < Tk, other=0)
        first_doc = tl.load(Docs + mcol)
        last_doc = tl.load(Docs + Tk + tl.minimum(mcol + BM, Tk) - 1)
    lse = tl.load(Lse + row, mask=r < Tq, other=float("inf"))
    if CANCEL and (SLOPE or POT == 1):
        lse += tl.sum(_row_constant(fi, si, sref, gi, slope, SLOPE, GATED), 1)
        tl.store(Local + row, lse, mask=r < Tq)

    begin, far, full, end = _query_range(mcol, klen, first_doc, last_doc, reach, BM, BN, CAUSAL, HAS_DOCS, WINDOW, DIST)
    dq = tl.zeros((BM, DP), tl.float32)
    zero = tl.zeros((BM, 8), tl.float32)
    rowsum = zero
    by_query = zero
    of_query = zero
    by_gate = zero
    of_gate = zero
    by_rho = zero
    of_rho = zero
    k_base = b * k_b + (h // GROUP) * k_h
    v_base = b * v_b + (h // GROUP) * v_h
    sk_base = b * s_b * Tk + h * Tk
    p = h * (KNOTS + 1)
    if DIST and CAUSAL:
        dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho = _backward_q_tiles(
            dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho, q, do, delta, lse, K, V, k_base,
            v_base, k_t, v_t, begin, far,
            mcol, klen, i, fi, si, sref, gi, rho, rho_lo, rho_hi, doc_lo, doc_hi, slope, rate, far_value, SK,
            sk_base, Strip,
            strip_zero, strip_len, per_head, Knots, PSlope, POffset, h, p, c2, D, DP, BM, BN, False, 2, CAUSAL,
            HAS_DOCS,
            WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, KP, GRAD, PREC)  # fmt: skip
    if not (HAS_DOCS or WINDOW > 0):
        dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho = _backward_q_tiles(
            dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho, q, do, delta, lse, K, V, k_base,
            v_base, k_t, v_t, far, full,
            mcol, klen, i, fi, si, sref, gi, rho, rho_lo, rho_hi, doc_lo, doc_hi, slope, rate, far_value, SK,
            sk_base, Strip,
            strip_zero, strip_len, per_head, Knots, PSlope, POffset, h, p, c2, D, DP, BM, BN, False, DIST, CAUSAL,
            HAS_DOCS,
            WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, KP, GRAD, PREC)  # fmt: skip
    dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho = _backward_q_tiles(
        dq, rowsum, by_query, of_query, by_gate, of_gate, by_rho, of_rho, q, do, delta, lse, K, V, k_base, v_base,
        k_t, v_t, full, end,
        mcol, klen, i, fi, si, sref, gi, rho, rho_lo, rho_hi, doc_lo, doc_hi, slope, rate, far_value, SK, sk_base,
        Strip,
        strip_zero, strip_len, per_head, Knots, PSlope, POffset, h, p, c2, D, DP, BM, BN, True, DIST, CAUSAL, HAS_DOCS,
        WINDOW, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, KP, GRAD, PREC)  # fmt: skip

    dq = dq * scale
    tl.store(DQ + b * dq_b + h * dq_h + r64 * dq_t + e[None, :], dq.to(DQ.dtype.element_ty), mask=ok_q)
    rowsum = tl.sum(rowsum, 1)
    # Rows of dS sum to zero. What they sum to here is the error of delta, which came from a rounded output: with it
    # delta is put right for the other kernels, and the sums above for that error times the expectation of their factor.
    tl.store(Delta + row, delta + rowsum, mask=r < Tq)
    if GRAD:
        if POT == 2 or (POT == 1 and not CAUSAL):
            tl.store(ByQuery + row, tl.sum(by_query, 1) - rowsum * tl.sum(of_query, 1), mask=r < Tq)
        if GATED:
            tl.store(ByGate + row, tl.sum(by_gate, 1) - rowsum * tl.sum(of_gate, 1), mask=r < Tq)
        if PROFILE and KNOTS > 0:
            tl.store(ByRho + row, tl.sum(by_rho, 1) - rowsum * tl.sum(of_rho, 1), mask=r < Tq)


@triton.jit
def _backward_k_tiles(
    dk, dv, key_sum, rate_sum, k, v, Q, DO, q_base, do_base, q_t, do_t, Lse, Delta, row_base, begin, end, n0, q_off,
    klen, Tq, j, fj, sj, sref,
    doc_lo, doc_hi, slope, rate, far_value, SQ, G, Rho, sq_base, g_base, rho_base, Strip, strip_zero, strip_len,
    per_head, Knots,
    PSlope, POffset, Pieces, h, p, c2,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QM: tl.constexpr, MASKED: tl.constexpr,
    DIST: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr,
    SLOPE: tl.constexpr, POT: tl.constexpr,
    GATED: tl.constexpr, PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, KEYGRAD: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    a = tl.arange(0, BM)
    e = tl.arange(0, DP)
    q_at = a[:, None] * q_t + e[None, :]
    do_at = a[:, None] * do_t + e[None, :]
    for m0 in range(begin, end, BM):
        r = m0 + a
        mcol = q_off + m0
        ok_q = r[:, None] < Tq
        if D != DP:
            ok_q = ok_q & (e[None, :] < D)
        q = tl.load(Q + q_base + tl.cast(m0, tl.int64) * q_t + q_at, mask=ok_q, other=0.0)
        do = tl.load(DO + do_base + tl.cast(m0, tl.int64) * do_t + do_at, mask=ok_q, other=0.0)
        lse = tl.load(Lse + row_base + r, mask=r < Tq, other=float("inf"))[None, :]
        delta = tl.load(Delta + row_base + r, mask=r < Tq, other=0.0)[None, :]
        s = tl.dot(k, tl.trans(q), input_precision=PREC) * c2
        fi = (mcol - n0 + a).to(tl.float32)[None, :]
        si = fi
        gi = fi
        rho = 1.0
        rho_lo = 1.0
        rho_hi = 1.0
        if POT > 0:
            if POT == 2 or not CANCEL:
                si = tl.load(SQ + sq_base + r, mask=r < Tq, other=0.0)[None, :]
            if GATED:
                gi = tl.load(G + g_base + r, mask=r < Tq, other=0.0)[None, :]
        if PROFILE:
            rho1 = tl.load(Rho + rho_base + r, mask=r < Tq, other=0.0)
            rho = rho1[None, :]
            if KNOTS > 0:
                rho_lo = tl.min(rho1, 0)
                rho_hi = tl.max(rho1, 0)
        r0, r1 = _pieces_in(Knots, mcol - (n0 + BN - 1), mcol + BM - 1 - n0, rate, rho_lo, rho_hi, CAUSAL, KNOTS, KP)
        strip = s
        if DIST == 1 or PROFILE:
            strip = _strip_across(Strip, h, mcol, n0, a[None, :], tl.arange(0, BN)[:, None], strip_zero, strip_len,
                per_head,
                                  HAS_DOCS or WINDOW > 0)  # fmt: skip
        s = _bias(s, fi, fj, si, sj, sref, gi, rho, slope, rate, strip, far_value, Knots, PSlope, POffset, p, r0, r1,
                  CAUSAL, CANCEL, EXACT, SLOPE, POT, GATED, PROFILE, KNOTS, DIST)  # fmt: skip
        if CANCEL and SLOPE:
            lse += slope * (q_off + m0 // QM * QM - n0)
        if CANCEL and POT == 1:
            moved = tl.load(SQ + sq_base + m0 // QM * QM) - sref
            lse += moved * gi if GATED else moved * LOG2E
        w = tl.exp2(s - lse)
        if MASKED:
            i = mcol + a[None, :]
            w = tl.where(_visible(i, j, klen, i, doc_lo, doc_hi, CAUSAL, HAS_DOCS, WINDOW), w, 0.0)
        dv = tl.dot(w.to(do.dtype), do, dv, input_precision=PREC)
        dp = tl.dot(v, tl.trans(do), input_precision=PREC)
        ds = w * (dp - delta)
        if KEYGRAD and PROFILE and KNOTS > 0:
            ds = tl.where(j < klen, ds, 0.0)  # pieces are summed over keys, so keys that are not there must not count
        if KEYGRAD:
            if SLOPE:
                if CAUSAL:
                    key_sum += _fold(ds * (fi - fj), BN, BM)
                else:
                    key_sum += _fold(ds * tl.abs(fi - fj), BN, BM)
            if POT > 0:
                weighted = ds
                if GATED:
                    weighted = ds * gi
                if POT == 2:
                    gap = si - sj
                    weighted = weighted * gap * tl.exp2(-_log2(gap * gap + 1.0, EXACT))
                elif not CAUSAL:
                    gap = si - sj
                    weighted = tl.where(gap > 0, weighted, tl.where(gap < 0, -weighted, 0.0))
                key_sum += _fold(weighted, BN, BM)
            if PROFILE:
                u = strip * rho
                if KNOTS == 0:
                    # d / (1 + rate d) = (1 - 1 / (1 + rate d)) / rate, and the rows of dS sum to zero.
                    key_sum += _fold(ds * u, BN, BM)
                    rate_sum -= _fold(ds * rho * tl.exp2(-strip), BN, BM)
                else:
                    _add_to(Pieces + r0, tl.sum(tl.sum(ds * u, 1), 0))
                    _add_to(Pieces + KNOTS + 1 + r0, tl.sum(tl.sum(ds, 1), 0))
                    if r1 > r0:
                        for x in tl.static_range(KNOTS):
                            if r0 + x < r1:
                                above = tl.where(u > tl.load(Knots + r0 + x), ds, 0.0)
                                of_slope = tl.sum(tl.sum(above * u, 1), 0)
                                of_offset = tl.sum(tl.sum(above, 1), 0)
                                _add_to(Pieces + r0 + x, -of_slope)
                                _add_to(Pieces + r0 + x + 1, of_slope)
                                _add_to(Pieces + KNOTS + 1 + r0 + x, -of_offset)
                                _add_to(Pieces + KNOTS + 1 + r0 + x + 1, of_offset)
                    pull = _profile_slope(u, Knots, PSlope, p, r0, r1, KNOTS) * (1.0 - tl.exp2(-strip))
                    rate_sum += _fold(ds * rho * pull, BN, BM)
            if DIST == 2:
                key_sum += _fold(ds, BN, BM)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PREC)
    return dk, dv, key_sum, rate_sum


@triton.jit
def backward_k(
    Q, K, V, DO, Lse, Delta, DK, DV, DKey, DRate, PieceSums, Meta, Docs, Slopes, SQ, SK, G, Rate, Rho, Knots, PSlope,
    POffset, Strip, Far,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, s_b, g_b, rho_b,
    H, GROUP, Tq, Tk, q_off, c2, scale, reach, strip_zero, strip_len, per_head,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, QM: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_META: tl.constexpr,
    HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, CANCEL: tl.constexpr, EXACT: tl.constexpr, SLOPE: tl.constexpr,
    POT: tl.constexpr, GATED: tl.constexpr,
    PROFILE: tl.constexpr, KNOTS: tl.constexpr, KP: tl.constexpr, DIST: tl.constexpr, KEYGRAD: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, and sums of dS over the queries: `DKey` [B, H, Tk] for a
    potential at the keys, or for slopes, a profile without knots or far distances, of which the host takes the sum;
    `DRate`, the same for a profile's rate; `PieceSums` [B, H, blocks, 2, KNOTS + 1] for its pieces. With CANCEL,
    `Lse` is relative to the blocks of QM queries of backward_q, which wrote it so."""
    n0 = tl.program_id(0) * BN
    HKV = H // GROUP
    b = (tl.program_id(1) // HKV).to(tl.int64)
    hk = (tl.program_id(1) % HKV).to(tl.int64)
    klen = Tk
    if HAS_META:
        q_off = tl.load(Meta + b * 2)
        klen = tl.load(Meta + b * 2 + 1)
    j1 = n0 + tl.arange(0, BN)
    j = j1[:, None]
    j64 = j.to(tl.int64)
    e = tl.arange(0, DP)
    ok = j < Tk
    if D != DP:
        ok = ok & (e[None, :] < D)
    k = tl.load(K + b * k_b + hk * k_h + j64 * k_t + e[None, :], mask=ok, other=0.0)
    v = tl.load(V + b * v_b + hk * v_h + j64 * v_t + e[None, :], mask=ok, other=0.0)
    doc_lo = 0
    doc_hi = Tk
    # Queries that see the block: rows begin .. end; up to `full` the mask matters; from `far` on distance is constant.
    begin = 0
    end = Tq
    if HAS_DOCS:
        doc_lo = tl.load(Docs + j, mask=j < Tk, other=0)
        doc_hi = tl.load(Docs + Tk + j, mask=j < Tk, other=0)
        end = tl.minimum(end, tl.load(Docs + Tk + tl.minimum(n0 + BN, Tk) - 1) - q_off)
        begin = tl.maximum(begin, tl.load(Docs + n0) - q_off)
    if CAUSAL:
        begin = tl.maximum(begin, n0 - q_off)
    if WINDOW > 0:
        end = tl.minimum(end, n0 + BN - 1 + WINDOW - q_off)
        if not CAUSAL:
            begin = tl.maximum(begin, n0 - WINDOW + 1 - q_off)
    if n0 >= klen:
        end = 0
    begin = begin // BM * BM
    full = begin
    if CAUSAL:
        full = tl.maximum(begin, (tl.maximum(n0 + BN - 1 - q_off, 0) + BM - 1) // BM * BM)
    if HAS_DOCS or WINDOW > 0:
        full = end
    full = tl.minimum(full, tl.maximum(end, begin))
    far = end
    if DIST and CAUSAL:
        far = (tl.maximum(reach + n0 + BN - 1 - q_off, 0) + BM - 1) // BM * BM
        far = tl.maximum(tl.minimum(far, end), full)

    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        fj = tl.arange(0, BN).to(tl.float32)[:, None]
        sj = fj
        slope = 0.0
        rate = 0.0
        far_value = 0.0
        if SLOPE:
            slope = tl.load(Slopes + h)
        if PROFILE and KNOTS == 0:
            slope = tl.load(PSlope + h)
        if POT > 0:
            sj = tl.load(SK + b * s_b * Tk + h * Tk + j, mask=j < Tk, other=0.0)
        if PROFILE:
            rate = tl.load(Rate + h)
        if DIST:
            far_value = tl.load(Far + h)
        q_base = b * q_b + h * q_h
        do_base = b * do_b + h * do_h
        row_base = (b * H + h) * Tq
        sq_base = b * s_b * Tq + h * Tq
        g_base = b * g_b * Tq + h * Tq
        rho_base = b * rho_b * Tq
        p = h * (KNOTS + 1)
        Pieces = PieceSums + ((b * H + h) * tl.num_programs(0) + tl.program_id(0)) * 2 * (KNOTS + 1)
        key_sum = tl.zeros((BN, 8), tl.float32)
        rate_sum = tl.zeros((BN, 8), tl.float32)
        sref = 0.0
        if POT > 0:
            sref = tl.load(SK + b * s_b * Tk + h * Tk + n0)
        if CAUSAL or HAS_DOCS or WINDOW > 0:
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Q, DO, q_base, do_base, q_t, do_t, Lse, Delta, row_base, begin,
                full, n0, q_off, klen,
                Tq, j, fj, sj, sref, doc_lo, doc_hi, slope, rate, far_value, SQ, G, Rho, sq_base, g_base, rho_base,
                Strip, strip_zero,
                strip_len, per_head, Knots, PSlope, POffset, Pieces, h, p, c2, D, DP, BM, BN, QM, True, DIST, CAUSAL,
                HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE,
                POT, GATED, PROFILE, KNOTS, KP, KEYGRAD, PREC)  # fmt: skip
        if not (HAS_DOCS or WINDOW > 0):
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Q, DO, q_base, do_base, q_t, do_t, Lse, Delta, row_base, full, far,
                n0, q_off, klen,
                Tq, j, fj, sj, sref, doc_lo, doc_hi, slope, rate, far_value, SQ, G, Rho, sq_base, g_base, rho_base,
                Strip, strip_zero,
                strip_len, per_head, Knots, PSlope, POffset, Pieces, h, p, c2, D, DP, BM, BN, QM, False, DIST,
                CAUSAL, HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE,
                POT, GATED, PROFILE, KNOTS, KP, KEYGRAD, PREC)  # fmt: skip
        if DIST and CAUSAL:
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Q, DO, q_base, do_base, q_t, do_t, Lse, Delta, row_base, far, end,
                n0, q_off, klen,
                Tq, j, fj, sj, sref, doc_lo, doc_hi, slope, rate, far_value, SQ, G, Rho, sq_base, g_base, rho_base,
                Strip, strip_zero,
                strip_len, per_head, Knots, PSlope, POffset, Pieces, h, p, c2, D, DP, BM, BN, QM, False, 2, CAUSAL,
                HAS_DOCS, WINDOW, CANCEL, EXACT, SLOPE,
                POT, GATED, PROFILE, KNOTS, KP, KEYGRAD, PREC)  # fmt: skip
        if KEYGRAD:
            # Rows of keys beyond klen were never masked: what they gathered is thrown away here.
            tl.store(DKey + (b * H + h) * Tk + j1, tl.where(j1 < klen, tl.sum(key_sum, 1), 0.0), mask=j1 < Tk)
            if PROFILE:
                tl.store(DRate + (b * H + h) * Tk + j1, tl.where(j1 < klen, tl.sum(rate_sum, 1), 0.0), mask=j1 < Tk)
    dk = tl.where(j < klen, dk * scale, 0.0)
    dv = tl.where(j < klen, dv, 0.0)
    tl.store(DK + b * dk_b + hk * dk_h + j64 * dk_t + e[None, :], dk.to(DK.dtype.element_ty), mask=ok)
    tl.store(DV + b * dv_b + hk * dv_h + j64 * dv_t + e[None, :], dv.to(DV.dtype.element_ty), mask=ok)


@triton.jit
def backward_distance(
    Q, K, V, DO, Lse, Delta, Out, Scratch, Meta, Docs, Strip,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    B, H, GROUP, Tq, Tk, q_off, c2, reach, strip_zero, strip_len, per_head, first,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, KM: tl.constexpr, KN: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_META: tl.constexpr,
    HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sums of dS along the diagonals. One program owns a head and the block diagonal of distances around `delta`, walks
    its tiles over all batch entries (or a share of them) with dS summed in registers,
    and sums the skew once at the end.
    `Out` [H, shares, diagonals, 2 BM]: entry x belongs to distance `delta + x - (BM - 1)`."""
    delta = (first + tl.program_id(0)) * BM
    h = (tl.program_id(1) % H).to(tl.int64)
    share = tl.program_id(1) // H
    shares = tl.num_programs(1) // H
    blocks = tl.cdiv(Tq, BM)
    a = tl.arange(0, BM)
    e = tl.arange(0, DP)
    total = B * blocks
    each = tl.cdiv(total, shares)
    strip = _strip(Strip, h, delta, 0, a[:, None], a[None, :], strip_zero, strip_len, per_head, True)
    acc = tl.zeros((BM, BM), tl.float32)
    for x in range(share * each, tl.minimum(total, (share + 1) * each)):
        b = (x // blocks).to(tl.int64)
        m0 = (x % blocks) * BM
        off = q_off
        klen = Tk
        if HAS_META:
            off = tl.load(Meta + b * 2)
            klen = tl.load(Meta + b * 2 + 1)
        n0 = off + m0 - delta
        r = m0 + a
        j = n0 + a
        ok_q = r[:, None] < Tq
        ok_k = (j[:, None] >= 0) & (j[:, None] < klen)
        if D != DP:
            ok_q = ok_q & (e[None, :] < D)
            ok_k = ok_k & (e[None, :] < D)
        r64 = r[:, None].to(tl.int64)
        j64 = j[:, None].to(tl.int64)
        q = tl.load(Q + b * q_b + h * q_h + r64 * q_t + e[None, :], mask=ok_q, other=0.0)
        do = tl.load(DO + b * do_b + h * do_h + r64 * do_t + e[None, :], mask=ok_q, other=0.0)
        k = tl.load(K + b * k_b + (h // GROUP) * k_h + j64 * k_t + e[None, :], mask=ok_k, other=0.0)
        v = tl.load(V + b * v_b + (h // GROUP) * v_h + j64 * v_t + e[None, :], mask=ok_k, other=0.0)
        lse = tl.load(Lse + (b * H + h) * Tq + r, mask=r < Tq, other=float("inf"))
        dlt = tl.load(Delta + (b * H + h) * Tq + r, mask=r < Tq, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PREC) * c2 + strip
        dp = tl.dot(do, tl.trans(v), input_precision=PREC)
        i = (off + r)[:, None]
        lo = 0
        hi = Tk
        if HAS_DOCS:
            lo = tl.load(Docs + i, mask=i < Tk, other=0)
            hi = tl.load(Docs + Tk + i, mask=i < Tk, other=0)
        ok = _visible(i, j[None, :], klen, j[None, :], lo, hi, CAUSAL, HAS_DOCS, WINDOW) & (j[None, :] >= 0)
        if KM > 0:
            # Far tiles of backward_k, whose blocks are KM x KN, are summed there.
            edge = (tl.maximum(reach + j // KN * KN + KN - 1 - off, 0) + KM - 1) // KM * KM
            ok = ok & (r[:, None] < edge[None, :])
        w = tl.where(ok, tl.exp2(s - lse[:, None]), 0.0)
        acc += w * (dp - dlt[:, None])
    # Through memory: registers cannot be indexed. The barrier makes the program's writes visible to all its threads.
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    Scratch += program.to(tl.int64) * BM * BM
    tl.store(Scratch + a[:, None] * BM + a[None, :], acc)
    tl.debug_barrier()
    x = tl.arange(0, 2 * BM)
    c = a[:, None] - x[None, :] + (BM - 1)
    skew = tl.load(Scratch + a[:, None] * BM + c, mask=(c >= 0) & (c < BM), other=0.0)
    tl.store(Out + program.to(tl.int64) * 2 * BM + x, tl.sum(skew, 0))
