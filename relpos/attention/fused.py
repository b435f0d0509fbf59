"""`impl="fused"`: the Triton kernels behind one differentiable operation.

The host's part: say what cannot run (`obstacle`), hand the term's tensors to the kernels, bring padded batches into a
contiguous form, launch, and turn the kernels' row, column and diagonal sums into the gradients of the term. Autograd
carries those on through the plain PyTorch that built the term.

Padding: the real tokens of every row are moved to its front (a stable sort of the mask; fixed shapes, nothing read on
the host) and the output is moved back. Inside the kernels columns then are positions, which keeps by-distance biases
exact for left padding, right padding and holes alike.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from relpos.attention import decode
from relpos.attention.decode import like, power
from relpos.errors import once
from relpos.terms import Bank, Distance, Layout, Potential, Profile, Slope, Term

LOG2E = math.log2(math.e)
PROGRAMS = 1056  # enough to fill a large GPU several times over
TILES = 16  # of a diagonal that are worth a program
SHARES = 1 << 28  # bytes of the shares in which a bank's gradient is summed, at most
BAND = 1 << 26  # bytes of a profile's bias near the diagonal, at most: each layer keeps it for its backward pass
KNOTS = 1 << 14  # of a profile there must be fewer: a sum over `PARTS` takes 64 KNOTS, a tile of Triton 2^20 at most
WAVES = 16  # as in kernels.py
PARTS = 32  # in which the sums over the pieces of a profile are taken
NONE, SLOPE, POTENTIAL, LOG, PROFILE, DISTANCE, BANK = range(7)  # as in kernels.py
ALL, FIRST, REST = range(3)
# To the host alone: a profile with knots, a profile of a power.
KNOTTED, POWER = 7, 8


@functools.cache
def _kernels() -> Any:
    from relpos.attention import kernels

    return kernels


@torch.compiler.assume_constant_result  # a compiled model asks too, and cannot trace Triton
def interpreted() -> bool:
    """True where Triton runs its kernels on the CPU (TRITON_INTERPRET=1)."""
    return _interpreted()


@functools.cache
def _interpreted() -> bool:
    if not _found():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@torch.compiler.assume_constant_result
def installed() -> bool:
    return _found()


@functools.cache
def _found() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result
def transformed() -> bool:
    """Inside torch.func or forward-mode differentiation, for which kernels have no rule."""
    forward_mode = getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


@torch.compiler.assume_constant_result
def _unfit() -> str | None:
    """Why the kernels cannot run on the current GPU; None if they can."""
    device = torch.cuda.current_device()
    if torch.version.hip:
        narrow = _properties(device).warp_size < 64
        return "Triton does not compile its kernels for AMD's RDNA GPUs, only for CDNA" if narrow else None
    # On older ones than Triton supports some kernels would compute wrong gradients.
    old = bool(torch.version.cuda) and _capability(device) < (8, 0)
    return "it needs a GPU of compute capability 8.0 (Ampere) or later" if old else None


_capability = functools.cache(torch.cuda.get_device_capability)
_properties = functools.cache(torch.cuda.get_device_properties)


def obstacle(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, *, rescores: bool = False
) -> str | None:
    """Why the fused kernels cannot run such a call; None if they can."""
    if not installed():
        return "Triton is not installed"
    if not q.is_cuda and not interpreted():
        return f"it needs a CUDA GPU, and q is on {q.device.type} (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if q.is_cuda and (unfit := _unfit()):
        return unfit
    if transformed():
        return "torch.func and forward-mode derivatives have no rule for its kernels"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] > 128:
        return f"its tiles hold heads of at most 128 features, not {q.shape[-1]}"
    if v.shape[-1] != q.shape[-1]:
        return f"its tiles hold values as wide as queries, and these have {v.shape[-1]} and {q.shape[-1]} features"
    if v.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):  # which converts them
        return f"it multiplies values of the queries' dtype, and these are {v.dtype} and {q.dtype}"
    if q.shape[0] * q.shape[1] > 65535:
        return "a GPU launches at most 65,535 heads of all texts together: split the batch"
    if not rescores and decode.serves(q, k, v, terms, layout):
        return None
    return unsupported(terms, layout, rescores=rescores)


def unsupported(terms: list[Term], layout: Layout, *, rescores: bool = False) -> str | None:
    """Why the kernels cannot run such terms on any machine; None if they can."""
    if rescores:
        return "this encoding rescores whole rows of all heads at once"
    if len(terms) > 1:
        return "it adds one term at a time"
    term = terms[0] if terms else None
    counted = layout.window is not None or (term is not None and not isinstance(term, Potential))
    if layout.positions is not None and counted:
        return "explicit positions may have gaps, and its tiles count distances, those of a window too, in columns"
    if isinstance(term, Profile) and not term.knots.numel() and term.rho.requires_grad:
        return "a profile without knots has no gradient for rho"
    if isinstance(term, Profile) and term.knots.numel() and term.power:
        return "only the profile of a logarithm may have knots"
    if isinstance(term, Profile) and term.knots.numel() >= KNOTS:
        return f"it counts fewer than {KNOTS:,} knots, and this profile has {term.knots.numel():,}"
    if isinstance(term, Bank) and term.bank.shape[0] > 128:
        return f"its tiles hold banks of at most 128 profiles, not {term.bank.shape[0]}"
    if isinstance(layout.q_offset, Tensor) and layout.cu_seqlens is not None:
        return "packed documents take one q_offset"
    return None


def _processors(device: torch.device) -> int:
    """On which programs run side by side."""
    return _properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: 227 KB on an H200, 99 on many smaller GPUs."""
    if device.type != "cuda":
        return 1 << 18
    found = _properties(device)
    return getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block


