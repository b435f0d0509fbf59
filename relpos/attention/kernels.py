"""Triton kernels: softmax attention with one positional term, forward and backward. They know terms, never an encoding.

Three kernels walk the tiles of the score matrix: `forward` and `backward_q` own a block of queries and walk the keys,
`backward_k` owns a block of keys and walks the queries. What the batch shares and runs along neither queries nor keys
has owners of its own: of a table by distance `backward_distance` sums one block diagonal per program; of a bank of them
each program of `backward_q` sums a share. Nobody adds to another's sum, so results repeat bit by bit.

What the term operands `a` .. `e` hold, by KIND (shapes as in relpos/terms.py):

| KIND           | a                    | b             | c            | d              | e               |
|----------------|----------------------|---------------|--------------|----------------|-----------------|
| SLOPE          | slopes [H]           |               |              |                |                 |
| POTENTIAL, LOG | S at queries         | S at keys     | gate         |                |                 |
| PROFILE        | rate [1 or H]        | rho [., Tq]   | knots [K]    | slope [H, K+1] | offset [H, K+1] |
| DISTANCE       | values [H, size]     |               |              |                |                 |
| BANK           | rows                 | for the host  | bank         |                |                 |

A bank's rows [B, H, Tq, RP] and the bank [RP, BANK_BEFORE + its length + zeros, `size` in all] come in the dtype of q
and k, as the bias is a product like theirs, with zeros around them. The bank is divided by the scale, but not in
float16, whose range may be too small for that.

A profile with knots and one rho for the FIRST queries of an entry (all, or a multiple of every block) is a table by
distance to them: kernels take these queries as DISTANCE, with flags of their own, and the REST as PROFILE, where most
tiles lie on one piece. The others are mostly those on the diagonal and next to it; where all texts share rho, these are
made once for all (`profile_band`), and what their knots gather is summed over all texts first (`backward_band`). In the
tiles beyond them psi is a matrix product: as a function of the key a row of it is smooth there, a sum of few Chebyshev
polynomials (Mason and Handscomb, Chebyshev Polynomials, 2003; n is the key's place in the tile, y = 1 + rate * distance
at its middle, t = BN / 2 * rate / y):

    x = (2 n - BN + 1) / BN,   r = t / (1 + sqrt(1 - t^2)) <= 0.17
    psi = ln(y / (1 + r^2)) - 2 sum_j r^j / j T_j(x)

The coefficients depend on the distance alone, the polynomials on the key alone: `profile_table` makes both, once. Only
forward and backward_k do so. backward_q needs psi again for its sums; what products of dS in 16 bits and polynomials
would give instead misses the error budget, and is no faster.

Conventions
- Scores are in units of log 2 (`exp2` is the hardware's exponential): biases are multiplied by log2(e) as they enter.
- RAW kinds (no term, linear potentials, profiles with knots, banks) leave scores as q . k, and what is added is divided
  by the scale: it is applied inside the exponential, where it costs nothing.
- What depends on the distance alone is computed or loaded once per tile, for its BM + BN - 1 distances, and spread over
  the tile from shared memory (`_spread`): no table of tiles exists, and logarithms cost nothing.
- `ref` is the key column of the tile's first query. Distances and potentials enter relative to it, so that float32
  holds them to the last digit however long the text is.
- A constant along a row of scores cancels in the softmax. With CANCEL, causal slopes and linear potentials are added
  as one value per key; the row's part, `_row_constant`, is put back into the saved log-sum-exp, which is the true one.
  float32 inputs do without: the detour costs their last digits.
- Per-query vectors reach `_add_bias` in the shape of the tile ([BM, 1] or, TURNED, [1, BM]): one function serves both
  orientations.
- With TMA the tiles that backward_q and backward_k walk are copied by the hardware, from a description of the tensor:
  no thread keeps an address, which is worth some thirty registers. What lies beyond the tensor is zero.
- No branch for the interpreter: what runs on a CPU with TRITON_INTERPRET=1 is what runs on the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
NONE, SLOPE, POTENTIAL, LOG, PROFILE, DISTANCE, BANK = (tl.constexpr(n) for n in range(7))
BANK_BEFORE = tl.constexpr(128)  # zeros, at least as many as are loaded at once
BLOCK = tl.constexpr(128)  # a multiple of every block of queries
BITS = tl.constexpr(15)  # that hold the number of knots: there must be fewer
MANY = tl.constexpr(1 << 15)
NOWHERE = tl.constexpr(1 << 30)  # a distance that there is not
FEW = tl.constexpr(8)  # tiles of a diagonal that a program takes
TOGETHER = tl.constexpr(1024)  # about how many rows of tiles are handed out at once, and of how many heads at most
MOST_HEADS = tl.constexpr(24)
WAVES = tl.constexpr(16)  # columns of a profile's series: `_column`
# Of tiles: any; beyond the reach of a table or bank.
ANY, FAR = (tl.constexpr(n) for n in range(2))
# Of queries: all; the first of each batch entry, as many as Term.first says; the others.
ALL, FIRST, REST = (tl.constexpr(n) for n in range(3))


class Flags(NamedTuple):
    """What a kernel is compiled for."""

    KIND: int
    CAUSAL: bool
    CANCEL: bool  # drop what is constant along a row
    EXACT: bool  # float32 operands
    D: int  # features of a head, and the power of two that holds them
    DP: int
    META: bool  # q_off and the number of keys differ by batch entry
    DOCS: bool
    WINDOW: int
    EVEN: bool  # the lengths are multiples of every block: no load needs a mask
    RAW: bool = False  # scores are not scaled yet
    GATED: bool = False
    KNOTS: int = 0
    KP: int = 2  # a power of two that holds the knots, and one for the pieces and what lies above each knot
    PP: int = 1
    ONE: bool = False  # a profile without knots and with one rho for all queries: [1, 1]
    POWER: bool = False  # a profile of a power of the distance, not of a logarithm
    SURE: bool = False  # what rounding takes from weights and output is kept: delta needs no correction
    RP: int = 16
    HAS_FAR: bool = False  # tiles from some distance on are FAR
    GRAD: bool = False  # gradients of the term are wanted
    BM: int = 0  # queries and keys of a tile, and a power of two that holds its distances
    BN: int = 0
    SPAN: int = 0
    WIDE: int = 2  # how many numbers backward_q leaves of a query for backward_k: 2 or 4
    QM: int = 0  # in backward_k: the block of queries of backward_q
    ROWS: int = 0  # ALL, FIRST or REST
    BAND: bool = False  # tiles on and next to the diagonal have their bias from `profile_band`
    SERIES: bool = False  # and the others psi from a series
    BIAS: bool = False  # sums of dQ and dO over the tokens are wanted
    TMA: bool = False  # the tensors that are walked come as descriptions


class Term(NamedTuple):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any
    first: Any  # [1 or B]: how many of the first queries have the rho of the very first
    q_b: Any  # batch strides: what belongs to queries, keys, gates, `first`; 0 where the batch shares it
    k_b: Any
    g_b: Any
    first_b: Any
    size: Any
    origin: Any


class Head(NamedTuple):
    """What belongs to one head."""

    h: Any
    unit: Any  # what slopes and offsets of a profile with knots are multiplied by: its scores are RAW
    slope: Any
    rate: Any
    far: Any
    knots: Any
    series: Any  # psi's: coefficients by distance [.., WAVES], polynomials by key [BN, WAVES], and in float16 what psi
    waves: Any  # is to be multiplied by, as its range is small
    psi_unit: Any


class Query(NamedTuple):
    """What the term and the mask keep per query."""

    s: Any  # S_i
    ref: Any  # S at the tile's reference
    gate: Any
    rho: Any
    near: Any  # of each knot of a profile: `_bends`
    far: Any
    mix: Any  # rows of a bank
    band: Any  # where a tile's bias is, with BAND
    doc_lo: Any
    doc_hi: Any


class Sums(NamedTuple):
    """What backward_q sums along its rows, [BM, 4] each, or for a bank [BM, RP]; and `held`, of a bank: dS of a tile in
    `_pairs`."""

    row: Any  # of dS
    query: Any  # for S_i, and what it expects under the softmax
    of_query: Any
    gate: Any
    of_gate: Any
    mix: Any
    held: Any
    psi: Any  # of a profile with knots, since the piece changed: of dS * psi and of dS * its derivative by the rate
    away: Any


class Stretch(NamedTuple):
    """Tiles on one piece of a profile with knots, or one tile with knots inside."""

    until: Any  # the key or query from which on it is looked up again
    below: Any  # the piece it begins on
    inside: Any  # how many knots
    slope: Any
    offset: Any


class Pieces(NamedTuple):
    """Where they end in a profile with knots: for rho and the rate, [BM, 4]; by piece and above each knot, [4, PP]."""

    held: Any  # the piece that `Sums` are of
    rho: Any
    rate: Any
    slopes: Any
    offsets: Any


@triton.jit
def _head(t, h, c2, F: tl.constexpr):
    slope = 0.0
    rate = 0.0
    far = 0.0
    knots = 0.0
    if F.KIND == SLOPE:
        slope = tl.load(t.a + h) * LOG2E
    if F.KIND == PROFILE:
        rate = tl.load(t.a + h * t.size)
        if F.KNOTS == 0:
            slope = tl.load(t.d + h) * LOG2E
            if F.ONE:
                slope *= tl.load(t.b)
        else:
            n = tl.arange(0, F.KP)
            knots = tl.load(t.c + n, mask=n < F.KNOTS, other=float("inf"))
    if F.KIND == DISTANCE:
        far = tl.load(t.a + h * t.size + t.size - 1) * LOG2E
    return Head(h, LOG2E / c2, slope, rate, far, knots, 0, 0.0, 1.0)


@triton.jit
def _series_rows(Tk, F: tl.constexpr):
    """How many rows a series has: the polynomials lie where there are no distances it is used for."""
    return (tl.cdiv(Tk, F.BN) + 1) * F.BN


@triton.jit
def _series_unit(rate, F: tl.constexpr):
    """What a series in float16 is relative to: psi of the nearest distance. Those farther are larger, and not by more
    than they are farther."""
    return tl.maximum(_psi(tl.cast(2 * F.BN, tl.float32), rate, F), 1e-30)


@triton.jit
def _with_series(head, Series, t, Tk, F: tl.constexpr):
    """Of `profile_table`."""
    if F.SERIES:
        Series += head.h * t.size * (_series_rows(Tk, F).to(tl.int64) * WAVES)
        waves = tl.load(Series + tl.arange(0, F.BN)[:, None] * WAVES + tl.arange(0, WAVES)[None, :])
        unit = 1.0
        if waves.dtype == tl.float16:
            unit = _series_unit(head.rate, F)
        return Head(head.h, head.unit, head.slope, head.rate, head.far, head.knots, Series, waves, unit)
    else:
        return head


@triton.jit
def _per_query(t, b, h, r, Tq, F: tl.constexpr):
    """S_i, gate and rho of the queries r; those beyond the last repeat it."""
    if not F.EVEN:
        r = tl.minimum(r, Tq - 1)
    s = r.to(tl.float32)
    g = s
    rho = s
    if F.KIND == POTENTIAL or F.KIND == LOG:
        s = tl.load(t.a + b * t.q_b + h * Tq + r)
        if F.GATED:
            g = tl.load(t.c + b * t.g_b + h * Tq + r)
    if F.KIND == PROFILE and not F.ONE:
        rho = tl.load(t.b + b * t.q_b + r)
    return s, g, rho


@triton.jit
def _mix(t, b, h, m0, a, Tq, F: tl.constexpr):
    """Rows of a bank, [queries, RP], of queries m0 + a. Their strides by batch entry, head and query are where other
    kinds keep others."""
    if not F.EVEN:
        a = tl.minimum(a, Tq - 1 - m0)
    first = t.a + b * t.q_b + h * t.k_b + tl.cast(m0, tl.int64) * t.g_b
    return tl.load(first + a[:, None] * t.g_b + tl.arange(0, F.RP)[None, :])


@triton.jit
def _row_constant(fi, si, sref, gi, slope, c2, F: tl.constexpr):
    """With CANCEL, what `_add_bias` leaves out per row, scaled: the true score is its score minus this."""
    if F.KIND == SLOPE:
        r = slope * fi
    else:
        r = si - sref
        r = r * gi * c2 if F.GATED else r * LOG2E
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
def _psi(d, rate, F: tl.constexpr):
    """ln(1 + rate |d|), or |d|^rate."""
    d = tl.abs(d).to(tl.float32)
    if F.POWER:
        return tl.where(d == 0.0, 0.0, tl.exp2(rate * tl.log2(tl.maximum(d, 1.0))))
    x = rate * d
    log = _log2(x + 1.0, F.EXACT or F.KNOTS == 0) * LN2
    if F.EXACT or F.KNOTS > 0:  # rho divides by as small a number
        log = tl.where(x < 0.06, x * (1.0 - x * (0.5 - x * (1 / 3 - x * 0.25))), log)
    return log


@triton.jit
def _psi_by_rate(d, rate, F: tl.constexpr):
    """Its derivative, for profiles without knots. Of the logarithm -1 / (1 + rate |d|), to be divided by the rate:
    |d| / (1 + rate |d|) less a constant, which may be left out as the rows of dS sum to zero. Large distances, where it
    nears 1 / rate, must not drown the small ones."""
    if F.POWER:
        return _psi(d, rate, F) * tl.log2(tl.maximum(tl.abs(d), 1).to(tl.float32)) * LN2
    else:
        return -1.0 / (rate * tl.abs(d).to(tl.float32) + 1.0)


@triton.jit
def _zeros(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros((M, N), tl.float32)


@triton.jit
def _blank(M: tl.constexpr, N: tl.constexpr, T):
    """Zeros for products to be added to, which the compiler cannot see to be zeros, as it does not know that there are
    T tokens and not fewer than none. Of zeros that it knows it makes two sets, one for loops that do not run, and then
    takes the products of a loop one after the other, waiting for each."""
    return tl.where(tl.arange(0, M)[:, None] + tl.arange(0, N)[None, :] < -T, 1.0, 0.0)


@triton.jit
def _coarse(x, like):
    """x cut to as many digits as normal numbers of `like`'s dtype have. Rounding would be nearer, and takes as long as
    an exponential."""
    keep: tl.constexpr = -(1 << (16 if like.dtype == tl.bfloat16 else 13))
    return (x.to(tl.int32, bitcast=True) & keep).to(tl.float32, bitcast=True)


@triton.jit
def _nothing(M: tl.constexpr):
    """The largest score of no scores."""
    return tl.full((M,), float("-inf"), tl.float32)


@triton.jit
def _pick(x, at):
    """x[at] of a vector x: through shared memory, straight into the layout of `at`."""
    return tl.reshape(tl.gather(x, tl.reshape(at, (at.numel,)), 0), at.shape)


@triton.jit
def _strewn(x, M: tl.constexpr, N: tl.constexpr):
    """x [M, N] as a vector whose order spreads what a warp holds, 8 rows and 8 columns, over all banks of the shared
    memory: by 8 columns, then row, then column."""
    return tl.reshape(tl.permute(tl.reshape(x, (M, N // 8, 8)), (1, 0, 2)), (M * N,))


@triton.jit
def _by_eight(M: tl.constexpr, N: tl.constexpr):
    """Rows and columns of a tile [M, N], each as its eighth and the rest, shaped [M // 8, 8, N // 8, 8]: of the places
    of a thread's entries all but one or two are then known offsets from each other, and cost no registers."""
    m1 = tl.reshape(tl.arange(0, M // 8), (M // 8, 1, 1, 1))
    m0 = tl.reshape(tl.arange(0, 8), (1, 8, 1, 1))
    n1 = tl.reshape(tl.arange(0, N // 8), (1, 1, N // 8, 1))
    n0 = tl.reshape(tl.arange(0, 8), (1, 1, 1, 8))
    return m1, m0, n1, n0


@triton.jit
def _distances(base, TURNED: tl.constexpr, F: tl.constexpr):
    """Those of the tile whose first query and first key are `base` apart, in the order that `_spread` wants."""
    y = tl.arange(0, F.SPAN)
    return base + F.BM - y if TURNED else base - F.BN + y


@triton.jit
def _spread(x, TURNED: tl.constexpr, F: tl.constexpr):
    """Values x[SPAN] by distance as a tile, [BM, BN] or turned. Entries of a thread that lie on one diagonal are seen
    to be one load: rows come first in the difference, as a known offset to the left of a minus is folded."""
    M: tl.constexpr = F.BN if TURNED else F.BM
    N: tl.constexpr = F.BM if TURNED else F.BN
    m1, m0, n1, n0 = _by_eight(M, N)
    return tl.reshape(_pick(x, (m1 - n1) * 8 + (m0 - n0) + N), (M, N))


@triton.jit
def _tile_away(base, head, F: tl.constexpr):
    """The derivative of psi by the rate, in a tile."""
    d = tl.abs(_distances(base, False, F)).to(tl.float32)
    return _spread(d / (head.rate * d + 1.0), False, F)


@triton.jit
def _series(head, base, F: tl.constexpr):
    """Where the coefficients of a tile `base` behind its keys begin, and which they are: [BM, WAVES]."""
    begin = head.series
    if F.SERIES:
        begin += base * WAVES
    return begin, tl.arange(0, F.BM)[:, None] * WAVES + tl.arange(0, WAVES)[None, :]


@triton.jit
def _psi_of_series(x, head, TURNED: tl.constexpr, F: tl.constexpr):
    """psi of a tile, as a product; x are its coefficients."""
    if TURNED:
        psi = tl.dot(head.waves, tl.trans(x), input_precision="ieee")
    else:
        psi = tl.dot(x, tl.trans(head.waves), input_precision="ieee")
    return psi * head.psi_unit if x.dtype == tl.float16 else psi


@triton.jit
def _table(d, t, h):
    """Values of the distances d."""
    at = tl.minimum(tl.maximum(d + t.origin, 0), t.size - 1)
    return tl.load(t.a + h * t.size + at) * LOG2E


@triton.jit
def _first_rows(t, b, Tq):
    """How many queries of a batch entry come FIRST: all, or a multiple of every block."""
    alike = tl.load(t.first + b * t.first_b)
    return tl.where(alike == Tq, Tq, alike // BLOCK * BLOCK)


@triton.jit
def _as_table(t, Table, Tk):
    """The term of FIRST queries: `Table` [H, Tk]."""
    return Term(Table, t.b, t.c, t.d, t.e, t.first, t.q_b, t.k_b, t.g_b, t.first_b, Tk, 0)


@triton.jit
def _most_first_rows(t, Tq):
    """At least as many as of any batch entry."""
    return tl.where(t.first_b > 0, Tq, _first_rows(t, 0, Tq))


@triton.jit
def _bank(base, t, N: tl.constexpr, F: tl.constexpr):
    """Columns of the bank, [RP, N], for the distances from `base` on; below and beyond the bank they are zero."""
    tl.static_assert(N <= BANK_BEFORE)
    first = tl.minimum(tl.maximum(base + BANK_BEFORE, 0), t.size - N)
    return tl.load(t.c + first + tl.arange(0, F.RP)[:, None] * t.size + tl.arange(0, N)[None, :])


@triton.jit
def _distance_of(u, rate):
    """The distance at which psi is u, as far as it matters."""
    more = tl.exp2(tl.minimum(u * LOG2E, 126.0)) - 1.0  # of a small u no digits would be left
    more = tl.where(tl.abs(u) < 0.06, u * (1.0 + u * (0.5 + u * (1 / 6 + u * (1 / 24)))), more)
    d = more / tl.maximum(rate, 1e-30)
    return tl.minimum(tl.maximum(d, -1.0), 1e9)


@triton.jit
def _bends(rho, head):
    """For a block of queries, of each knot: the distance beyond which all of them have passed it, and the one up to
    which none has. In a tile between these it may lie: a knot too many costs time alone."""
    lo = tl.min(rho, 0) * 0.99999
    hi = tl.max(rho, 0) * 1.00001
    near = _distance_of((head.knots + 1e-6) / lo, head.rate) * 1.0001 + 1e-3
    far = _distance_of((head.knots - 1e-6) / hi, head.rate) * 0.9999 - 1e-3
    return near, far


@triton.jit
def _bends_of(Bends, b, h, H, blocks, t, F: tl.constexpr):
    """Where those of a head begin: all share them unless each has a rate of its own."""
    return Bends + (b * (1 + (H - 1) * t.size) + h * t.size) * (blocks * 2 * F.KP)


@triton.jit
def _knots_in(base, near, far, ZERO: tl.constexpr, F: tl.constexpr):
    """How many knots lie below a tile, and in the higher BITS how many inside. ZERO: it may hold the distance 0, which
    is then left out: there can be many knots between 0 and 1."""
    least = base - (F.BN - 1)
    most = base + F.BM - 1
    if not F.CAUSAL:
        a = tl.abs(least)
        b = tl.abs(most)
        least = tl.where((least <= 0) & (most >= 0), 0, tl.minimum(a, b))
        most = tl.maximum(a, b)
    least = tl.maximum(least, 1 if ZERO else 0).to(tl.float32)
    most = tl.maximum(most, 1 if ZERO else 0).to(tl.float32)
    return tl.sum(tl.where(near < least, 1, tl.where(far < most, MANY, 0)), 0)


@triton.jit
def _piece(t, head, r, F: tl.constexpr):
    """Slope and offset of piece r."""
    p = head.h * (F.KNOTS + 1) + r
    return tl.load(t.d + p) * head.unit, tl.load(t.e + p) * head.unit


@triton.jit
def _nowhere(at):
    """A stretch that ends before it begins."""
    none = tl.cast(0, tl.int32)
    zero = tl.cast(0.0, tl.float32)
    return Stretch(tl.cast(at, tl.int32), none, none, zero, zero)


@triton.jit
def _looked_up(count, t, head, until, F: tl.constexpr):
    below = count & (MANY - 1)
    slope, offset = _piece(t, head, below, F)
    return Stretch(until, below, count >> BITS, slope, offset)


@triton.jit
def _stretch(n0, base, near, far, t, head, ZERO: tl.constexpr, F: tl.constexpr):
    """What a block of queries finds at the tile of key n0, `base` before it: once for all tiles up to the first that
    has more queries' distances than the nearest one below this."""
    count = _knots_in(base, near, far, ZERO, F)
    until = n0 + 1
    if F.CAUSAL and not ZERO:
        below = tl.arange(0, F.KP) < (count & (MANY - 1))
        passed = tl.max(tl.where(below, near.to(tl.int32), 0), 0) + 1  # a tile no nearer than this lies behind them
        until = tl.where(count < MANY, n0 + base - F.BN + 2 - passed, until)
    return _looked_up(count, t, head, until, F)


@triton.jit
def _knot(t, head, k, F: tl.constexpr):
    """Where knot k lies, and by how much the slope changes there."""
    p = t.d + head.h * (F.KNOTS + 1) + k
    return tl.load(t.c + k), (tl.load(p + 1) - tl.load(p)) * head.unit


@triton.jit
def _at_zero(head):
    """The piece of distance 0."""
    return tl.sum((head.knots < 0.0).to(tl.int32), 0)


@triton.jit
def _add_profile(s, psi, part, q, head, t, ZERO: tl.constexpr, TURNED: tl.constexpr, F: tl.constexpr):
    """Scores plus a profile with knots, less what is constant in the tile; and that. It is continuous: each knot adds
    what lies above it. ZERO: the knots between the distances 0 and 1 were not counted. With SERIES: no scores."""
    plain = s
    far = part.offset
    s = (part.slope * q.rho) * psi if F.SERIES else tl.fma(part.slope * q.rho, psi, s)
    if part.inside > 0:
        u = psi
        unit = q.rho
        if TURNED or F.EXACT:
            u = psi * q.rho
            unit = 1.0
        over = 1.0 / unit  # where a thread has few rows this takes fewer registers than another tile
        knot, jump = _knot(t, head, part.below, F)
        for k in range(part.below, part.below + part.inside):
            after, then = _knot(t, head, tl.minimum(k + 1, F.KNOTS - 1), F)
            if F.EXACT:
                s += jump * tl.maximum(u - knot, 0.0)
            else:  # one operation less, and less exact
                s += (jump * unit) * tl.maximum(u, knot * over)
                far -= jump * knot
            knot, jump = after, then
    if ZERO:
        at_zero, offset = _piece(t, head, _at_zero(head), F)
        s = tl.where(psi == 0.0, plain + (offset - far), s)
    return s, far


@triton.jit
def _add_bias(
    s, far, base, fi, fj, sj, q, head, t, c2, part, NEAR: tl.constexpr, ZERO: tl.constexpr, TURNED: tl.constexpr,
    MODE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Scores s of a tile plus the term, less what is constant along a row (`_row_constant`) or, of a profile with
    knots, in the tile. And of a profile psi, and that constant, which is given with SERIES: then all is in s."""
    psi = s
    if NEAR:
        a = tl.arange(0, F.BM)
        n = tl.arange(0, F.BN)
        a, n = (a[None, :], n[:, None]) if TURNED else (a[:, None], n[None, :])
        return s + tl.load(q.band + a * F.BN + n), psi, far
    if F.KIND == SLOPE:
        if F.CANCEL:
            s += sj
        elif F.CAUSAL:
            s -= head.slope * (fi - fj)
        else:
            s -= head.slope * tl.abs(fi - fj)
    if F.KIND == POTENTIAL:
        if F.CANCEL:
            gap = q.ref - sj
        elif F.CAUSAL:
            gap = q.s - sj
        else:
            gap = tl.abs(q.s - sj)
        s -= q.gate * gap if F.GATED else gap * (LOG2E / c2)
    if F.KIND == LOG:
        gap = q.s - sj
        log = _log2(gap * gap + 1.0, F.EXACT)
        s -= q.gate * log if F.GATED else log
    if F.KIND == PROFILE and not F.SERIES:
        by_distance = _psi(_distances(base, TURNED, F), head.rate, F)
        if F.ONE:  # its offset is constant along every row, and cancels
            if TURNED and F.GRAD:  # backward_k needs psi itself
                psi = _spread(by_distance, TURNED, F)
                s += head.slope * psi
            else:
                s += _spread(head.slope * by_distance, TURNED, F)
        else:
            psi = _spread(by_distance, TURNED, F)
            if F.KNOTS == 0:
                s += (head.slope * q.rho) * psi
            else:
                s, far = _add_profile(s, psi, part, q, head, t, ZERO, TURNED, F)
    if F.KIND == DISTANCE:
        s += head.far if MODE == FAR else _spread(_table(_distances(base, TURNED, F), t, head.h), TURNED, F)
    return s, psi, far


@triton.jit
def _sheared(x, F: tl.constexpr):
    """Entries (r, BN + r - c) of `_strewn` x [BM, SPAN], as a tile [BM, BN]."""
    r1, r0, c1, c0 = _by_eight(F.BM, F.BN)
    d = r0 - c0
    at = (r1 - c1 + F.BN // 8) * (F.BM * 8) + (d >> 3) * (F.BM * 8) + (r1 * 8 + r0) * 8 + (d & 7)
    return tl.reshape(_pick(x, at), (F.BM, F.BN))


@triton.jit
def _bank_tile(base, mix, c2, t, TURNED: tl.constexpr, F: tl.constexpr):
    """Each query's own values by distance, slid into place: [BM, BN], or turned. They go through shared memory in the
    dtype of the products, as exact as scores are in plain code."""
    columns = _bank(base - F.BN, t, F.SPAN, F)
    if TURNED:
        z = tl.dot(tl.trans(columns), tl.trans(mix), input_precision="ieee").to(mix.dtype)
        c1, c0, r1, r0 = _by_eight(F.BN, F.BM)
        at = r1 * (F.SPAN * 8) + ((r1 - c1) * 8 + r0 - c0 + F.BN) * 8 + r0
        z = tl.reshape(_pick(_strewn(z, F.SPAN, F.BM), at), (F.BN, F.BM))
    else:
        z = tl.dot(mix, columns, input_precision="ieee").to(mix.dtype)
        z = _sheared(_strewn(z, F.BM, F.SPAN), F)
    z = z.to(tl.float32)
    return z * (LOG2E / c2) if mix.dtype == tl.float16 else z


@triton.jit
def _visible(i, j, klen, other, lo, hi, F: tl.constexpr):
    """Whether query i sees key j of klen, all three counted from any column: in a loop from the tile's own, as the
    compiler makes 64 bits of sums with the loop's counter. lo and hi are the document borders of the block that is
    owned, `other` the column of the one that is walked."""
    if F.CAUSAL:
        ok = j <= i
    else:
        ok = (j == j) & (i == i)
    if not F.EVEN:
        ok = ok & (j < klen)
    if F.DOCS:
        ok = ok & (other >= lo) & (other < hi)
    if F.WINDOW > 0:
        ok = ok & (i - j < F.WINDOW) & (j - i < F.WINDOW)
    return ok


@triton.jit
def _fold(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] summed to [M, 4] over columns that one thread holds: no traffic between threads inside a loop. The last
    sum, over 4, is taken once behind it."""
    return tl.sum(tl.sum(tl.reshape(x, (M, N // 8, 4, 2)), 1), 2)


@triton.jit
def _borders(Docs, at, Tk, F: tl.constexpr):
    """First column of the document of each column, and the first behind it."""
    lo = 0
    hi = Tk
    if F.DOCS:
        lo = tl.load(Docs + at, mask=at < Tk, other=0)
        hi = tl.load(Docs + Tk + at, mask=at < Tk, other=0)
    return lo, hi


@triton.jit
def _row():
    """Which row of tiles a program takes, counted from the longest, and of which pair of a text and a head. The long
    rows of several heads come before the short ones of any: after all of one head, the last to begin would be long ones
    of another, and most of the GPU would wait for them. Not too many heads, as their keys should stay in the cache."""
    rows = tl.num_programs(0)
    at = tl.program_id(1) * rows + tl.program_id(0)
    heads = tl.maximum(tl.minimum(TOGETHER // rows, MOST_HEADS), 1)
    first = at // (heads * rows) * heads
    at -= first * rows
    heads = tl.minimum(heads, tl.num_programs(1) - first)
    return at // heads, first + at % heads


@triton.jit
def _place(Meta, b, q_off, Tk, F: tl.constexpr):
    """Key column of the first query and number of keys of a batch entry."""
    klen = Tk
    if F.META:
        q_off = tl.load(Meta + b * 2)
        klen = tl.load(Meta + b * 2 + 1)
    return q_off, klen


@triton.jit
def _features(P, at, stride, ok, MASKED: tl.constexpr, F: tl.constexpr):
    """Rows `at` of a [tokens, features] matrix; zero where not ok."""
    e = tl.arange(0, F.DP)
    P += at[:, None] * stride + e[None, :]
    if F.D != F.DP:
        return tl.load(P, mask=ok[:, None] & (e[None, :] < F.D), other=0.0)
    elif MASKED:
        return tl.load(P, mask=ok[:, None], other=0.0)
    else:
        return tl.load(P)


@triton.jit
def _of_head(P, b, h, stride_b, stride_h, F: tl.constexpr):
    """One head of a [B, H, tokens, features] tensor, as `_walked` takes it."""
    if F.TMA:
        return P, b.to(tl.int32), tl.cast(h, tl.int32)
    else:
        return P + b * stride_b + h * stride_h


@triton.jit
def _walked(P, at, a, stride, ok, MASKED: tl.constexpr, WALK: tl.constexpr, F: tl.constexpr):
    """The tile of such a head, of the tokens `a` from `at` on; where P walks along, it is there already."""
    if F.TMA:
        x, b, h = P
        return tl.reshape(x.load([b, h, tl.cast(at, tl.int32), 0]), (a.numel, F.DP))
    elif WALK:
        return _features(P, a, stride, ok, MASKED, F)
    else:
        return _features(P + tl.cast(at, tl.int64) * stride, a, stride, ok, MASKED, F)


@triton.jit
def _vector(P, at, size, other, MASKED: tl.constexpr):
    """P[at]; `other` beyond its size."""
    if MASKED:
        return tl.load(P + at, mask=at < size, other=other)
    else:
        return tl.load(P + at)


@triton.jit
def _rows(P, a, size, F: tl.constexpr):
    """What backward_q left of the queries a: level, delta and, of four, gate and S_i or rho, [1, BM] each. As one
    load it is spread over the threads; several would be repeated by every warp."""
    at = a[:, None] * F.WIDE + tl.arange(0, F.WIDE)[None, :]
    if F.EVEN:
        x = tl.load(P + at)
    else:
        x = tl.load(P + at, mask=a[:, None] < size, other=0.0)
    if F.WIDE == 2:
        level, delta = tl.split(x)
        gate, s = level, delta  # not used
    else:
        x, y = tl.split(tl.reshape(x, (F.BM, 2, 2)))
        level, gate = tl.split(x)
        delta, s = tl.split(y)
    if not F.EVEN:
        level = tl.where(a < size, level, float("inf"))
    return level[None, :], delta[None, :], gate[None, :], s[None, :]


@triton.jit
def _put(P, at, stride, ok, x, F: tl.constexpr):
    e = tl.arange(0, F.DP)
    ok = ok[:, None]
    if F.D != F.DP:
        ok = ok & (e[None, :] < F.D)
    tl.store(P + at[:, None].to(tl.int64) * stride + e[None, :], x.to(P.dtype.element_ty), mask=ok)


@triton.jit
def _block_of_queries(t, head, Docs, Band, b, m0, mcol, Tq, Tk, F: tl.constexpr):
    """For a kernel that owns the queries m0 .. m0+BM-1: what the term and the mask keep of them, as columns."""
    r = m0 + tl.arange(0, F.BM)
    h = head.h
    s, g, rho = _per_query(t, b, h, r, Tq, F)
    ref = 0.0
    near = 0.0
    far = 0.0
    mix = 0.0
    if F.KIND == POTENTIAL or F.KIND == LOG:
        ref = tl.load(t.a + b * t.q_b + h * Tq + m0)
    if F.KIND == PROFILE and F.KNOTS > 0:
        near, far = _bends(rho, head)
    if F.KIND == BANK:
        mix = _mix(t, b, h, m0, tl.arange(0, F.BM), Tq, F)
    doc_lo, doc_hi = _borders(Docs, (mcol + tl.arange(0, F.BM))[:, None], Tk, F)
    return Query(s[:, None], ref, g[:, None], rho[:, None], near, far, mix, Band, doc_lo, doc_hi)


@triton.jit
def _range_of_keys(Docs, mcol, klen, Tk, reach, F: tl.constexpr):
    """For a block of queries: where the keys begin; where tiles stop being FAR; where they stop being visible
    throughout; where they end. All but the last are multiples of BN."""
    begin = 0
    end = klen
    full = klen // F.BN * F.BN
    if F.CAUSAL:
        end = tl.minimum(end, mcol + F.BM)
        full = tl.minimum(full, (mcol + 1) // F.BN * F.BN)
        if F.BAND:
            full = tl.minimum(full, tl.maximum(mcol - F.BN, 0))
    if F.DOCS:
        begin = tl.maximum(begin, tl.load(Docs + mcol) // F.BN * F.BN)
        end = tl.minimum(end, tl.load(Docs + Tk + tl.minimum(mcol + F.BM, Tk) - 1))
    if F.WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(mcol - F.WINDOW + 1, 0) // F.BN * F.BN)
        if not F.CAUSAL:
            end = tl.minimum(end, mcol + F.BM + F.WINDOW)
    if F.DOCS or F.WINDOW > 0:
        full = begin
    far = begin
    if F.HAS_FAR and F.CAUSAL:
        far = tl.minimum(full, tl.maximum(mcol - reach + 1, 0) // F.BN * F.BN)
        far = tl.maximum(far, begin)
    return begin, far, full, end


@triton.jit
def _scores(x, y, base, mix, bias, c2, t, TURNED: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr):
    """Products of a tile's queries and keys; what a bank or a series adds is there before them."""
    if F.SERIES:
        s = tl.dot(x, tl.trans(y), bias, input_precision="ieee")
    elif F.KIND == BANK and MODE != FAR:
        s = tl.dot(x, tl.trans(y), _bank_tile(base, mix, c2, t, TURNED, F), input_precision="ieee")
    else:
        s = tl.dot(x, tl.trans(y), input_precision="ieee")
    return s if F.RAW else s * c2


@triton.jit
def _band(Band, h, m0, n0, Tq, F: tl.constexpr):
    """Where the bias of a tile is, or its part that begins with query m0."""
    block = m0 // F.BN
    tile = (h * tl.cdiv(Tq, F.BN) + block) * 2 + (block - n0 // F.BN)
    return Band + tile * (F.BN * F.BN) + m0 % F.BN * F.BN


@triton.jit
def _with_band(q, band):
    return Query(q.s, q.ref, q.gate, q.rho, q.near, q.far, q.mix, band, q.doc_lo, q.doc_hi)


@triton.jit
def _forward_tiles(
    acc, l, m, q, K, V, k_t, v_t, begin, end, mcol, klen, Tq, SK, info, head, t, c2,
    MASKED: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    ZERO: tl.constexpr = MASKED or not F.CAUSAL
    NEAR: tl.constexpr = MASKED and F.BAND
    n = tl.arange(0, F.BN)
    a = tl.arange(0, F.BM)[:, None]
    fi = tl.arange(0, F.BM).to(tl.float32)[:, None]
    # 64-bit arithmetic on a tile's base alone: offsets inside it are small, and registers are dear.
    K += tl.cast(begin, tl.int64) * k_t
    V += tl.cast(begin, tl.int64) * v_t
    k_step = tl.cast(F.BN, tl.int64) * k_t
    v_step = tl.cast(F.BN, tl.int64) * v_t
    part = _nowhere(begin)
    C, series = _series(head, mcol - begin, F)
    # Without a bank's tile there is shared memory for another stage.
    for n0 in tl.range(begin, end, F.BN, num_stages=3 if F.KIND == BANK and MODE == FAR else None):
        j = n0 + n
        ok = j < klen
        k = _features(K, n, k_t, ok, MASKED and not F.EVEN, F)
        K += k_step
        bias = 0.0
        far = 0.0
        if F.KNOTS > 0 and not NEAR:
            if n0 >= part.until:
                part = _stretch(n0, mcol - n0, info.near, info.far, t, head, ZERO, F)
        if F.SERIES:
            bias = _zeros(F.BM, F.BN)
            if not NEAR:
                psi = _psi_of_series(tl.load(C + series), head, False, F)
                bias, far = _add_profile(bias, psi, part, info, head, t, ZERO, False, F)
                C -= F.BN * WAVES
        s = _scores(q, k, mcol - n0, info.mix, bias, c2, t, False, MODE, F)
        fj = n.to(tl.float32)[None, :] + tl.cast(n0 - mcol, tl.float32)
        sj = fj
        if F.KIND == SLOPE:
            sj = head.slope * n.to(tl.float32)[None, :] + head.slope * tl.cast(n0 - mcol, tl.float32)
        if F.KIND == POTENTIAL or F.KIND == LOG:
            sj = _vector(SK, j, klen, 0.0, MASKED and not F.EVEN)[None, :]
        near = info
        if NEAR:
            near = _with_band(info, _band(info.band, head.h, mcol, n0, Tq, F))
        s, psi, far = _add_bias(s, far, mcol - n0, fi, fj, sj, near, head, t, c2, part, NEAR, ZERO, False, MODE, F)
        if MASKED:
            ok2 = _visible(a + (mcol - n0), n[None, :], klen - n0, j[None, :], info.doc_lo, info.doc_hi, F)
            s = tl.where(ok2, s, float("-inf"))
        top = tl.max(s, 1)
        if F.KNOTS > 0 and not NEAR:
            top += far
        top = tl.maximum(m, top)
        base = top
        if MASKED:
            base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
        if F.RAW:
            w = tl.exp2(s * c2 - ((base - far) * c2 if F.KNOTS > 0 and not NEAR else base * c2)[:, None])
            fade = tl.exp2((m - base) * c2)
        else:
            w = tl.exp2(s - base[:, None])
            fade = tl.exp2(m - base)
        l = l * fade[:, None] + tl.sum(tl.reshape(w, (F.BM, F.BN // 8, 8)), 1)
        m = top
        v = _features(V, n, v_t, ok, MASKED and not F.EVEN, F)
        V += v_step
        if F.SURE and not F.EXACT:
            high = _coarse(w, v)
            acc = tl.dot((w - high).to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            acc = tl.dot(high.to(v.dtype), v, acc, input_precision="ieee")
        else:
            acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, l, m


@triton.jit
def _own_output(
    b, h, m0, Q, K, V, O, Lse, Low, Band, Series, Meta, Docs, t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h,
    o_t, H, GROUP, Tq, Tk, q_off, c2, reach, F: tl.constexpr,
):  # fmt: skip
    """All that forward does for one block of queries."""
    q_off, klen = _place(Meta, b, q_off, Tk, F)
    mcol = q_off + m0
    r = m0 + tl.arange(0, F.BM)
    q = _features(Q + b * q_b + h * q_h, r.to(tl.int64), q_t, r < Tq, True, F)
    head = _with_series(_head(t, h, c2, F), Series, t, Tk, F)
    info = _block_of_queries(t, head, Docs, Band, b, m0, mcol, Tq, Tk, F)
    begin, far, full, end = _range_of_keys(Docs, mcol, klen, Tk, reach, F)
    acc = _blank(F.BM, F.DP, Tk)
    l = _zeros(F.BM, 8)
    m = _nothing(F.BM)
    K += b * k_b + (h // GROUP) * k_h
    V += b * v_b + (h // GROUP) * v_h
    SK = t.b + b * t.k_b + h * Tk
    if F.HAS_FAR and F.CAUSAL:
        acc, l, m = _forward_tiles(acc, l, m, q, K, V, k_t, v_t, begin, far, mcol, klen, Tq, SK, info, head, t,
                                   c2, False, FAR, F)  # fmt: skip
    if not (F.DOCS or F.WINDOW > 0):
        acc, l, m = _forward_tiles(acc, l, m, q, K, V, k_t, v_t, far, full, mcol, klen, Tq, SK, info, head, t,
                                   c2, False, ANY, F)  # fmt: skip
    acc, l, m = _forward_tiles(acc, l, m, q, K, V, k_t, v_t, full, end, mcol, klen, Tq, SK, info, head, t,
                               c2, True, ANY, F)  # fmt: skip

    l = tl.sum(l, 1)
    empty = l == 0.0
    acc = acc / tl.where(empty, 1.0, l)[:, None]
    if F.RAW:
        m *= c2
    lse = tl.where(empty, float("inf"), m + tl.log2(tl.where(empty, 1.0, l)))
    if F.CANCEL and (F.KIND == SLOPE or F.KIND == POTENTIAL):
        fi = tl.arange(0, F.BM).to(tl.float32)[:, None]
        lse -= tl.sum(_row_constant(fi, info.s, info.ref, info.gate, head.slope, c2, F), 1)
    _put(O + b * o_b + h * o_h, r, o_t, r < Tq, acc, F)
    if F.SURE and not F.EXACT:
        _put(Low + b * o_b + h * o_h, r, o_t, r < Tq, acc - acc.to(Low.dtype.element_ty).to(tl.float32), F)
    tl.store(Lse + (b * H + h) * Tq + r, lse, mask=r < Tq)


@triton.jit
def forward(
    Q, K, V, O, Lse, Low, Table, Band, Series, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size,
    t_origin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, H, GROUP, Tq, Tk, q_off, c2, reach,
    G: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The output; the log-sum-exp; and if SURE what rounding took from the output, laid out as it is. `Table` and the
    flags G are those of FIRST queries."""
    place, pair = _row()
    m0 = (tl.num_programs(0) - 1 - place) * F.BM
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    if F.ROWS == REST:
        if m0 < _first_rows(t, b, Tq):
            _own_output(
                b, h, m0, Q, K, V, O, Lse, Low, Band, Series, Meta, Docs, _as_table(t, Table, Tk), q_b, q_h, q_t, k_b,
                k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, H, GROUP, Tq, Tk, q_off, c2, reach, G)  # fmt: skip
            return
    _own_output(
        b, h, m0, Q, K, V, O, Lse, Low, Band, Series, Meta, Docs, t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
        o_h, o_t, H, GROUP, Tq, Tk, q_off, c2, reach, F)  # fmt: skip


@triton.jit
def _backward_q_tiles(
    dq, sums, pieces, q, do, delta, lse, K, V, k_t, v_t, begin, end, mcol, klen, Tq, SK, ByBank, most, info, head, t,
    c2, MASKED: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    ZERO: tl.constexpr = MASKED or not F.CAUSAL
    NEAR: tl.constexpr = MASKED and F.BAND
    n = tl.arange(0, F.BN)
    a = tl.arange(0, F.BM)[:, None]
    fi = tl.arange(0, F.BM).to(tl.float32)[:, None]
    # Of a bank the sums of rows, which it can do without, are left out: the registers are for dq's product, which runs
    # beside what comes next.
    SUMMED: tl.constexpr = F.KIND == BANK and F.GRAD and MODE != FAR
    WALK: tl.constexpr = not F.TMA and (F.KIND == NONE or F.KNOTS > 0)  # others have no registers left for it
    if WALK:
        K += tl.cast(begin, tl.int64) * k_t
        V += tl.cast(begin, tl.int64) * v_t
        k_step = tl.cast(F.BN, tl.int64) * k_t
        v_step = tl.cast(F.BN, tl.int64) * v_t
    part = _nowhere(begin)
    for n0 in range(begin, end, F.BN):
        j = n0 + n
        ok = j < klen
        k = _walked(K, n0, n, k_t, ok, MASKED and not F.EVEN, WALK, F)
        v = _walked(V, n0, n, v_t, ok, MASKED and not F.EVEN, WALK, F)
        if WALK:
            K += k_step
            V += v_step
        s = _scores(q, k, mcol - n0, info.mix, 0.0, c2, t, False, MODE, F)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        fj = n.to(tl.float32)[None, :] + tl.cast(n0 - mcol, tl.float32)
        sj = fj
        if F.KIND == SLOPE:
            sj = head.slope * n.to(tl.float32)[None, :] + head.slope * tl.cast(n0 - mcol, tl.float32)
        if F.KIND == POTENTIAL or F.KIND == LOG:
            sj = _vector(SK, j, klen, 0.0, MASKED and not F.EVEN)[None, :]
        if F.KNOTS > 0 and not NEAR:
            if n0 >= part.until:
                part = _stretch(n0, mcol - n0, info.near, info.far, t, head, ZERO, F)
                if F.GRAD:
                    if part.below != pieces.held:
                        pieces = _settle(pieces, part.below, sums, info.rho, head, t, F)
                        zero = _zeros(F.BM, 4)
                        sums = Sums(zero, sums.query, sums.of_query, sums.gate, sums.of_gate, sums.mix, sums.held,
                                    zero, zero)  # fmt: skip
        near = info
        if NEAR:
            near = _with_band(info, _band(info.band, head.h, mcol, n0, Tq, F))
        s, psi, far = _add_bias(s, 0.0, mcol - n0, fi, fj, sj, near, head, t, c2, part, NEAR, ZERO, False, MODE, F)
        level = lse - far * c2 if F.KNOTS > 0 and not NEAR else lse
        w = tl.exp2(s * c2 - level[:, None]) if F.RAW else tl.exp2(s - level[:, None])
        if MASKED:
            ok2 = _visible(a + (mcol - n0), n[None, :], klen - n0, j[None, :], info.doc_lo, info.doc_hi, F)
            w = tl.where(ok2, w, 0.0)
        ds = w * (dp - delta[:, None])
        if F.GRAD and not NEAR:  # `backward_band` sums what is near
            row, query, of_query, gate, of_gate, mix, held, by_psi, by_away = sums
            if not F.SURE and F.KIND != BANK:
                row += _fold(ds, F.BM, F.BN)
            if F.KIND == POTENTIAL:
                gap = (info.ref - sj) if F.CANCEL else (info.s - sj)
                if not F.CAUSAL:
                    sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
                    query += _fold(ds * sign, F.BM, F.BN)
                    of_query += _fold(w * sign, F.BM, F.BN)
                    gap = tl.abs(gap)
                if F.GATED:
                    gate -= _fold(ds * gap, F.BM, F.BN)
                    of_gate -= _fold(w * gap, F.BM, F.BN)
            if F.KIND == LOG:
                gap = info.s - sj
                log = _log2(gap * gap + 1.0, F.EXACT)
                pull = gap * tl.exp2(-log)
                query += _fold(ds * pull, F.BM, F.BN)
                of_query += _fold(w * pull, F.BM, F.BN)
                if F.GATED:
                    gate -= _fold(ds * log, F.BM, F.BN)
                    of_gate -= _fold(w * log, F.BM, F.BN)
            if F.KNOTS > 0:
                away = _tile_away(mcol - n0, head, F)
                x = ds
                if ZERO:  # the distance 0, below knots that were not counted
                    x = tl.where(psi == 0.0, ds, 0.0)
                    pieces = _with_offset(pieces, _at_zero(head), _fold(x, F.BM, F.BN), F)
                    x = ds - x
                row += _fold(x, F.BM, F.BN)
                by_psi += _fold(x * psi, F.BM, F.BN)
                by_away += _fold(x * away, F.BM, F.BN)
                if part.inside > 0:
                    pieces = _over_knots(pieces, x, psi, away, part.below, part.inside, info.rho, head, t, F)
            if SUMMED:
                rounded = ds.to(k.dtype)
                if not F.HAS_FAR:
                    dq = tl.dot(rounded, k, dq, input_precision="ieee")
                x = _from_base(_singles(held, rounded.dtype, F), rounded, F)
                held = _pairs(rounded, F)
                if F.HAS_FAR:  # here fewer registers are left
                    dq = tl.dot(rounded, k, dq, input_precision="ieee")
                # Adds nothing, but lays x out as the next product needs it: else it would go through memory once more.
                x += rounded * 0.0
                mix = tl.dot(x, tl.trans(_bank(mcol - n0, t, F.BN, F)), mix, input_precision="ieee")
                _add_to_bank(ByBank, mcol - n0, x, info.mix, most, F)
            sums = Sums(row, query, of_query, gate, of_gate, mix, held, by_psi, by_away)
        if not SUMMED:
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq, sums, pieces


@triton.jit
def _collect(sums, at, x, F: tl.constexpr):
    """Sums [4, PP] with the sum of x [BM, 4] added in column `at`, in four parts: each what one warp of four holds, so
    that warps need not wait for each other."""
    if F.EXACT:
        # In the layout of float32 products several threads hold each entry, and Triton 3.6 would count it for each.
        part = tl.where(tl.arange(0, 4) == 0, tl.sum(tl.sum(x, 1), 0), 0.0)
    else:
        part = tl.sum(tl.reshape(x, (4, F.BM)), 1)
    return sums + tl.where(tl.arange(0, F.PP)[None, :] == at, part[:, None], 0.0)


@triton.jit
def _with_offset(pieces, at, row, F: tl.constexpr):
    offsets = _collect(pieces.offsets, at, row, F)
    return Pieces(pieces.held, pieces.rho, pieces.rate, pieces.slopes, offsets)


@triton.jit
def _settle(pieces, then, sums, rho, head, t, F: tl.constexpr):
    """The sums of the piece that was held go where they belong; another is held then."""
    slope, offset = _piece(t, head, pieces.held, F)
    return Pieces(
        then,
        pieces.rho + slope * sums.psi,
        pieces.rate + slope * (rho * sums.away),
        _collect(pieces.slopes, pieces.held, rho * sums.psi, F),
        _collect(pieces.offsets, pieces.held, sums.row, F),
    )


@triton.jit
def _store_pieces(pieces, of_rho, ok, at, head, F: tl.constexpr):
    tl.store(of_rho, tl.sum(pieces.rho, 1) / head.unit, mask=ok)
    of_rate = tl.sum(tl.sum(pieces.rate, 1), 0) / head.unit
    tl.store(at, tl.sum(pieces.slopes, 0) + tl.where(tl.arange(0, F.PP) == F.PP - 1, of_rate, 0.0))
    tl.store(at + F.PP, tl.sum(pieces.offsets, 0))


@triton.jit
def _over_knots(pieces, x, psi, away, below, inside, rho, head, t, F: tl.constexpr):
    """What lies above each knot inside a tile. A knot is fetched and its sums are joined while others are summed."""
    big: tl.constexpr = 1.0 * (1 << 80)  # makes 0 or 1 of any difference from 1e-24 on, with no comparison
    steep = big / rho
    knot, jump = _knot(t, head, below, F)
    row = _zeros(F.BM, 4)
    slope = _zeros(F.BM, 4)
    for k in range(below, below + inside):
        after, then = _knot(t, head, tl.minimum(k + 1, F.KNOTS - 1), F)
        slopes = _collect(pieces.slopes, F.KNOTS + k, slope, F)
        offsets = _collect(pieces.offsets, F.KNOTS + k, row, F)
        above = x * tl.minimum(tl.maximum(tl.fma(psi, big, -knot * steep), 0.0), 1.0)
        row = _fold(above, F.BM, F.BN)
        slope = _fold(above * psi, F.BM, F.BN)
        rate = _fold(above * away, F.BM, F.BN)
        pieces = Pieces(pieces.held, pieces.rho + jump * slope, pieces.rate + jump * (rho * rate), slopes, offsets)
        slope *= rho
        knot, jump = after, then
    slopes = _collect(pieces.slopes, F.KNOTS + below + inside, slope, F)
    offsets = _collect(pieces.offsets, F.KNOTS + below + inside, row, F)
    return Pieces(pieces.held, pieces.rho, pieces.rate, slopes, offsets)


@triton.jit
def _slide(x, F: tl.constexpr):
    """A tile's entries by query and distance, [BM, SPAN]: the inverse of spreading. Zero where the tile has no such
    entry: around it, in the shared memory, there is nothing else."""
    tl.static_assert(F.SPAN <= 2 * F.BN)  # BM <= BN
    x = tl.join(tl.zeros_like(x), x)
    x = tl.join(x, tl.zeros_like(x))  # [.., .., 2, 2], itself at [1, 0]
    r1, r0, y1, y0 = _by_eight(F.BM, F.SPAN)
    x = tl.permute(tl.reshape(x, (F.BM, F.BN // 8, 8, 2, 2)), (4, 3, 1, 0, 2))
    d = r0 - y0
    at = (r1 - y1 + F.BN // 4) * (F.BM * 8) + (d >> 3) * (F.BM * 8) + (r1 * 8 + r0) * 8 + (d & 7)
    return tl.reshape(_pick(tl.reshape(x, (F.BM * F.BN * 4,)), at), (F.BM, F.SPAN))


@triton.jit
def _pairs(x, F: tl.constexpr):
    """A tile of 16 bits as one of 32, half as wide: a loop would carry each entry in a register of its own."""
    if F.EXACT:
        return x
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (F.BM, F.BN // 2, 2)))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _singles(x, like: tl.constexpr, F: tl.constexpr):
    """The inverse."""
    if F.EXACT:
        return x
    else:
        both = tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))
        return tl.reshape(both, (F.BM, F.BN)).to(like, bitcast=True)


@triton.jit
def _from_base(before, x, F: tl.constexpr):
    """Entries by query and distance, [BM, BN], the latter from a tile's `base` on: of the tile x itself, and of the one
    before it, which has the larger distances."""
    tl.static_assert(F.BM <= F.BN)
    both = tl.reshape(tl.join(before, x), (F.BM, F.BN // 8, 8, 2))
    return _sheared(tl.reshape(tl.permute(both, (3, 1, 0, 2)), (F.BM * F.BN * 2,)), F)


@triton.jit
def _add_to_bank(ByBank, base, x, mix, most, F: tl.constexpr):
    """Adds dS by query and by distance from `base` on, times the queries' rows, to what a program has of a bank's
    gradient, of `most` distances. It is kept in such an order that a thread adds four neighbours at once of what it
    holds of the product: pairs of columns of each group of eight, and eight rows of each sixteen. The memory adds,
    which nobody waits for; each entry belongs to one thread, so it is added to in the order of the tiles."""
    y = tl.arange(0, F.BN)
    half: tl.constexpr = F.BN // 2
    d = (base + y % half // 8 * 16 + y // half * 8 + y % 8)[None, :, None]
    n = tl.arange(0, 4)[:, None, None] * (F.RP // 4) + tl.arange(0, F.RP // 4)[None, None, :]
    x = tl.dot(tl.trans(x), mix, input_precision="ieee")
    x = tl.permute(tl.reshape(x, (F.BN // 16, 2, 8, F.RP // 8, 4, 2)), (4, 1, 0, 2, 3, 5))
    x = tl.reshape(x, (4, F.BN, F.RP // 4))
    tl.atomic_add(ByBank + d * F.RP + n, x, mask=(d >= 0) & (d < most), sem="relaxed", scope="cta")


@triton.jit
def _store_sums(P, x, F: tl.constexpr):
    """The columns of x [BM, DP] summed up, as a product with ones: a sum across threads takes twice as long."""
    ones = tl.full((16, F.BM), 1.0, tl.float32).to(x.dtype)
    sums = tl.dot(ones, x, input_precision="ieee")
    e = tl.arange(0, F.DP)[None, :]
    tl.store(P + tl.broadcast_to(e, (16, F.DP)), sums, mask=(tl.arange(0, 16)[:, None] == 0) & (e < F.D))


@triton.jit
def _own_queries(
    b, h, m0, Q, K, V, O, Low, DO, Lse, Rows, Delta, DQ, ByQuery, ByGate, ByBank, pieces_at, Parts, Bends, Band, Meta,
    Docs, t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, H, GROUP,
    Tq, Tk, q_off, c2, scale, reach, by_t, B, F: tl.constexpr,
):  # fmt: skip
    """All that backward_q does for one block of queries."""
    blocks = tl.cdiv(Tq, F.BM)
    most = tl.minimum(reach, Tk)
    q_off, klen = _place(Meta, b, q_off, Tk, F)
    mcol = q_off + m0
    r = m0 + tl.arange(0, F.BM)
    r64 = r.to(tl.int64)
    q = _features(Q + b * q_b + h * q_h, r64, q_t, r < Tq, True, F)
    do = _features(DO + b * do_b + h * do_h, r64, do_t, r < Tq, True, F)
    o = _features(O + b * o_b + h * o_h, r64, o_t, r < Tq, True, F)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if F.SURE and not F.EXACT:
        low = _features(Low + b * o_b + h * o_h, r64, o_t, r < Tq, True, F)
        delta += tl.sum(low.to(tl.float32) * do.to(tl.float32), 1)
    row = (b * H + h) * Tq + r
    head = _head(t, h, c2, F)
    info = _block_of_queries(t, head, Docs, Band, b, m0, mcol, Tq, Tk, F)
    lse = tl.load(Lse + row, mask=r < Tq, other=float("inf"))
    if F.KNOTS > 0:
        if (h == 0) | (t.size > 0):
            n = tl.arange(0, F.KP)
            at = _bends_of(Bends, b, h, H, blocks, t, F) + m0 // F.BM * (2 * F.KP) + n
            tl.store(at, info.near)
            tl.store(at + F.KP, info.far)
    if F.CANCEL and (F.KIND == SLOPE or F.KIND == POTENTIAL):
        fi = tl.arange(0, F.BM).to(tl.float32)[:, None]
        lse += tl.sum(_row_constant(fi, info.s, info.ref, info.gate, head.slope, c2, F), 1)
    # Early: what is not needed in the loops should not live through them.
    tl.store(Rows + row * F.WIDE, lse, mask=r < Tq)
    if F.GATED:
        tl.store((Rows + row * F.WIDE + 2)[:, None], info.gate, mask=r[:, None] < Tq)
    if F.WIDE > 2 and (F.KIND == LOG or F.KIND == POTENTIAL or (F.KIND == PROFILE and F.KNOTS == 0 and not F.ONE)):
        tl.store((Rows + row * F.WIDE + 3)[:, None], info.rho if F.KIND == PROFILE else info.s, mask=r[:, None] < Tq)

    Parts += ((b * blocks + m0 // F.BM) * H + h) * F.D
    if F.BIAS:  # rows beyond the last are zero, and so is their dQ
        _store_sums(Parts + (B * blocks).to(tl.int64) * (H * F.D), do, F)

    begin, far, full, end = _range_of_keys(Docs, mcol, klen, Tk, reach, F)
    dq = _blank(F.BM, F.DP, Tk + m0 if F.KIND == BANK and not F.HAS_FAR else Tk)
    zero = _zeros(F.BM, 4)
    tile = 0.0
    if F.KIND == BANK:
        tile = _pairs(_zeros(F.BM, F.BN).to(q.dtype), F)
    sums = Sums(zero, zero, zero, zero, zero, _zeros(F.BM, F.RP), tile, zero, zero)
    pieces = Pieces(tl.cast(0, tl.int32), zero, zero, _zeros(4, F.PP), _zeros(4, F.PP))
    K = _of_head(K, b, h // GROUP, k_b, k_h, F)
    V = _of_head(V, b, h // GROUP, v_b, v_h, F)
    SK = t.b + b * t.k_b + h * Tk
    if F.HAS_FAR and F.CAUSAL:
        dq, sums, pieces = _backward_q_tiles(
            dq, sums, pieces, q, do, delta, lse, K, V, k_t, v_t, begin, far, mcol, klen, Tq, SK, ByBank, most, info,
            head, t, c2, False, FAR, F)  # fmt: skip
    if not (F.DOCS or F.WINDOW > 0):
        dq, sums, pieces = _backward_q_tiles(
            dq, sums, pieces, q, do, delta, lse, K, V, k_t, v_t, far, full, mcol, klen, Tq, SK, ByBank, most, info,
            head, t, c2, False, ANY, F)  # fmt: skip
    dq, sums, pieces = _backward_q_tiles(
        dq, sums, pieces, q, do, delta, lse, K, V, k_t, v_t, full, end, mcol, klen, Tq, SK, ByBank, most, info, head, t,
        c2, True, ANY, F)  # fmt: skip

    dq *= scale
    _put(DQ + b * dq_b + h * dq_h, r, dq_t, r < Tq, dq, F)
    if F.BIAS:
        _store_sums(Parts, dq.to(q.dtype), F)
    # Rows of dS sum to zero. What they sum to here is the error of delta, which came from a rounded output: with it
    # delta is put right for the other kernels, and the sums above for that error times the expectation of their factor.
    # Not those of a bank: there plain code's rounding weighs as much.
    rowsum = tl.sum(zero if F.SURE else sums.row, 1)
    delta += rowsum
    tl.store(Delta + row, delta, mask=r < Tq)
    tl.store(Rows + row * F.WIDE + 1, delta, mask=r < Tq)
    if F.GRAD:
        if F.KIND == LOG or (F.KIND == POTENTIAL and not F.CAUSAL):
            tl.store(ByQuery + row, tl.sum(sums.query, 1) - rowsum * tl.sum(sums.of_query, 1), mask=r < Tq)
        if F.GATED:
            of_gates = tl.sum(sums.gate, 1) - rowsum * tl.sum(sums.of_gate, 1)
            tl.store(ByGate + row, of_gates * scale if F.RAW else of_gates, mask=r < Tq)
        if F.KIND == BANK:
            mix = sums.mix
            below = mcol - tl.cdiv(end, F.BN) * F.BN
            if below + F.BN > 0:  # distances below the last tile's base, which no other followed to add
                held = _singles(sums.held, q.dtype, F)
                x = _from_base(held, tl.zeros_like(held), F)
                mix = tl.dot(x, tl.trans(_bank(below, t, F.BN, F)), mix, input_precision="ieee")
                _add_to_bank(ByBank, below, x, info.mix, most, F)
            at = ByQuery + (b * Tq + r)[:, None] * by_t + h * F.RP + tl.arange(0, F.RP)[None, :]
            mix = mix if q.dtype == tl.float16 else mix * scale
            tl.store(at, mix.to(q.dtype), mask=r[:, None] < Tq)
        if F.KNOTS > 0:
            pieces = _settle(pieces, 0, sums, info.rho, head, t, F)
            _store_pieces(pieces, ByQuery + row, r < Tq, pieces_at, head, F)


@triton.jit
def backward_q(
    Q, K, V, O, Low, DO, Lse, Rows, Delta, DQ, ByQuery, ByGate, ByBank, PieceSums, Parts, Bends, Table, Band, Meta,
    Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, H, GROUP, Tq, Tk, q_off, c2, scale, reach, by_t, B,
    G: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """dQ; the delta that the other kernels use, and for backward_k `Rows` [B, H, Tq, WIDE], where with CANCEL the level
    is relative to the block of queries; and the gradients of what belongs to a query: ByQuery [B, H, Tq] of
    potentials and of rho, or [B, Tq, H, RP] of a bank's rows, by_t from token to token; ByGate [B, H, Tq].
    Of a profile with knots: `PieceSums` [B, H, blocks, 2, PP], sums of dS * u and of dS over the tiles that begin on
    each piece, then over what lies above each knot, and at the very end of the first the gradient of the rate; and for
    backward_k `Bends` [B, 1 or H, blocks, 2, KP]: near and far. Of a bank: `ByBank` [programs, distances, RP], each
    program's share, for which it takes many blocks, long rows and short ones. With BIAS, `Parts` [2, B, blocks, H, D]:
    dQ and dO summed over the queries of a block."""
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    blocks = tl.cdiv(Tq, F.BM)
    if F.KIND == BANK and F.GRAD:
        most = tl.minimum(reach, Tk)
        ByBank += tl.program_id(0).to(tl.int64) * most * F.RP
        for d in range(0, most, F.BN):
            at = (d + tl.arange(0, F.BN))[:, None]
            tl.store(ByBank + at * F.RP + tl.arange(0, F.RP)[None, :], 0.0, mask=at < most)
        tl.debug_barrier()  # others of its threads add to these
        # A long row of tiles and then a short one, so that all programs have as much to do; and those under way at a
        # time are of few heads, whose keys stay in the cache.
        pairs = (blocks + 1) // 2
        for n in range(0, 2 * tl.cdiv(pairs * B * H - tl.program_id(0), tl.num_programs(0))):
            x = tl.program_id(0) + n // 2 * tl.num_programs(0)
            b = (x // pairs // H).to(tl.int64)
            h = (x // pairs % H).to(tl.int64)
            short = x % pairs
            if (n % 2 == 0) | (2 * short + 1 < blocks):
                m0 = tl.where(n % 2 == 0, blocks - 1 - short, short) * F.BM
                _own_queries(
                    b, h, m0, Q, K, V, O, Low, DO, Lse, Rows, Delta, DQ, ByQuery, ByGate, ByBank, PieceSums, Parts,
                    Bends, Band, Meta, Docs, t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h,
                    do_t, dq_b, dq_h, dq_t, H, GROUP, Tq, Tk, q_off, c2, scale, reach, by_t, B, F)  # fmt: skip
    else:
        place, pair = _row()
        m0 = (blocks - 1 - place) * F.BM
        b = (pair // H).to(tl.int64)
        h = (pair % H).to(tl.int64)
        pieces_at = PieceSums + ((b * H + h) * blocks + m0 // F.BM) * (2 * F.PP) + tl.arange(0, F.PP)
        if F.ROWS == REST:
            if m0 < _first_rows(t, b, Tq):
                if F.GRAD:  # what the host sums
                    r = m0 + tl.arange(0, F.BM)
                    tl.store(ByQuery + (b * H + h) * Tq + r, 0.0, mask=r < Tq)
                    tl.store(pieces_at, 0.0)
                    tl.store(pieces_at + F.PP, 0.0)
                _own_queries(
                    b, h, m0, Q, K, V, O, Low, DO, Lse, Rows, Delta, DQ, ByQuery, ByGate, ByBank, pieces_at, Parts,
                    Bends, Band, Meta, Docs, _as_table(t, Table, Tk), q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
                    o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, H, GROUP, Tq, Tk, q_off, c2, scale, reach, by_t, B,
                    G)  # fmt: skip
                return
        _own_queries(
            b, h, m0, Q, K, V, O, Low, DO, Lse, Rows, Delta, DQ, ByQuery, ByGate, ByBank, pieces_at, Parts, Bends, Band,
            Meta, Docs, t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h,
            dq_t, H, GROUP, Tq, Tk, q_off, c2, scale, reach, by_t, B, F)  # fmt: skip


@triton.jit
def bank_gradient(
    DBank, ByBank, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin, H, GROUP, Tq, Tk, q_off,
    c2, shares, most, rank, length, F: tl.constexpr,
):  # fmt: skip
    """The gradient of a bank, [rank, length]: the sum of backward_q's shares, `ByBank` [shares, most, RP]; no query has
    seen the distances from `most` on."""
    at = tl.program_id(0) * F.BN + tl.arange(0, F.BN)
    total = _zeros(F.BM, F.BN)
    for start in range(0, shares, F.BM):
        share = start + tl.arange(0, F.BM)[:, None]
        ok = (share < shares) & (at < most * F.RP)[None, :]
        total += tl.load(ByBank + share.to(tl.int64) * (most * F.RP) + at[None, :], mask=ok, other=0.0)
    d = at // F.RP
    n = at % F.RP
    n = n % (F.RP // 4) // 2 * 8 + n // (F.RP // 4) * 2 + n % 2  # in which order `_add_to_bank` keeps them
    tl.store(DBank + n * length + d, tl.sum(total, 0), mask=(n < rank) & (d < length))


@triton.jit
def _stretch_of_rows(m0, base, Bends, Tq, t, head, ZERO: tl.constexpr, F: tl.constexpr):
    """What a block of keys finds at the tile of query m0, `base` behind it: once for all tiles up to the first block of
    queries that lies otherwise. The bends of a block come in the order of the knots: those on both sides of the piece
    tell."""
    first = m0 // F.QM
    last = (Tq - 1) // F.QM
    at = Bends + tl.minimum(first, last) * (2 * F.KP) + tl.arange(0, F.KP)
    count = _knots_in(base, tl.load(at), tl.load(at + F.KP), ZERO, F)
    until = m0 + 1
    if F.CAUSAL and not ZERO:
        below = count & (MANY - 1)
        n = first + tl.arange(0, 32)
        at = Bends + tl.minimum(n, last) * (2 * F.KP) + below
        least = (base - m0 - (F.BN - 1) + n * F.QM).to(tl.float32)
        near = tl.load(at - 1, mask=(n > first) & (below > 0), other=-1.0)
        far = tl.load(at + F.KP, mask=(n > first) & (below < F.KNOTS), other=2e9)
        other = (near >= least) | (far < least + (F.QM + F.BN - 2))
        until = tl.where(count < MANY, tl.min(tl.where(other & (n > first), n, first + 32), 0) * F.QM, until)
    return _looked_up(count, t, head, until, F)


@triton.jit
def _backward_k_tiles(
    dk, dv, key_sum, rate_sum, k, v, Q, DO, q_t, do_t, Rows, begin, end, n0, q_off, klen, b, Tq, sj, sref, doc_lo,
    doc_hi, head, t, Bends, Band, c2, MASKED: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    ZERO: tl.constexpr = MASKED or not F.CAUSAL
    NEAR: tl.constexpr = MASKED and F.BAND
    a = tl.arange(0, F.BM)
    fj = tl.arange(0, F.BN).to(tl.float32)[:, None]
    part = _nowhere(begin)
    WALK: tl.constexpr = not F.TMA and not F.GATED  # gates leave no registers for it
    Rows += tl.cast(begin, tl.int64) * F.WIDE
    if WALK:
        Q += tl.cast(begin, tl.int64) * q_t
        DO += tl.cast(begin, tl.int64) * do_t
        q_step = tl.cast(F.BM, tl.int64) * q_t
        do_step = tl.cast(F.BM, tl.int64) * do_t
    C, series = _series(head, q_off + begin - n0, F)
    for m0 in range(begin, end, F.BM):
        mcol = q_off + m0
        m = tl.cast(m0, tl.int64)
        q = _walked(Q, m0, a, q_t, a < Tq - m0, not F.EVEN, WALK, F)
        do = _walked(DO, m0, a, do_t, a < Tq - m0, not F.EVEN, WALK, F)
        lse, delta, gi, si = _rows(Rows, a, Tq - m0, F)
        Rows += F.BM * F.WIDE
        if WALK:
            Q += q_step
            DO += do_step
        mix = 0.0
        if F.KIND == BANK:
            mix = _mix(t, b, head.h, m0, a, Tq, F)
        if F.KNOTS > 0:  # by itself: beside level and delta it would take the registers of a gate, too
            si = _vector(t.b + b * t.q_b + m, a, Tq - m0, 1.0, not F.EVEN)[None, :]
        band = Band
        if NEAR:
            band = _band(Band, head.h, m0, n0, Tq, F)
        info = Query(si, sref, gi, si, 0.0, 0.0, 0.0, band, 0, 0)
        bias = 0.0
        offset = 0.0
        if F.KNOTS > 0 and not NEAR:
            if m0 >= part.until:
                part = _stretch_of_rows(m0, mcol - n0, Bends, Tq, t, head, ZERO, F)
        if F.SERIES:
            bias = _zeros(F.BN, F.BM)
            if not NEAR:
                psi = _psi_of_series(tl.load(C + series), head, True, F)
                bias, offset = _add_profile(bias, psi, part, info, head, t, ZERO, True, F)
                C += F.BM * WAVES
        s = _scores(k, q, mcol - n0, mix, bias, c2, t, True, MODE, F)
        fi = (mcol - n0 + a).to(tl.float32)[None, :]
        s, psi, offset = _add_bias(s, offset, mcol - n0, fi, fj, sj, info, head, t, c2, part, NEAR, ZERO, True, MODE, F)
        if F.KNOTS > 0 and not NEAR:
            lse -= offset * c2
        if F.CANCEL and F.KIND == SLOPE:
            lse += head.slope * (q_off + m0 // F.QM * F.QM - n0)
        if F.CANCEL and F.KIND == POTENTIAL:
            moved = tl.load(t.a + b * t.q_b + head.h * Tq + m0 // F.QM * F.QM) - sref
            lse += moved * c2 * gi if F.GATED else moved * LOG2E
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        w = tl.exp2(s * c2 - lse) if F.RAW else tl.exp2(s - lse)
        if MASKED:
            n = tl.arange(0, F.BN)[:, None]
            i = mcol - n0 + a[None, :]
            w = tl.where(_visible(i, n, klen - n0, mcol + a[None, :], doc_lo, doc_hi, F), w, 0.0)
        ds = w * (dp - delta)
        if F.GRAD:
            if F.KIND == SLOPE:
                gap = (fi - fj) if F.CAUSAL else tl.abs(fi - fj)
                key_sum += _fold(ds * gap, F.BN, F.BM)
            if F.KIND == POTENTIAL or F.KIND == LOG:
                weighted = ds * gi if F.GATED else ds
                if F.KIND == LOG:
                    gap = si - sj
                    weighted = weighted * gap * tl.exp2(-_log2(gap * gap + 1.0, F.EXACT))
                elif not F.CAUSAL:
                    gap = si - sj
                    weighted = tl.where(gap > 0, weighted, tl.where(gap < 0, -weighted, 0.0))
                key_sum += _fold(weighted, F.BN, F.BM)
            if F.KIND == PROFILE:
                x = ds if F.ONE else ds * si
                key_sum += _fold(x * psi, F.BN, F.BM)
                pull = _spread(_psi_by_rate(_distances(mcol - n0, True, F), head.rate, F), True, F)
                rate_sum += _fold(x * pull, F.BN, F.BM)
        # Both at the end: they run on while the next tile begins.
        w = w.to(do.dtype)
        ds = ds.to(q.dtype)
        dv = tl.dot(w, do, dv, input_precision="ieee")
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv, key_sum, rate_sum


@triton.jit
def backward_k(
    Q, K, V, DO, Rows, DK, DV, DKey, DRate, Bends, Table, Band, Series, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k,
    t_g, t_f, t_size, t_origin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b,
    dv_h, dv_t, H, GROUP, Tq, Tk, q_off, c2, scale, reach, G: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, and sums of dS over the queries: `DKey` [B, H, Tk] for a
    potential at the keys, or for slopes and a profile without knots, of which the host takes the sum; `DRate`, the same
    for its rate. QM is the block of queries of backward_q, which wrote Rows and Bends. The FIRST queries of a profile
    come before the REST: `Table` and the flags G are theirs."""
    place, pair = _row()
    n0 = place * F.BN
    HKV = H // GROUP
    b = (pair // HKV).to(tl.int64)
    hk = (pair % HKV).to(tl.int64)
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    q_off, klen = _place(Meta, b, q_off, Tk, F)
    j1 = n0 + tl.arange(0, F.BN)
    j = j1[:, None]
    k = _features(K + b * k_b + hk * k_h, j1.to(tl.int64), k_t, j1 < Tk, True, F)
    v = _features(V + b * v_b + hk * v_h, j1.to(tl.int64), v_t, j1 < Tk, True, F)
    doc_lo, doc_hi = _borders(Docs, j, Tk, F)
    # Queries that see the block: rows begin .. end; up to `full` the mask matters; from `far` on tiles are FAR.
    begin = 0
    end = Tq
    if F.DOCS:
        end = tl.minimum(end, tl.load(Docs + Tk + tl.minimum(n0 + F.BN, Tk) - 1) - q_off)
        begin = tl.maximum(begin, tl.load(Docs + n0) - q_off)
    if F.CAUSAL:
        begin = tl.maximum(begin, n0 - q_off)
    if F.WINDOW > 0:
        end = tl.minimum(end, n0 + F.BN - 1 + F.WINDOW - q_off)
        if not F.CAUSAL:
            begin = tl.maximum(begin, n0 - F.WINDOW + 1 - q_off)
    if n0 >= klen:
        end = 0
    begin = begin // F.BM * F.BM
    full = begin
    if F.CAUSAL:
        shown = n0 + (2 * F.BN if F.BAND else F.BN - 1) - q_off
        full = tl.maximum(begin, (tl.maximum(shown, 0) + F.BM - 1) // F.BM * F.BM)
    if F.DOCS or F.WINDOW > 0:
        full = end
    full = tl.minimum(full, tl.maximum(end, begin))
    far = end
    if F.HAS_FAR and F.CAUSAL:
        far = (tl.maximum(reach + n0 + F.BN - 1 - q_off, 0) + F.BM - 1) // F.BM * F.BM
        far = tl.maximum(tl.minimum(far, end), full)

    dk = _blank(F.BN, F.DP, Tk)
    dv = _blank(F.BN, F.DP, Tq)  # not the same to the compiler: it would keep them once, and wait for each product
    for g in range(GROUP):
        h = hk * GROUP + g
        head = _with_series(_head(t, h, c2, F), Series, t, Tk, F)
        sj = head.slope * tl.arange(0, F.BN).to(tl.float32)[:, None]
        sref = 0.0
        if F.KIND == POTENTIAL or F.KIND == LOG:
            sj = tl.load(TB + b * t_k + h * Tk + j, mask=j < Tk, other=0.0)
            sref = tl.load(TB + b * t_k + h * Tk + n0)
        Qh = _of_head(Q, b, h, q_b, q_h, F)
        DOh = _of_head(DO, b, h, do_b, do_h, F)
        row = (b * H + h) * Tq
        key_sum = _zeros(F.BN, 4)
        rate_sum = _zeros(F.BN, 4)
        Rows_h = Rows + row * F.WIDE
        Bends_h = Bends
        if F.KNOTS > 0:
            Bends_h = _bends_of(Bends, b, h, H, tl.cdiv(Tq, F.QM), t, F)
        start = begin
        shown = full
        if F.ROWS == REST:
            table = _as_table(t, Table, Tk)
            start = tl.maximum(tl.minimum(_first_rows(t, b, Tq), end), begin)
            shown = tl.minimum(full, start)
            near = _head(table, h, c2, G)
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Qh, DOh, q_t, do_t, Rows_h, begin, shown, n0, q_off, klen,
                b, Tq, sj, sref, doc_lo, doc_hi, near, table, Bends, Band, c2, True, ANY, G)  # fmt: skip
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Qh, DOh, q_t, do_t, Rows_h, shown, start, n0, q_off, klen, b,
                Tq, sj, sref, doc_lo, doc_hi, near, table, Bends, Band, c2, False, ANY, G)  # fmt: skip
            shown = tl.maximum(full, start)
        if F.CAUSAL or F.DOCS or F.WINDOW > 0:
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Qh, DOh, q_t, do_t, Rows_h, start, shown, n0, q_off, klen,
                b, Tq, sj, sref, doc_lo, doc_hi, head, t, Bends_h, Band, c2, True, ANY, F)  # fmt: skip
        if not (F.DOCS or F.WINDOW > 0):
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Qh, DOh, q_t, do_t, Rows_h, shown, far, n0, q_off, klen, b,
                Tq, sj, sref, doc_lo, doc_hi, head, t, Bends_h, Band, c2, False, ANY, F)  # fmt: skip
        if F.HAS_FAR and F.CAUSAL:
            dk, dv, key_sum, rate_sum = _backward_k_tiles(
                dk, dv, key_sum, rate_sum, k, v, Qh, DOh, q_t, do_t, Rows_h, far, end, n0, q_off, klen, b, Tq,
                sj, sref, doc_lo, doc_hi, head, t, Bends_h, Band, c2, False, FAR, F)  # fmt: skip
        if F.GRAD:
            # Rows of keys beyond klen were never masked: what they gathered is thrown away here.
            at = (b * H + h) * Tk + j1
            total = tl.sum(key_sum, 1)
            if F.RAW and F.GATED:
                total *= scale
            tl.store(DKey + at, tl.where(j1 < klen, total, 0.0), mask=j1 < Tk)
            if F.KIND == PROFILE:
                tl.store(DRate + at, tl.where(j1 < klen, tl.sum(rate_sum, 1), 0.0), mask=j1 < Tk)
    DK += b * dk_b + hk * dk_h
    DV += b * dv_b + hk * dv_h
    dk = tl.where(j < klen, dk * scale, 0.0)
    dv = tl.where(j < klen, dv, 0.0)
    _put(DK, j1, dk_t, j1 < Tk, dk, F)
    _put(DV, j1, dv_t, j1 < Tk, dv, F)


@triton.jit
def _blocks_on(base, q_off, Tq, Tk, F: tl.constexpr):
    """The first block of queries that has keys on the diagonal `base`, and how many follow, itself included."""
    begin = 0
    end = tl.cdiv(Tq, F.BM)
    if not F.META:
        begin = tl.minimum(tl.cdiv(tl.maximum(base - q_off - F.BN + 1, 0), F.BM), end)
        end = tl.minimum(tl.maximum(tl.cdiv(Tk - q_off + base, F.BM), begin), end)
    return begin, end - begin


@triton.jit
def _on_diagonal(Q, K, V, DO, Lse, Delta, q_t, k_t, v_t, do_t, m0, n0, klen, Tq, MASKED: tl.constexpr, F: tl.constexpr):
    """What the gradient of a diagonal needs of the tile at query m0 and key n0 of one head; and which keys exist."""
    a = tl.arange(0, F.BM)
    m = tl.cast(m0, tl.int64)
    n = tl.cast(n0, tl.int64)
    ok = (n0 + a >= 0) & (n0 + a < klen)
    q = _features(Q + m * q_t, a, q_t, m0 + a < Tq, MASKED, F)
    do = _features(DO + m * do_t, a, do_t, m0 + a < Tq, MASKED, F)
    k = _features(K + n * k_t, a, k_t, ok, MASKED, F)
    v = _features(V + n * v_t, a, v_t, ok, MASKED, F)
    return q, k, v, do, _vector(Lse, m0 + a, Tq, float("inf"), MASKED), _vector(Delta, m0 + a, Tq, 0.0, MASKED), ok


@triton.jit
def _distance_tiles(
    acc, bias, Q, K, V, DO, Lse, Delta, Meta, Docs, q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t, H, Tq, Tk, q_off, c2,
    base, first, blocks, begin, end, t, MASKED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    a = tl.arange(0, F.BM)
    for x in range(begin, end):
        b = tl.cast(x // blocks, tl.int64)
        m0 = (first + x % blocks) * F.BM
        off, klen = _place(Meta, b, q_off, Tk, F)
        n0 = off + m0 - base
        r = m0 + a
        j = n0 + a
        row = b * H * Tq
        q, k, v, do, lse, delta, ok_k = _on_diagonal(
            Q + b * q_b, K + b * k_b, V + b * v_b, DO + b * do_b, Lse + row, Delta + row, q_t, k_t, v_t, do_t, m0, n0,
            klen, Tq, MASKED, F)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * c2 + bias
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        w = tl.exp2(s - lse[:, None])
        if MASKED:
            lo, hi = _borders(Docs, (off + r)[:, None], Tk, F)
            ok = _visible((a + base)[:, None], a[None, :], klen - n0, j[None, :], lo, hi, F) & ok_k[None, :]
            if F.ROWS == FIRST:
                ok = ok & (r[:, None] < _first_rows(t, b, Tq))
            w = tl.where(ok, w, 0.0)
        acc += w * (dp - delta[:, None])
    return acc


@triton.jit
def _diagonals_of_first(t, B, Tq, q_off, diagonals, shares, n: tl.constexpr, F: tl.constexpr):
    """How many of the diagonals have FIRST queries, which only the device knows, and into how many shares the programs
    that there are divide each: if they are enough, so many that none has more than a few tiles."""
    if F.META:
        return diagonals, shares
    else:
        rows = _most_first_rows(t, Tq)
        some = tl.minimum(diagonals, tl.cdiv(q_off + rows, n) + 1)
        return some, tl.maximum(tl.minimum(diagonals * shares // some, tl.cdiv(B * tl.cdiv(rows, n), FEW)), 1)


@triton.jit
def backward_distance(
    Q, K, V, DO, Lse, Delta, Out, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, H, GROUP, Tq, Tk, q_off, c2, B, first,
    F: tl.constexpr,
):  # fmt: skip
    """Sums of dS along the diagonals. One program owns a head and the block diagonal of distances around `base`, walks
    its tiles over all batch entries (or a share of them) with dS summed in registers, and sums the skew once behind it.
    `Out` [shares, H, diagonals, SPAN]: entry y belongs to the distance `base + y - BN`. Of FIRST queries, the long
    diagonals before the short, `Out` [H, diagonals, shares, SPAN]: see `_diagonals_of_first`."""
    diagonal = tl.program_id(0)
    h = (tl.program_id(1) % H).to(tl.int64)
    share = tl.program_id(1) // H
    shares = tl.num_programs(1) // H
    program = (tl.program_id(1) * tl.num_programs(0) + diagonal).to(tl.int64)
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    queries = Tq
    if F.ROWS == FIRST:
        at = share * tl.num_programs(0) + diagonal
        program = h * (shares * tl.num_programs(0)) + at
        some, shares = _diagonals_of_first(t, B, Tq, q_off, tl.num_programs(0), shares, F.BM, F)
        if at >= some * shares:
            return
        diagonal = at // shares
        share = at % shares
        if not F.META:
            queries = _most_first_rows(t, Tq)
    base = (first + diagonal) * F.BM
    block, blocks = _blocks_on(base, q_off, queries, Tk, F)
    total = B * blocks
    each = tl.cdiv(total, shares)
    begin = share * each
    end = tl.minimum(total, begin + each)
    Out += program * F.SPAN + tl.arange(0, F.SPAN)
    if begin >= end:
        tl.store(Out, 0.0)
        return
    bias = _spread(_table(_distances(base, False, F), t, h), False, F)
    acc = _zeros(F.BM, F.BN)
    Q += h * q_h
    K += (h // GROUP) * k_h
    V += (h // GROUP) * v_h
    DO += h * do_h
    Lse += h * Tq
    Delta += h * Tq
    whole = begin  # whole tiles, all of them visible: most programs have no others
    if F.EVEN and not (F.DOCS or F.WINDOW > 0):
        alike = (F.ROWS != FIRST) | (t.first_b == 0)  # else entries end at other queries
        if (q_off % F.BM == 0) & ((base >= F.BN) | (not F.CAUSAL)) & alike:
            whole = end
        acc = _distance_tiles(acc, bias, Q, K, V, DO, Lse, Delta, Meta, Docs, q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t,
                              H, Tq, Tk, q_off, c2, base, block, blocks, begin, whole, t, False, F)  # fmt: skip
    acc = _distance_tiles(acc, bias, Q, K, V, DO, Lse, Delta, Meta, Docs, q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t,
                          H, Tq, Tk, q_off, c2, base, block, blocks, whole, end, t, True, F)  # fmt: skip
    tl.store(Out, tl.sum(_slide(acc, F), 0))


@triton.jit
def _on_pieces(d, rho, head, t, F: tl.constexpr):
    """Of the distances d: psi, the piece, its slope and its offset."""
    psi = _psi(d, head.rate, F)
    piece = tl.sum((head.knots[None, :] < (psi * rho)[:, None]).to(tl.int32), 1)
    at = head.h * (F.KNOTS + 1) + piece
    return psi, piece, tl.load(t.d + at), tl.load(t.e + at)


@triton.jit
def _column(p):
    """Of a column of a series: the degree of its polynomial; which digits of the coefficient it has, the highest, those
    behind them or the rest; and whether it has the lower digits of the polynomial."""
    degree = tl.where(p < 3, 0, tl.where(p < 5, 1, tl.where(p < 8, 2, p - 5)))
    digits = tl.where((p == 1) | (p == 4) | (p == 6), 1, tl.where(p == 2, 2, 0))
    return degree, digits, p == 7


@triton.jit
def _digits(x, which, like: tl.constexpr):
    """Of x the digits that such numbers hold, what these leave, and what those leave."""
    high = x.to(like).to(tl.float32)
    middle = (x - high).to(like).to(tl.float32)
    return tl.where(which == 0, high, tl.where(which == 1, middle, x - high - middle))


@triton.jit
def _put_series(P, d, rate, F: tl.constexpr):
    """Rows d of a profile's series; see the text at the top."""
    like: tl.constexpr = P.dtype.element_ty
    p = tl.arange(0, WAVES)[None, :]
    degree, digits, lower = _column(p)
    at = P + d[:, None].to(tl.int64) * WAVES + p
    if tl.program_id(0) == 0:  # the polynomials
        place = ((2 * d - (F.BN - 1)).to(tl.float32) / F.BN)[:, None]
        before = tl.full((F.BM, 1), 1.0, tl.float32)
        this = place
        wave = tl.where(degree == 0, before, place)
        for n in tl.static_range(2, 11):
            then = 2.0 * place * this - before
            before = this
            this = then
            wave = tl.where(degree == n, this, wave)
        tl.store(at, _digits(wave, lower.to(tl.int32), like))
    else:
        half: tl.constexpr = F.BN / 2
        x = tl.maximum(d.to(tl.float32) - (F.BN - 1) / 2, 1.5 * F.BN)  # nearer tiles have no use for it
        t = half * rate / (1.0 + rate * x)
        r = t / (1.0 + tl.sqrt(1.0 - t * t))
        psi = (_psi(x, rate, F) - _log2(1.0 + r * r, True) * LN2)[:, None]
        factor = -2.0 * r
        for n in tl.static_range(1, 11):
            psi = tl.where(degree == n, (factor / n)[:, None], psi)
            factor *= r
        if like == tl.float16:
            psi /= _series_unit(rate, F)
        tl.store(at, _digits(psi, digits, like))


@triton.jit
def profile_table(
    Out, Series, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin, H, GROUP, Tq, Tk, q_off,
    c2, texts, F: tl.constexpr,
):  # fmt: skip
    """A profile's values by distance for the rho of the very first query, [H, Tk]. `First` [texts]: how many of the
    first queries of each have that rho. And with BAND psi's `Series` [1 or H, rows, WAVES]: coefficients by distance,
    and in place of the first BN the polynomials by key."""
    h = tl.program_id(1).to(tl.int64)
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    d = tl.program_id(0) * F.BM + tl.arange(0, F.BM)
    rho = tl.load(TB)
    head = _head(t, h, c2, F)
    psi, piece, slope, offset = _on_pieces(d, rho, head, t, F)
    tl.store(Out + h * Tk + d, offset + slope * (psi * rho), mask=d < Tk)
    if F.BAND and ((h == 0) | (t.size > 0)):
        rows = _series_rows(Tk, F)
        if tl.program_id(0) * F.BM < rows:
            _put_series(Series + h * t.size * (rows.to(tl.int64) * WAVES), d, head.rate, F)
    if (h == 0) & (tl.program_id(0) < texts):
        r = tl.arange(0, 1024)
        alike = Tq
        start = 0
        while start < alike:
            other = tl.load(TB + tl.program_id(0) * t_q + start + r, mask=start + r < Tq, other=rho) != rho
            alike = tl.min(tl.where(other, start + r, alike), 0)
            start += 1024
        tl.store(First + tl.program_id(0), alike)


@triton.jit
def _tile_of(rho, base, head, t, F: tl.constexpr):
    """Of the tile of queries with such rho, `base` behind the keys: the piece it begins on, psi, and what a profile
    with knots adds."""
    near, far = _bends(rho, head)
    part = _looked_up(_knots_in(base, near, far, True, F), t, head, 0, F)
    psi = _spread(_psi(_distances(base, False, F), head.rate, F), False, F)
    q = Query(0.0, 0.0, 0.0, rho[:, None], near, far, 0.0, 0, 0, 0)
    s, far = _add_profile(_zeros(F.BM, F.BN), psi, part, q, head, t, True, False, F)
    return part, psi, s + far


@triton.jit
def profile_band(
    Band, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin, H, GROUP, Tq, Tk, q_off, c2,
    F: tl.constexpr,
):  # fmt: skip
    """What a profile with knots adds to the scores of the REST on the diagonal and next to it, `Band` [H, blocks, 2,
    BM, BN], where most knots lie. All texts share it, and do not look at these knots."""
    m0 = tl.program_id(0) * F.BM
    h = (tl.program_id(1) % H).to(tl.int64)
    near = tl.program_id(1) // H
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    if m0 < _first_rows(t, 0, Tq):
        return
    rho = tl.load(TB + tl.minimum(m0 + tl.arange(0, F.BM), Tq - 1))
    _, _, bias = _tile_of(rho, near * F.BN, _head(t, h, c2, F), t, F)
    at = Band + ((h * tl.num_programs(0) + tl.program_id(0)) * 2 + near) * (F.BM * F.BN)
    tl.store(at + tl.arange(0, F.BM)[:, None] * F.BN + tl.arange(0, F.BN)[None, :], bias)


@triton.jit
def backward_band(
    Q, K, V, DO, Lse, Delta, ByQuery, PieceSums, Band, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f,
    t_size, t_origin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, H, GROUP, Tq, Tk, q_off, c2, B,
    F: tl.constexpr,
):  # fmt: skip
    """What backward_q sums for a profile with knots, for the tiles of `Band`: dS is summed over all texts, or a share
    of them, first. Each sum is one more entry behind those of the B texts in `ByQuery` and `PieceSums`."""
    # The two tiles of a block of queries side by side: they read the same.
    block = tl.program_id(0) // 2
    m0 = block * F.BM
    h = (tl.program_id(1) % H).to(tl.int64)
    near = tl.program_id(0) % 2
    base = near * F.BN
    share = tl.program_id(1) // H
    entry = ((B + share * 2 + near) * H + h).to(tl.int64)
    blocks = tl.num_programs(0) // 2
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    r = m0 + tl.arange(0, F.BM)
    ByQuery += entry * Tq + r
    PieceSums += (entry * blocks + block) * (2 * F.PP) + tl.arange(0, F.PP)
    if (m0 < _first_rows(t, 0, Tq)) | (base > m0):
        tl.store(ByQuery, 0.0, mask=r < Tq)
        tl.store(PieceSums, 0.0)
        tl.store(PieceSums + F.PP, 0.0)
        return
    each = tl.cdiv(B, tl.num_programs(1) // H)
    begin = share * each
    end = tl.minimum(B, begin + each)
    Q += h * q_h
    K += (h // GROUP) * k_h
    V += (h // GROUP) * v_h
    DO += h * do_h
    Lse += h * Tq
    Delta += h * Tq
    a = tl.arange(0, F.BM)[:, None]
    n = tl.arange(0, F.BN)[None, :]
    bias = tl.load(Band + ((h * blocks + block) * 2 + near) * (F.BM * F.BN) + a * F.BN + n) * c2
    x = _zeros(F.BM, F.BN)
    whole = begin
    if F.EVEN and base > 0:
        whole = end
    x = _distance_tiles(x, bias, Q, K, V, DO, Lse, Delta, Meta, Docs, q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t, H, Tq,
                        Tk, q_off, c2, base, block, 1, begin, whole, t, False, F)  # fmt: skip
    x = _distance_tiles(x, bias, Q, K, V, DO, Lse, Delta, Meta, Docs, q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t, H, Tq,
                        Tk, q_off, c2, base, block, 1, whole, end, t, True, F)  # fmt: skip
    head = _head(t, h, c2, F)
    rho = tl.load(TB + tl.minimum(r, Tq - 1))
    part, psi, _ = _tile_of(rho, base, head, t, F)
    rho = rho[:, None]
    away = _tile_away(base, head, F)
    zero = _zeros(F.BM, 4)
    pieces = Pieces(part.below, zero, zero, _zeros(4, F.PP), _zeros(4, F.PP))
    at_zero = tl.where(psi == 0.0, x, 0.0)
    pieces = _with_offset(pieces, _at_zero(head), _fold(at_zero, F.BM, F.BN), F)
    x -= at_zero
    if part.inside > 0:
        pieces = _over_knots(pieces, x, psi, away, part.below, part.inside, rho, head, t, F)
    sums = Sums(_fold(x, F.BM, F.BN), zero, zero, zero, zero, zero, zero, _fold(x * psi, F.BM, F.BN),
                _fold(x * away, F.BM, F.BN))  # fmt: skip
    _store_pieces(_settle(pieces, 0, sums, rho, head, t, F), ByQuery, r < Tq, PieceSums, head, F)


@triton.jit
def profile_parts(
    Out, DRho, PieceSums, ByQuery, Diagonals, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size,
    t_origin, H, GROUP, Tq, Tk, q_off, c2, B, rows, blocks, shares, diagonals, heads, n: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """A part of each sum that `profile_gradient` takes over the `rows` = B * blocks of backward_q's `PieceSums` and,
    where there are FIRST queries, over the distances of their table, whose gradient `backward_distance` left in
    `Diagonals` [H, shares of diagonals, 2 n]. `Out` [parts, H, 2, PP], laid out as PieceSums are; at the very end of
    the second the gradient of the rho of FIRST queries. And where the texts share rho, `DRho` [Tq]: its gradient,
    summed over the `heads` of all texts in ByQuery; else there are none."""
    h = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    step = tl.num_programs(1) * F.BM
    t = Term(TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin)
    a = tl.arange(0, F.BM)
    p = tl.arange(0, F.PP)[None, :]
    slopes = _zeros(F.BM, F.PP)
    offsets = _zeros(F.BM, F.PP)
    for start in range(part * F.BM, rows, step):
        r = start + a
        at = PieceSums + (((r // blocks) * H + h) * blocks + r % blocks)[:, None] * (2 * F.PP) + p
        slopes += tl.load(at, mask=r[:, None] < rows, other=0.0)
        offsets += tl.load(at + F.PP, mask=r[:, None] < rows, other=0.0)
    if F.ROWS == REST:
        head = _head(t, h, c2, F)
        rho = tl.load(TB)
        end = Tk
        if not F.META:  # farther than this no FIRST query sees
            end = tl.minimum(Tk, q_off + _most_first_rows(t, Tq))
        Diagonals += h * (shares * diagonals) * (2 * n)
        diagonals, shares = _diagonals_of_first(t, B, Tq, q_off, diagonals, shares, n, F)
        for start in range(part * F.BM, end, step):
            d = start + a
            psi, piece, slope, offset = _on_pieces(d, rho, head, t, F)
            g = _zeros(8, F.BM)
            for first in range(0, shares, 8):  # two diagonals hold each distance
                share = first + tl.arange(0, 8)[:, None]
                ok = (share < shares) & (d < end)[None, :]
                line = Diagonals + ((d // n)[None, :] * shares + share) * (2 * n) + (d % n)[None, :]
                g += tl.load(line + n, mask=ok, other=0.0)
                g += tl.load(line + shares * (2 * n), mask=ok & (d // n + 1 < diagonals)[None, :], other=0.0)
            g = tl.sum(g, 0)
            mine = piece[:, None] == p
            f = d.to(tl.float32)
            of_rate = g * slope * (rho * f / (head.rate * f + 1.0))
            last = p == F.PP - 1
            slopes += tl.where(mine, (g * psi * rho)[:, None], tl.where(last, of_rate[:, None], 0.0))
            offsets += tl.where(mine, g[:, None], tl.where(last, (g * slope * psi)[:, None], 0.0))
    at = Out + (part * H + h) * (2 * F.PP) + tl.arange(0, F.PP)
    tl.store(at, tl.sum(slopes, 0))
    tl.store(at + F.PP, tl.sum(offsets, 0))
    r = tl.arange(0, 128)[:, None]
    if heads > 0:
        for start in range((part * H + tl.program_id(0)) * 32, Tq, tl.num_programs(1) * H * 32):
            i = start + tl.arange(0, 32)
            total = _zeros(128, 32)
            for head_ in range(0, heads, 128):
                ok = (head_ + r < heads) & (i < Tq)[None, :]
                total += tl.load(ByQuery + (head_ + r).to(tl.int64) * Tq + i[None, :], mask=ok, other=0.0)
            tl.store(DRho + i, tl.sum(total, 0), mask=i < Tq)


@triton.jit
def profile_gradient(
    DSlope, DOffset, DRate, DRho, Parts, Meta, Docs, TA, TB, TC, TD, TE, First, t_q, t_k, t_g, t_f, t_size, t_origin, H,
    GROUP, Tq, Tk, q_off, c2, parts, F: tl.constexpr,
):  # fmt: skip
    """Gradients of the slopes and offsets of a profile's pieces, [H, K + 1], and of its rate, [1 or H]. That of the rho
    of FIRST queries joins that of the very first. One program for each head and one for what they share."""
    h = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, F.PP)
    x = tl.arange(0, F.BM)[:, None]
    if h == H:
        of_rate = _zeros(F.BM, 1)
        of_rho = _zeros(F.BM, 1)
        for head in range(H):
            last = Parts + (x * H + head) * (2 * F.PP) + F.PP - 1
            of_rate += tl.load(last, mask=x < parts, other=0.0)
            of_rho += tl.load(last + F.PP, mask=x < parts, other=0.0)
        if t_size == 0:
            tl.store(DRate, tl.sum(tl.sum(of_rate, 1), 0))
        if F.ROWS == REST:
            tl.store(DRho, tl.load(DRho) + tl.sum(tl.sum(of_rho, 1), 0))
        return
    ok = n <= F.KNOTS
    at = Parts + (x * H + h) * (2 * F.PP) + n[None, :]
    # What lies above a knot belongs to the piece behind it, not to the one before.
    behind = (x < parts) & ok[None, :] & (n[None, :] > 0)
    ahead = (x < parts) & (n[None, :] < F.KNOTS)
    of_slopes = tl.load(at, mask=x < parts, other=0.0) + tl.load(at + F.KNOTS, mask=behind, other=0.0)
    of_slopes -= tl.load(at + F.KNOTS + 1, mask=ahead, other=0.0)
    at += F.PP
    of_offsets = tl.load(at, mask=x < parts, other=0.0) + tl.load(at + F.KNOTS, mask=behind, other=0.0)
    of_offsets -= tl.load(at + F.KNOTS + 1, mask=ahead, other=0.0)
    slopes = tl.sum(of_slopes, 0)
    offsets = tl.where(ok, tl.sum(of_offsets, 0), 0.0)
    if t_size > 0:
        tl.store(DRate + h, tl.sum(tl.where(n == F.PP - 1, slopes, 0.0), 0))
    # Those of the offsets sum to zero, as the rows of dS do: the rest is error, in proportion to them.
    size = tl.abs(offsets)
    offsets -= size * (tl.sum(offsets, 0) / tl.maximum(tl.sum(size, 0), 1e-30))
    to = h * (F.KNOTS + 1) + n
    tl.store(DSlope + to, slopes, mask=ok)
    tl.store(DOffset + to, offsets, mask=ok)