# Block sizes by kernel, for heads of up to 64 and up to 128 features: BM, BN, warps, stages, registers a thread (0: as
# the compiler likes). Tuned on an H200 with benchmarks/tune.py. Fewer registers let more programs share a processor.
Blocks = tuple[int, int, int, int, int]
_BLOCKS: dict[str, tuple[Blocks, Blocks]] = {
    "forward": ((64, 64, 4, 3, 128), (128, 64, 8, 3, 0)),
    "backward_q": ((64, 64, 4, 3, 168), (64, 64, 4, 2, 0)),
    "backward_k": ((32, 64, 4, 3, 168), (32, 64, 4, 2, 0)),
    "backward_distance": ((64, 64, 4, 3, 0), (64, 64, 4, 2, 0)),
    "backward_band": ((64, 64, 4, 3, 0), (64, 64, 4, 2, 0)),
    "profile_table": ((64, 64, 4, 1, 0), (64, 64, 4, 1, 0)),
    "profile_band": ((64, 64, 8, 1, 0), (64, 64, 8, 1, 0)),
    "profile_parts": ((16, 16, 4, 1, 0), (16, 16, 4, 1, 0)),
    "profile_gradient": ((PARTS, PARTS, 4, 1, 0), (PARTS, PARTS, 4, 1, 0)),
    "bank_gradient": ((64, 128, 8, 1, 0), (64, 128, 8, 1, 0)),
}


# Kinds that need more registers or shared memory than most. None: as the others.
_WIDE: dict[tuple[str, int], tuple[Blocks | None, Blocks | None]] = {
    **{("forward", kind): ((64, 64, 4, 3, 168), None) for kind in (POTENTIAL, LOG, PROFILE)},
    **{("backward_q", kind): ((64, 64, 4, 2, 168), None) for kind in (POTENTIAL, LOG)},
    **{("backward_k", kind): ((64, 64, 4, 3, 0), None) for kind in (POTENTIAL, LOG, PROFILE, DISTANCE)},
    ("forward", KNOTTED): ((64, 64, 4, 3, 168), (64, 64, 4, 2, 0)),
    ("backward_q", KNOTTED): ((64, 64, 4, 3, 168), (64, 32, 4, 2, 0)),
    ("backward_k", KNOTTED): ((32, 64, 4, 2, 168), (32, 64, 4, 2, 0)),
    ("forward", BANK): ((64, 64, 4, 2, 168), (64, 64, 4, 2, 0)),
    ("backward_q", BANK): ((64, 64, 4, 3, 0), (64, 64, 8, 2, 0)),
    ("backward_k", BANK): ((64, 64, 4, 3, 0), (32, 64, 4, 2, 0)),
}


# And from so many tokens on, where there are blocks to spare.
_LONG: dict[tuple[str, int], tuple[int, Blocks]] = {
    **{("backward_k", kind): (4096, (64, 64, 4, 3, 0)) for kind in (NONE, SLOPE, KNOTTED)},
    # Most shorter texts have one rho, and then few registers do.
    ("forward", KNOTTED): (513, (64, 64, 4, 3, 168)),
    ("backward_q", KNOTTED): (513, (64, 64, 4, 3, 0)),
}


# Registers a thread, where tiles come by TMA and other than without: addresses take none.
_TIGHT = {("backward_q", KNOTTED): 168}
DESCRIBED = (64,)  # sizes of heads whose tiles come by TMA: for others it was not measured


def _describable(call: _Call, *tensors: Tensor) -> bool:
    """Whether the backward pass may have such tensors [B, H, T, D] walked by TMA, which Hopper and later have."""
    if call.kind == BANK or call.flags["EXACT"] or call.flags["META"] or call.D not in DESCRIBED:
        return False  # what is padded may hold anything, and must be left out by a mask
    if call.Tk == 1:
        return False  # for a single key, which Triton takes for a constant, ptxas 12.8 breaks down
    if call.q.is_cuda and not (torch.version.cuda and _capability(call.q.device) >= (9, 0)):
        return False
    fits = 16 // call.q.element_size()
    strides = (n == 1 or (s > 0 and s % fits == 0) for x in tensors for n, s in zip(x.shape[:3], x.stride()[:3]))
    return all(x.data_ptr() % 16 == 0 and x.numel() for x in tensors) and all(strides)


def _described(x: Tensor, rows: int) -> Any:
    """For tiles of so many rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [x.shape[3] if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3])]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, x.shape[3]])


def _blocks(kernel: str, q: Tensor, kind: int) -> Blocks:
    if kernel.startswith(("profile", "bank")):  # they see no tile of scores
        return _BLOCKS[kernel][0]
    if q.dtype == torch.float32:  # tiles twice as large, and not fed to the tensor cores
        return (64, 32, 4, 1, 0) if kernel == "forward" and q.shape[-1] <= 64 and kind != BANK else (32, 32, 4, 1, 0)
    large = bool(q.shape[-1] > 64)  # a compiled model may ask with sizes that are symbols
    length, blocks = _LONG.get((kernel, kind), (0, None))
    if blocks and not large and q.shape[2] >= length:
        return blocks
    return _WIDE.get((kernel, kind), (None, None))[large] or _BLOCKS[kernel][large]


def _tuned_as(kind: int, c: Tensor | None) -> tuple[int, int]:
    """For which kind its blocks are, and for which rank of a bank."""
    if kind in (PROFILE, POWER):
        return (KNOTTED if c is not None and c.numel() else PROFILE), 0
    return kind, _rank(kind, c)


def _blocks_of(kernel: str, q: Tensor, kind: int, rank: int) -> Blocks:
    blocks, D = _blocks(kernel, q, kind), q.shape[-1]  # the larger the rank, the more shared memory a tile takes
    if rank and (D < 32 or (rank > 64 and D > 64)):
        # ptxas 12.8 has no registers left for where operands lie, and mixes them up (tests/sass.py): with tiles too
        # small for wgmma nothing of the kind is kept.
        return 32, 32, 4, 1, 0
    if rank > 64:
        blocks = (*blocks[:3], min(blocks[3], 2), blocks[4])
    if rank > 16 and kernel == "backward_k":
        # With 64 queries ptxas 12.8 reads an address from a register that it keeps predicates in.
        blocks = (min(blocks[0], 32), *blocks[1:])
    if rank > 16 and _shared_memory(q.device) < 1 << 17:
        wide = q.dtype == torch.float32 and rank > 64 and D > 64
        blocks = (16, 16, 4, 1, 0) if wide else (*blocks[:3], 1, blocks[4])
    return blocks


class _Call:
    """What the kernels of one call share."""

    def __init__(self, rows, q, k, a, b, c, d, e, first, meta, docs, kind, origin, causal, window, q_offset, scale,
                 sure):  # fmt: skip
        self.q = q
        self.B, self.H, self.Tq, self.D = q.shape
        self.Tk = k.shape[2]
        self.tuned = _tuned_as(kind, c)
        more: dict[str, int] = {"ROWS": rows, "RAW": kind == NONE, "POWER": kind == POWER}
        kind = PROFILE if kind == POWER else kind
        self.kind, self.origin = kind, origin
        size, strides = 0, [0, 0, 0, 0]
        if kind in (POTENTIAL, LOG):
            strides[:3] = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (a, b, c)]
            more |= {"GATED": c is not None, "RAW": kind == POTENTIAL}
        elif kind == PROFILE:
            strides[0] = 0 if b.shape[0] == 1 else b.stride(0)
            size = int(a.numel() > 1)
            knots = c.numel()
            more |= {"KNOTS": knots, "KP": max(2, power(knots)), "PP": power(2 * knots + 1)}
            more |= {"ONE": b.numel() == 1 and not knots, "RAW": knots > 0}
            more |= {"SURE": knots > 0 and sure}
        elif kind == DISTANCE:
            size = a.shape[1]
            more["HAS_FAR"] = rows == ALL
        elif kind == BANK:
            strides[:3] = a.stride()[:3]
            size = c.shape[1]
            more |= {"RP": c.shape[0], "HAS_FAR": self.Tk > b.shape[1], "RAW": True}
        if rows != ALL:
            strides[3] = int(first.numel() > 1)
        self.reach = b.shape[1] if kind == BANK else size - origin - (kind == DISTANCE)
        # A missing tensor becomes a pointer that is never read.
        self.term = [*(q if x is None else x for x in (meta, docs, a, b, c, d, e, first)), *strides, size, origin]
        self.sizes = [self.H, self.H // k.shape[1], self.Tq, self.Tk, q_offset, scale * LOG2E]
        exact = q.dtype == torch.float32
        self.flags = dict(
            KIND=kind, CAUSAL=causal, CANCEL=causal and not exact, EXACT=exact, D=self.D,
            DP=max(16, power(self.D)), META=meta is not None, DOCS=docs is not None, WINDOW=window,
            EVEN=meta is None and self.Tq % 128 == 0 and self.Tk % 128 == 0, **more,
        )  # fmt: skip
        # What backward_k reads of a query beside level and delta: gate, S_i or rho.
        more_of_query = kind == LOG or (kind == PROFILE and not more["ONE"] and not more["KNOTS"])
        more_of_query |= kind == POTENTIAL and (more["GATED"] or not self.flags["CANCEL"])
        few = self.blocks("backward_k")[0] < 64  # queries: too few for the threads of a program to share narrow rows
        self.flags["WIDE"] = 4 if more_of_query or few else 2

    def blocks(self, kernel: str) -> Blocks:
        return _blocks_of(kernel, self.q, *self.tuned)

    def flagged(self, blocks: Blocks, **flags: int) -> Any:
        BM, BN, *_ = blocks
        return _kernels().Flags(**self.flags, **flags, BM=BM, BN=BN, SPAN=power(BM + BN))

    def launch(self, kernel: str, grid: tuple[int, int], outs: list, strided: list[Tensor], scalars: list, **flags):
        """Tensors the kernel reads and writes, the term, strides of those with four dimensions, sizes, what is its own,
        flags."""
        blocks = self.blocks(kernel)
        *_, warps, stages, registers = blocks
        if flags.get("TMA"):
            registers = _TIGHT.get((kernel, self.tuned[0]), registers)
        options: dict[str, int] = {"num_warps": warps, "num_stages": stages}
        if registers and torch.version.cuda:
            options["maxnreg"] = registers
        F = self.flagged(blocks, **flags)
        strides = [s for x in strided for s in x.stride()[:3]]
        with torch.cuda.device_of(self.q):  # Triton launches on the current device
            getattr(_kernels(), kernel)[grid](*outs, *self.term, *strides, *self.sizes, *scalars, F, **options)


# Bits of the operands a .. e in `wants`.
A, B_, C, D, E = (1 << n for n in range(5))


class _Knots(NamedTuple):
    """What a causal profile with knots needs beside."""

    table: Tensor  # what it is to the first queries, which have one rho: a table by distance
    first: _Call
    band: Tensor | None  # its bias near the diagonal, for the others
    series: Tensor | None  # and of what they look up farther away
    made: Tensor  # all of these in one tensor


def _sizes_made(q, k, a, b, c, meta, docs, kind, causal, window, q_offset) -> tuple[list[int], int]:
    """Of what is made of a profile with knots before the kernels run, in float32 numbers: how many of the first queries
    have one rho, their table, the band, the series. None of it where there is nothing to make. And the block of the
    band, 0 without one."""
    if kind != PROFILE or not c.numel() or not causal or docs is not None or window:
        return [], 0
    H, Tq, Tk = q.shape[1], q.shape[2], k.shape[2]
    n = _blocks("profile_table", q, KNOTTED)[0]
    kernels = "profile_table", "profile_band", "backward_band", "forward", "backward_q"
    aligned = {_blocks(kernel, q, KNOTTED)[:2] for kernel in kernels} == {(n, n)}
    aligned = aligned and _blocks("backward_k", q, KNOTTED)[1] == n
    band = 2 * H * -(-Tq // n) * n * n
    near = aligned and q.dtype != torch.float32 and meta is None and not q_offset and b.shape[0] == 1
    if not near or 4 * band > BAND:
        return [b.shape[0], H * Tk, 0, 0], 0
    return [b.shape[0], H * Tk, band, a.numel() * (-(-Tk // n) + 1) * n * WAVES // 2], n


def _room(sizes: list[int]) -> list[int]:
    """Each a multiple of 64 bytes, as is best for loads."""
    return [size + -size % 16 for size in sizes]


def _calls(q, k, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure, made=None):
    """What to launch, and with what: a `_Call`, and `_Knots` or None. `made`: what the forward pass made."""
    sizes, n = _sizes_made(q, k, a, b, c, meta, docs, kind, causal, window, q_offset)
    how = (meta, docs, kind, origin, causal, window, q_offset, scale, sure)
    if not sizes:
        return _Call(ALL, q, k, a, b, c, d, e, None, *how), None
    new = made is None
    if new:
        made = b.new_empty(sum(_room(sizes)))
    parts = [part[:size] for part, size in zip(made.split(_room(sizes)), sizes, strict=True)]
    count, table = parts[0].view(torch.int32), parts[1].view(d.shape[0], -1)
    call = _Call(REST, q, k, a, b, c, d, e, count, *how)
    band = series = None
    if n:
        band, series = parts[2].view(call.H, -1, 2, n, n), parts[3].view(q.dtype).view(a.numel(), -1, WAVES)
        call.flags["BAND"] = True
    if new:
        grid = max(-(-call.Tk // call.blocks("profile_table")[0]) + 1, b.shape[0]), call.H
        call.launch("profile_table", grid, [table, q if series is None else series], [], [b.shape[0]])
        if band is not None:
            call.launch("profile_band", (band.shape[1], 2 * call.H), [band], [], [])
    how = (meta, docs, DISTANCE, 0, *how[4:])
    first = _Call(FIRST, q, k, table, None, None, None, None, count, *how)
    first.flags["WIDE"] = call.flags["WIDE"]  # they lie among the others
    return call, _Knots(table, first, band, series, made)


def _beside(call: _Call, knots: _Knots | None, kernel: str, **flags: int) -> tuple[list[Tensor], Any]:
    """In a launch of the kernel the table, the band and the series, and the flags for the first queries."""
    if knots is None:
        return [call.q] * 3, None
    beside = [call.q if x is None else x for x in (knots.table, knots.band, knots.series)]
    return beside, knots.first.flagged(call.blocks(kernel), **flags)


def _forward(q, k, v, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure):
    out, lse, low = _results(q, sure)
    if not q.numel():
        return out, lse, low, lse.new_empty(0)
    call, beside = _calls(q, k, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure)
    tables, flags = _beside(call, beside, "forward")
    grid = (-(-call.Tq // call.blocks("forward")[0]), call.B * call.H)
    banded = beside is not None and beside.band is not None
    call.launch("forward", grid, [q, k, v, out, lse, low, *tables], [q, k, v, out], [call.reach, flags], SERIES=banded)
    return out, lse, low, lse.new_empty(0) if beside is None else beside.made


def _results(q, sure) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and if asked for what rounding takes from the output."""
    low = like(q) if sure and q.dtype != torch.float32 else q.new_empty(0)
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32), low


def _backward(do, q, k, v, out, lse, low, made, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset,
              scale, sure, wants, into=None, summed=False):  # fmt: skip
    """Gradients of q, k, v and a .. e. With `into` they are written there, also those of a bank's rows; with `summed`
    `_parts` come last."""
    dq, dk, dv, d_rows = into or (like(q), like(k), like(v), None)
    if not q.numel():
        given = [torch.zeros_like(x) if wants >> n & 1 else lse.new_empty(0) for n, x in enumerate((a, b, c, d, e))]
        return (dq, dk.zero_(), dv.zero_(), *given, *([_parts(q, lse, kind, c).zero_()] if summed else []))
    call, beside = _calls(q, k, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure, made)
    parts = _parts(q, lse, kind, c) if summed else lse
    kind = call.kind
    if do.stride(-1) != 1:
        do = do.contiguous()
    assert not low.numel() or low.stride() == out.stride()
    delta = torch.empty_like(lse)
    grad = bool(wants) or d_rows is not None

    def maybe(needed: bool, *shape: int) -> Tensor:
        if not (grad and needed):
            return delta  # a pointer that is never written through
        return lse.new_empty(shape)

    gated = c is not None and kind in (POTENTIAL, LOG)
    knots = kind == PROFILE and c.numel() > 0
    banded = beside is not None and beside.band is not None
    entries = call.B + 2 * _shares(call) * banded  # of sums for knots
    by_query = maybe(kind == LOG or knots or (kind == POTENTIAL and not causal), entries, *lse.shape[1:])
    by_gate = maybe(gated, *lse.shape)
    rows = lse.new_empty(*lse.shape, call.flags["WIDE"])
    at_keys = kind not in (DISTANCE, BANK) and not knots
    by_key = maybe(at_keys, call.B, call.H, call.Tk)
    by_rate = maybe(kind == PROFILE and not knots, call.B, call.H, call.Tk)
    QM, of_keys = call.blocks("backward_q")[0], call.blocks("backward_k")
    assert QM % of_keys[0] == 0
    blocks = -(-call.Tq // QM)
    bends = lse.new_empty(call.B, a.numel(), blocks, 2, call.flags["KP"]) if knots else delta
    pieces = maybe(knots, entries, call.H, blocks, 2, call.flags["PP"]) if knots else delta
    grid, by_bank = (blocks, call.B * call.H), delta
    if kind == BANK and grad:
        by_query = like(a) if d_rows is None else d_rows
        shape = min(call.reach, call.Tk), call.flags["RP"]  # of the bank's gradient, of which each program sums a share
        shares = min(2 * _processors(q.device), max(1, SHARES // (4 * shape[0] * shape[1])))
        grid = (min(shares, -(-blocks // 2) * grid[1]), 1)  # a program takes two blocks at a time
        by_bank = lse.new_empty(grid[0], *shape)
    tma = _describable(call, q, k, v, do)
    keys = [_described(x, call.blocks("backward_q")[1]) if tma else x for x in (k, v)]
    asked = {"GRAD": grad, "BIAS": summed, "TMA": tma}
    (table, band, series), flags = _beside(call, beside, "backward_q", **asked)
    call.launch(
        "backward_q", grid,
        [q, *keys, out, low, do, lse, rows, delta, dq, by_query, by_gate, by_bank, pieces, parts, bends, table, band],
        [q, k, v, out, do, dq], [scale, call.reach, by_query.stride(-2), call.B, flags], **asked,
    )  # fmt: skip
    grads: dict[int, Tensor] = {}
    if kind == BANK and wants & B_:  # while the shares are in the cache
        grads[B_] = torch.empty_like(b)
        call.launch("bank_gradient", (-(-b.shape[1] * call.flags["RP"] // call.blocks("bank_gradient")[1]), 1),
                    [grads[B_], by_bank], [], [*by_bank.shape[:2], *b.shape])  # fmt: skip
    flags = _beside(call, beside, "backward_k", QM=QM, TMA=tma)[1]
    of_q, of_do = (_described(x, of_keys[0]) if tma else x for x in (q, do))
    call.launch(
        "backward_k", (-(-call.Tk // of_keys[1]), call.B * k.shape[1]),
        [of_q, k, v, of_do, rows, dk, dv, by_key, by_rate, bends, table, band, series], [q, k, v, do, dk, dv],
        [scale, call.reach, flags], GRAD=grad and at_keys, QM=QM, SERIES=banded, TMA=tma,
    )  # fmt: skip

    inputs = [q, k, v, do, lse, delta]
    if kind == SLOPE and wants:
        grads[A] = -by_key.sum((0, 2))
    elif kind in (POTENTIAL, LOG):
        factor = 1 if kind == POTENTIAL else 2
        if wants & A:  # the causal linear form has none: it is constant along a row
            if c is not None:  # linear gates came divided by the scale
                by_query = by_query * c * (scale if kind == POTENTIAL else 1.0)
            grads[A] = torch.zeros_like(lse) if kind == POTENTIAL and causal else -factor * by_query
        grads[B_] = by_key if factor == 1 else factor * by_key
        # by_gate of the logarithm is in units of log 2.
        grads[C] = by_gate if kind == POTENTIAL else by_gate / LOG2E
        for bit, of in ((A, a), (B_, b), (C, c)):
            if wants & bit and of.shape[0] == 1 and call.B > 1:
                grads[bit] = grads[bit].sum(0, keepdim=True)
    elif kind == PROFILE and wants:
        if knots:
            diagonals, n, count, shares = delta, 1, 0, 0
            if beside is not None:
                diagonals, _ = _diagonal_sums(beside.first, inputs, call.Tk - 1)
                shares, _, count, n = diagonals.shape
            if banded:
                grid = 2 * blocks, (entries - call.B) // 2 * call.H
                call.launch("backward_band", grid, [*inputs, by_query, pieces, beside.band], inputs[:4], [call.B])
            one = b.shape[0] == 1
            grads[A], grads[D], grads[E] = torch.empty_like(a), torch.empty_like(d), torch.empty_like(e)
            grads[B_] = torch.empty_like(b) if one else by_query.sum(1)
            sums = lse.new_empty(PARTS, call.H, 2, call.flags["PP"])
            call.launch("profile_parts", (call.H, PARTS), [sums, grads[B_], pieces, by_query, diagonals], [],
                        [call.B, entries * blocks, blocks, shares, count, entries * call.H * one, n // 2])  # fmt: skip
            made = [grads[D], grads[E], grads[A], grads[B_]]
            call.launch("profile_gradient", (call.H + 1, 1), [*made, sums], [], [PARTS])
        else:
            grads[D], grads[E] = by_key.sum((0, 2))[:, None], torch.zeros_like(e)
            of_rate = by_rate.sum((0, 2)) * d[:, 0] / (1 if call.flags["POWER"] else a.clamp(min=1e-12))
            if b.numel() == 1:  # which the kernels took to be part of the slope
                grads[D], of_rate = grads[D] * b, of_rate * b[0]
            grads[A] = of_rate if a.numel() > 1 else of_rate.sum(0, keepdim=True)
        grads[C] = torch.zeros_like(c)  # a continuous function: where it bends is a matter of its pieces
    elif kind == DISTANCE and wants:
        grads[A] = _distance_gradient(call, inputs, a)
    elif kind == BANK:
        grads[A] = by_query
    # An operator's results may not be one tensor twice, nor one of its inputs.
    given = [grads[bit] if wants & bit else lse.new_empty(0) for bit in (A, B_, C, D, E)]
    return (dq, dk, dv, *given, *([parts] if summed else []))


def _shares(call: _Call) -> int:
    """In how many shares of the texts `backward_band` sums dS."""
    blocks = -(-call.Tq // call.blocks("backward_band")[0])
    return max(1, min(call.B, PROGRAMS // (2 * blocks * call.H)))


def _parts(q: Tensor, lse: Tensor, kind: int, c: Tensor | None) -> Tensor:
    """For sums of dQ and of dO over the queries of a block, [2, texts * blocks, H, D]."""
    n = _blocks_of("backward_q", q, *_tuned_as(kind, c))[0]
    return lse.new_empty(2, q.shape[0] * -(-q.shape[2] // n), q.shape[1], q.shape[3])


def _diagonals(call: _Call, last: int) -> tuple[int, int, int, int]:
    """Size of a block; block diagonals before the main one and in all, for distances up to `last`; shares of each."""
    n = call.blocks("backward_distance")[0]
    before = 0 if call.flags["CAUSAL"] else -(-call.Tk // n)
    count = -(-last // n) + 1 + before
    tiles = call.B * -(-call.Tq // n)  # of the longest diagonal
    # Diagonals of a table differ most in length, and many are short: more programs, so that none is the last. Those of
    # first queries are fewer, how many only the device knows: it divides the programs among them.
    programs = PROGRAMS * (3 if call.flags["ROWS"] == ALL else 1)
    most = max(1 if call.flags["ROWS"] == ALL else 4, -(-programs // (count * call.H)))
    return n, before, count, max(1, min(-(-tiles // TILES), most))


def _by_distance(x: Tensor, n: int) -> Tensor:
    """What `_slide` left of each block diagonal, [diagonals, 2 n, ...], as one line of distances that begins n before
    the first diagonal: neighbours overlap by n."""
    line = x.new_zeros(x.shape[0] + 1, n, *x.shape[2:])
    line[:-1] = x[:, :n]
    line[1:].add_(x[:, n:])
    return line.flatten(0, 1)


def _diagonal_sums(call: _Call, inputs: list[Tensor], last: int) -> tuple[Tensor, int]:
    """dS summed by block diagonal, for distances up to `last`, [shares, H, diagonals, 2 n]; how many of the diagonals
    lie before the main one. Of FIRST queries it is laid out otherwise, and in part not written, as `profile_parts`
    knows."""
    n, before, count, shares = _diagonals(call, last)
    out = inputs[4].new_empty(shares, call.H, count, 2 * n)
    call.launch("backward_distance", (count, call.H * shares), [*inputs, out], inputs[:4], [call.B, -before])
    return out, before


def _distance_gradient(call: _Call, inputs: list[Tensor], values: Tensor) -> Tensor:
    """Of a table. Where its last entry stands for many distances, from `reach` on, most tiles hold no other: as the
    rows of dS sum to zero, its gradient is what is missing in the sum of all."""
    origin, reach = call.origin, call.reach
    far = reach < call.Tk - 1
    out, before = _diagonal_sums(call, inputs, reach - 1 if far else call.Tk - 1)
    n = out.shape[-1] // 2
    sums = _by_distance(out.sum(0).permute(1, 2, 0), n).T  # [H, distances]
    zero = (before + 1) * n  # column of distance 0
    low, high = zero - origin, zero + reach + (not far)  # columns that have entries of their own
    grad = values.new_zeros(call.H, values.shape[1])
    start, stop = max(low, 0), min(high, sums.shape[1])
    if stop > start:
        grad[:, start - low : stop - low] = sums[:, start:stop]
    if low > 0 and not call.flags["CAUSAL"]:  # distances below all that the table has
        grad[:, 0].add_(sums[:, :low].sum(1))
    if far:
        grad[:, -1] = -grad[:, :-1].sum(1)
    return grad


_T = Tensor
_O = Optional[Tensor]  # noqa: UP045 - the operator's schema is read from it


class Packed(NamedTuple):
    """One tensor [B, T, width] that q, k and v are views of, one after the other, each with its heads side by side."""

    tensor: Tensor
    bias: Tensor | None = None  # of q, k and v; it is in the tensor, which does not carry its gradient
    rows: bool = False  # behind v the rows of a bank, [heads * rank], with a rank that `packs_rows`


def packs_rows(rank: int) -> bool:
    """Whether the kernels read rows of a bank with so many profiles as they are, without zeros around them."""
    return rank == max(16, power(rank))


def _views(q, k, v, a, rank: int, heads: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v [B,H,T,D], and the operand a. Without k, q holds all three, [B, T, width]: heads of size D of q, then
    of k, then of v; and then, where a bank of that rank has none, its rows [B,H,T,rank]."""
    if k is not None:
        return q, k, v, a
    if rank and a is None:
        a = q[..., -heads * rank :].unflatten(-1, (heads, rank)).transpose(1, 2)
        q = q[..., : -heads * rank]
    rest = (q.shape[-1] // size - heads) // 2
    parts = q.unflatten(-1, (-1, size)).split([heads, rest, rest], 2)
    return parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), a


def _rank(kind: int, c: Tensor | None) -> int:
    return c.shape[0] if kind == BANK and c is not None else 0


@torch.library.custom_op("relpos::attend", mutates_args=())
def _attend(q: _T, k: _O, v: _O, a: _O, b: _O, c: _O, d: _O, e: _O, meta: _O, docs: _O, kind: int,
            origin: int, causal: bool, window: int, q_offset: int, scale: float, sure: bool, heads: int,
            size: int, bias: _O) -> tuple[_T, _T, _T, _T]:  # fmt: skip
    """`bias` is there for its gradient alone: see `Packed`."""
    q, k, v, a = _views(q, k, v, a, _rank(kind, c), heads, size)
    return _forward(q, k, v, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure)


@_attend.register_fake
def _(q, k, v, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale, sure, heads, size, bias):
    q, k, *_ = _views(q, k, v, a, _rank(kind, c), heads, size)
    sizes, _ = _sizes_made(q, k, a, b, c, meta, docs, kind, causal, window, q_offset) if q.numel() else ([], 0)
    out, lse, low = _results(q, sure)
    return out, lse, low, lse.new_empty(sum(_room(sizes)))


@torch.library.custom_op("relpos::attend_backward", mutates_args=())
def _attend_backward(do: _T, q: _T, k: _O, v: _O, out: _T, lse: _T, low: _T, made: _T, a: _O, b: _O, c: _O, d: _O,
                     e: _O, meta: _O, docs: _O, kind: int, origin: int, causal: bool, window: int, q_offset: int,
                     scale: float, sure: bool, heads: int, size: int, wants: int,
                     summed: bool) -> tuple[_T, _T, _T, _T, _T, _T, _T, _T, _T]:  # fmt: skip
    """Gradients of q (or of what holds all), k, v and a .. e; empty where they are not wanted. And `_parts`, where
    these are."""
    rank, whole, into = _rank(kind, c), None, None
    if k is None:
        whole = torch.empty_like(q)
        dq, dk, dv, d_rows = _views(whole, None, None, a, rank, heads, size)
        into = dq, dk, dv, d_rows if a is None else None
    q, k, v, a = _views(q, k, v, a, rank, heads, size)
    grads = _backward(do, q, k, v, out, lse, low, made, a, b, c, d, e, meta, docs, kind, origin, causal, window,
                      q_offset, scale, sure, wants, into, summed)  # fmt: skip
    grads = grads if summed else (*grads, lse.new_empty(0))
    return grads if whole is None else (whole, lse.new_empty(0), lse.new_empty(0), *grads[3:])


@_attend_backward.register_fake
def _(do, q, k, v, out, lse, low, made, a, b, c, d, e, meta, docs, kind, origin, causal, window, q_offset, scale,
      sure, heads, size, wants, summed):  # fmt: skip
    terms = [lse.new_empty(x.shape if wants >> bit & 1 else 0) for bit, x in enumerate((a, b, c, d, e))]
    if kind == BANK and wants & A:
        terms[0] = like(a)
    parts = _parts(*_views(q, k, v, a, _rank(kind, c), heads, size)[:1], lse, kind, c) if summed else lse.new_empty(0)
    if k is None:
        return (torch.empty_like(q), lse.new_empty(0), lse.new_empty(0), *terms, parts)
    return (like(q), like(k), like(v), *terms, parts)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:10])
    ctx.scalars = inputs[10:]


def _save_operator(ctx, inputs, output) -> None:
    *inputs, bias = inputs
    _save(ctx, inputs, output)
    ctx.bias = None if bias is None else (bias.shape[0], bias.dtype)


def _gradients(ctx, backward):
    """Of the inputs in order: those behind the operands have none. And what else `backward` finds."""
    needs = ctx.needs_input_grad
    found = backward(sum(1 << bit for bit in range(5) if needs[3 + bit]))
    grads = [x if needs[n] else None for n, x in enumerate(found[:8])]
    return (*grads, *[None] * (len(needs) - 8)), found[8:]


def _of_operator(ctx, do, *_):
    bias = ctx.needs_input_grad[-1]
    grads, [parts] = _gradients(ctx, lambda wants: _attend_backward(do, *ctx.saved_tensors, *ctx.scalars, wants, bias))
    return (*grads[:-1], _of_bias(parts.sum(1), *ctx.bias) if bias else None)  # here, where it is compiled too


def _of_bias(sums: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The gradient of `Packed.bias`, from the sums of dQ and dO. That of k is zero, as the rows of dS sum to zero; that
    of v is what dO is in sum, as weights sum to one."""
    H, D = sums.shape[1:]
    of_v = sums[1].unflatten(0, ((size // D - H) // 2, -1)).sum(1).flatten()
    return torch.cat([sums[0].flatten(), torch.zeros_like(of_v), of_v]).to(dtype)


_attend.register_autograd(_of_operator, setup_context=_save_operator)


class _Eager(torch.autograd.Function):
    """The same operation without the dispatcher, which costs more than the kernels on short texts."""

    @staticmethod
    def forward(ctx, *inputs):  # without a setup_context, for which torch inspects the signature on every call
        output = _forward(*inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, do, *_):
        once("fused attention", "impl='reference' has one")
        if do is None:
            return (None,) * 17
        return _gradients(ctx, lambda wants: _backward(*[do, *ctx.saved_tensors, *ctx.scalars, wants]))[0]


def _flat(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _each_flat(x: Tensor) -> Tensor:
    """[B, H, T] whose entries are contiguous, each by itself: a cache may hold several numbers for a key and head, and
    nobody should copy a part of it for every token."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


BANK_BEFORE = 128  # as in kernels.py
BANK_BEHIND = 256  # at least as many as a tile has distances


def _for_products(term: Bank, scale: float, dtype: torch.dtype, B: int) -> tuple[Tensor, Tensor]:
    """The rows, each text's own, and the bank as the kernels multiply them: of their dtype, 16 profiles or the next
    power of two, and zeros around the bank. Its gradient does not come this way."""
    rank, size = term.bank.shape
    more = max(16, power(rank)) - rank
    behind = BANK_BEHIND + -size % 16
    rows = (pad(term.query, (0, more)) if more else term.query).to(dtype)
    if rows.shape[0] != B or rows.stride(-1) != 1:
        rows = rows.expand(B, -1, -1, -1).contiguous()
    bank = term.bank.detach() if dtype == torch.float16 else term.bank.detach() / scale
    return rows, pad(bank, (BANK_BEFORE, behind, 0, more)).to(dtype)


def _operands(
    terms: list[Term], scale: float, dtype: torch.dtype | None, B: int
) -> tuple[list[Tensor | None], int, int]:
    """The kernels' operands a .. e; the kind; the origin. `dtype` is that of products; None: nothing is rounded."""
    term = terms[0] if terms else None
    given: list[Tensor] = []
    kind = origin = 0
    if isinstance(term, Slope):
        kind, given = SLOPE, [term.slopes]
    elif isinstance(term, Potential):
        kind = LOG if term.log else POTENTIAL
        given = [_each_flat(term.query), _each_flat(term.key)]
        if term.gate is not None:
            given.append(_each_flat(term.gate if term.log else term.gate / scale))
        return [*given, *[None] * (5 - len(given))], kind, 0
    elif isinstance(term, Profile):
        rho = term.rho
        if not term.knots.numel() and rho.shape[0] == 1 and rho.stride(1) == 0:
            rho = rho[:, :1]  # one for all queries: the kernels need not fetch it for each
        kind, given = POWER if term.power else PROFILE, [term.rate, rho, term.knots, term.slope, term.offset]
    elif isinstance(term, Distance):
        kind, given, origin = DISTANCE, [term.values], term.origin
    elif isinstance(term, Bank):
        if dtype is not None:
            rows, bank = _for_products(term, scale, dtype, B)
            return [rows, _flat(term.bank), bank, None, None], BANK, 0
        kind, given = BANK, [term.query, term.bank]
    return [*map(_flat, given), *[None] * (5 - len(given))], kind, origin


def _sorted_by(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The order that brings the True entries of mask [B, T] to the front, and its inverse."""
    order = torch.sort((~mask).to(torch.uint8), dim=-1, stable=True).indices
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(order)
    return order, torch.empty_like(order).scatter_(-1, order, places)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, T, ...] with its tokens in the order [B, T]."""
    index = order[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]) if x.dim() == 4 else index)


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float, packed: Packed | None = None
) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated. `packed`: they in one tensor, of which a compiled model
    gets the gradient in one piece instead of joining three."""
    if torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type))
    k, v = k.to(q.dtype), v.to(q.dtype)
    B = q.shape[0]
    if decode.serves(q, k, v, terms, layout):
        known = decode.computes(terms, layout)
        operands = _operands(terms, scale, None, B) if known else None
        return decode.attend(q, k, v, terms, layout, scale, operands)
    meta = docs = back = real = None
    offset: int | Tensor = layout.Tk - layout.Tq if layout.q_offset is None else layout.q_offset
    if layout.key_padding_mask is not None and layout.Tq:
        mask = layout.key_padding_mask.bool()
        real = layout.at_queries(mask)
        order, _ = _sorted_by(mask)
        q_order, back = _sorted_by(real)
        counts = mask.cumsum(-1)
        columns = layout.columns()[:, :1].expand(B, 1)
        before = (counts.gather(-1, columns) - mask.gather(-1, columns).long())[:, 0]
        meta = torch.stack((before, counts[:, -1]), -1).int()
        q, k, v = _take(q, q_order), _take(k, order), _take(v, order)
        terms = [_reorder(term, q_order, order, B) for term in terms]
    elif isinstance(offset, Tensor):
        offset = offset.int()  # before it stands beside Tk, which an int8 cannot hold
        meta = torch.stack((offset, torch.full_like(offset, layout.Tk)), -1)
    if layout.cu_seqlens is not None:
        borders = layout.cu_seqlens.int()
        number = torch.bucketize(torch.arange(layout.Tk, device=q.device), layout.cu_seqlens, right=True)
        docs = torch.stack((borders[number - 1], borders[number])).contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    given, kind, origin = _operands(terms, scale, q.dtype, B)
    start = 0 if isinstance(offset, Tensor) else int(offset)
    # Sums over the pieces of a profile need rows of dS that sum to zero.
    sure = isinstance(terms[0], Profile) and terms[0].knots.numel() > 0 if terms else False
    sure = sure and torch.is_grad_enabled() and any(x.requires_grad for x in given if x is not None)
    how = (meta, docs, kind, origin, layout.causal, layout.window or 0, start, float(scale), sure)
    if not torch.compiler.is_compiling():
        out, *_ = _Eager.apply(q, k, v, *given, *how)
    elif packed is None or back is not None or packed.tensor.dtype != q.dtype or packed.rows > (kind == BANK):
        out, *_ = _attend(q, k, v, *given, *how, 0, 0, None)
    else:
        if packed.rows:
            given[0] = None
        out, *_ = _attend(packed.tensor, None, None, *given, *how, q.shape[1], q.shape[-1], packed.bias)
    if back is not None and real is not None:
        out = _take(out, back).masked_fill(~real[:, None, :, None], 0)
    return out


def _reorder(term: Term, q_order: Tensor, order: Tensor, B: int) -> Term:
    """A term whose tokens are in another order; what belongs to distances stays."""
    if isinstance(term, Potential):
        return replace(
            term,
            query=_take(term.query.expand(B, -1, -1), q_order),
            key=_take(term.key.expand(B, -1, -1), order),
            gate=None if term.gate is None else _take(term.gate.expand(B, -1, -1), q_order),
        )
    if isinstance(term, Profile):
        return replace(term, rho=term.rho.expand(B, -1).gather(1, q_order))
    if isinstance(term, Bank):
        return replace(term, query=_take(term.query.expand(B, -1, -1, -1), q_order))
    return term
