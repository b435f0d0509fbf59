"""`impl="fused"`: the Triton kernels behind one differentiable operation.

The host's part: say what cannot run (`obstacle`), turn terms into the flat list of tensors the kernels read,
bring padded
batches into a contiguous form, launch, and turn the kernels' row,
column and diagonal sums into the gradients of the terms.
Autograd carries those on through the plain PyTorch that built the terms.

Padding: the real tokens of every row are moved to its front (a stable sort of the mask; fixed shapes,
nothing read on the
host) and the output is moved back. Inside the kernels columns then are positions, which keeps by-distance biases exact
for left padding, right padding and holes alike.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor

from relpos.attention import decode
from relpos.terms import Bank, Distance, Layout, Potential, Profile, Slope, Term

LOG2E = math.log2(math.e)
LN2 = math.log(2)
SKEW = 16
BLOCK = 128  # no kernel's block is larger


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
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def obstacle(q: Tensor, k: Tensor, terms: list[Term], layout: Layout, *, rescores: bool = False) -> str | None:
    """Why the fused kernels cannot run such a call; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not q.is_cuda and not interpreted():
        return f"it needs a CUDA GPU, and q is on {q.device.type} (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] > 128:
        return f"its tiles hold heads of at most 128 features, not {q.shape[-1]}"
    if not rescores and decode.serves(q, k, None, terms, layout):
        return None
    return unsupported(terms, layout, rescores=rescores)


def unsupported(terms: list[Term], layout: Layout, *, rescores: bool = False) -> str | None:
    """Why the kernels cannot run such terms on any machine; None if they can."""
    if rescores:
        return "this encoding rescores whole rows of all heads at once"
    kinds = [type(term) for term in terms]
    if Bank in kinds:
        return "there is no kernel for a bank of profiles yet"
    if len(kinds) > 1:
        return "it adds one term at a time"
    if layout.positions is not None and any(kind is not Potential for kind in kinds):
        return "explicit positions may have gaps, and its tiles count distances in columns"
    if any(isinstance(term, Profile) and not term.knots.numel() and term.rho.requires_grad for term in terms):
        return "a profile without knots has no gradient for rho"
    if isinstance(layout.q_offset, Tensor) and layout.cu_seqlens is not None:
        return "packed documents take one q_offset"
    return None


# Block sizes by kernel, for heads of up to 64 and up to 128 features: BM, BN, warps, stages, registers a thread (0: as
# the compiler likes). Tuned on an H200 with benchmarks/tune.py. Fewer registers let more programs share a processor.
Blocks = tuple[int, int, int, int, int]
_BLOCKS: dict[str, tuple[Blocks, Blocks]] = {
    "forward": ((64, 64, 4, 3, 128), (128, 64, 8, 3, 0)),
    "backward_q": ((64, 64, 4, 3, 168), (64, 64, 4, 2, 0)),
    "backward_k": ((32, 64, 4, 3, 128), (32, 64, 4, 2, 0)),
    "backward_distance": ((64, 64, 4, 3, 0), (64, 64, 4, 2, 0)),
}


def _blocks(kernel: str, q: Tensor) -> Blocks:
    if q.dtype == torch.float32:  # tiles twice as large, and not fed to the tensor cores
        return (64, 32, 4, 1, 0) if kernel == "forward" and q.shape[-1] <= 64 else (32, 32, 4, 1, 0)
    return _BLOCKS[kernel][q.shape[-1] > 64]


def _resources(blocks: Blocks) -> dict[str, int]:
    """The launch options of block sizes."""
    _, _, warps, stages, registers = blocks
    options = {"num_warps": warps, "num_stages": stages}
    return options | {"maxnreg": registers} if registers and torch.version.cuda else options


def _like(x: Tensor) -> Tensor:
    """An empty [B,H,T,D] laid out as [B,T,H,D], so that merging the heads is free."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def _strip_size(reach: int, causal: bool, Tk: int) -> tuple[int, int]:
    """Column of distance 0 and number of columns of a strip."""
    up = lambda n: -(-n // SKEW) * SKEW  # noqa: E731
    zero = up((min(reach, Tk) if causal else Tk) + 2 * BLOCK + SKEW)
    return zero, zero + up((0 if causal else Tk) + 2 * BLOCK + SKEW)


def _strip(values: Tensor, origin: int, causal: bool, Tk: int, dtype: torch.dtype) -> Tensor:
    """`[H, 2, 16, Y]`: sixteen copies of a by-distance table, each shifted by one, so that a tile's rows are contiguous
    and aligned. `strip[h, 0, a, y]` is the value at distance `a - (y - zero)`; the second half is for tiles that lie
    across: `strip[h, 1, a, y]` is the value at distance `(y - (Y - zero)) - a`.

    In float16 where q is bfloat16,
    which is three bits coarser: half the traffic. What a bias of -b contributes shrinks as
    e^-b, faster than its rounding grows."""
    last = values.shape[1] - 1
    zero, length = _strip_size(last - origin, causal, Tk)
    a = torch.arange(SKEW, device=values.device)[:, None]
    y = torch.arange(length, device=values.device)[None]
    index = (origin + torch.stack((a - y + zero, y - a + zero - length))).clamp(0, last)
    values = values.detach()
    return (values.clamp(-6e4, 6e4).half() if dtype == torch.bfloat16 else values)[:, index]


class _Call:
    """The arguments the kernels share."""

    def __init__(self, q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs,
    origin,
                 causal, pot, window, q_offset, scale):  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.B, self.H, self.Tq, self.D = q.shape
        self.Tk = k.shape[2]
        self.group = self.H // k.shape[1]
        self.scale = scale
        dummy = q  # a pointer that is never read
        self.gated = gate is not None
        self.K = 0 if knots is None else knots.numel()
        zero = length = reach = 0
        far = dummy
        if values is not None:
            far, reach = (values[:, -1] * LOG2E).contiguous(), values.shape[1] - 1 - origin
        if strip is not None:
            zero, length = _strip_size(reach if values is not None else self.Tk - 1, causal, self.Tk)
        scaled = {
            "slopes": None if slopes is None else (slopes * LOG2E).contiguous(),
            "rate": None if rate is None else rate.expand(self.H).contiguous(),
            "gate": None if gate is None else gate * LOG2E,
            "rho": None if rho is None else (rho * LN2).contiguous(),
            "pslope": None if pslope is None else (pslope * LOG2E).contiguous(),
            "poffset": None if poffset is None else (poffset * LOG2E).contiguous(),
        }
        pick = lambda x: dummy if x is None else x  # noqa: E731
        self.mask = (pick(meta), pick(docs))
        per_head = 0 if strip is None or strip.shape[0] == 1 else 2 * SKEW * length
        self.strip = (strip, zero, length, per_head)
        self.tensors = (
            *self.mask, pick(scaled["slopes"]), pick(sq), pick(sk), pick(scaled["gate"]), pick(scaled["rate"]),
            pick(scaled["rho"]),
            pick(knots), pick(scaled["pslope"]), pick(scaled["poffset"]), pick(strip), far,
        )  # fmt: skip
        batch = lambda x, heads: 0 if x is None or x.shape[0] == 1 else heads  # noqa: E731
        self.batch = (batch(sk, self.H), batch(gate, self.H), batch(rho, 1))
        self.sizes = (self.H, self.group, self.Tq, self.Tk, q_offset, scale * LOG2E)
        self.reach = (reach, zero, length, per_head)
        self.flags = dict(
            CAUSAL=causal, HAS_META=meta is not None, HAS_DOCS=docs is not None, WINDOW=window,
            PREC="ieee" if q.dtype == torch.float32 else "tf32", D=self.D, DP=max(16, 1 << (self.D - 1).bit_length()),
        )  # fmt: skip
        self.terms = dict(
            CANCEL=causal and q.dtype != torch.float32, EXACT=q.dtype == torch.float32, SLOPE=slopes is not None,
            POT=pot,
            GATED=self.gated, PROFILE=rate is not None, KNOTS=self.K, KP=max(2, 1 << max(0, self.K - 1).bit_length()),
            DIST=int(values is not None),
        )  # fmt: skip


# The terms' tensors that have a gradient, in the order of the operator's results.
GRADS = ("slopes", "sq", "sk", "gate", "rate", "rho", "pslope", "poffset", "values")


def _forward(q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs, origin,
causal, pot,
             window, q_offset, scale):  # fmt: skip
    c = _Call(q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs, origin,
        causal, pot,
              window, q_offset, scale)  # fmt: skip
    out, lse = _like(q), q.new_empty(c.B, c.H, c.Tq, dtype=torch.float32)
    BM, BN, *_ = use = _blocks("forward", q)
    grid = (-(-c.Tq // BM), c.B * c.H)
    _kernels().forward[grid](
        q, k, v, out, lse, *c.tensors, *_strides(q, k, v, out), *c.batch, *c.sizes, *c.reach,
        BM=BM, BN=BN, **c.flags, **c.terms, **_resources(use),
    )  # fmt: skip
    return out, lse


def _backward(do, q, k, v, out, lse, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs,
              origin, causal, pot, window, q_offset, scale, wants):  # fmt: skip
    c = _Call(q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs, origin,
        causal, pot,
              window, q_offset, scale)  # fmt: skip
    wanted = {name for bit, name in enumerate(GRADS) if wants >> bit & 1}
    if do.stride(-1) != 1:
        do = do.contiguous()
    kernels = _kernels()
    dq, dk, dv = _like(q), _like(k), _like(v)
    delta = torch.empty_like(lse)

    def maybe(needed: bool, *shape: int) -> Tensor:
        return lse.new_empty(shape) if wanted and needed else delta  # a pointer that is never written through

    by_query = maybe(pot == 2 or (pot == 1 and not causal), *lse.shape)
    by_gate, by_rho = maybe(c.gated, *lse.shape), maybe(c.K > 0, *lse.shape)
    # With slopes and linear potentials, what backward_k needs of a row is relative to the row's block here.
    local = torch.empty_like(lse) if c.terms["CANCEL"] and (pot == 1 or slopes is not None) else lse
    BM, BN, *_ = use = _blocks("backward_q", q)
    kernels.backward_q[(-(-c.Tq // BM), c.B * c.H)](
        q, k, v, out, do, lse, local, delta, dq, by_query, by_gate, by_rho, *c.tensors, *_strides(q, k, v, out, do, dq),
        *c.batch, *c.sizes, scale, *c.reach,
        BM=BM, BN=BN, **c.flags, **c.terms, GRAD=bool(wanted), **_resources(use),
    )  # fmt: skip

    QM = BM
    BM, BN, *_ = use = _blocks("backward_k", q)
    assert QM % BM == 0
    blocks = -(-c.Tk // BN)
    key = maybe(True, c.B, c.H, c.Tk)
    key_rate = maybe(rate is not None, c.B, c.H, c.Tk)
    pieces = lse.new_zeros(c.B, c.H, blocks, 2, c.K + 1) if wanted and c.K else delta
    kernels.backward_k[(blocks, c.B * k.shape[1])](
        q, k, v, do, local, delta, dk, dv, key, key_rate, pieces, *c.tensors, *_strides(q, k, v, do, dk, dv), *c.batch,
        *c.sizes, scale, *c.reach,
        BM=BM, BN=BN, QM=QM, **c.flags, **c.terms, KEYGRAD=bool(wanted), **_resources(use),
    )  # fmt: skip

    grads: dict[str, Tensor] = {}
    if "slopes" in wanted:
        grads["slopes"] = -key.sum((0, 2))
    if pot:
        factor = 1 if pot == 1 else 2
        if "sq" in wanted:  # the causal linear form has none: it is constant along a row
            by_query = by_query if gate is None else by_query * gate
            grads["sq"] = torch.zeros_like(lse) if pot == 1 and causal else -factor * by_query
        if "sk" in wanted:
            key = key if gate is None else key * LN2  # the kernels' gates are times log2(e)
            grads["sk"] = key if pot == 1 else factor * key
        if "gate" in wanted:
            grads["gate"] = by_gate if pot == 1 else LN2 * by_gate
        for name, of in (("sq", sq), ("sk", sk), ("gate", gate)):
            if name in grads and of.shape[0] == 1 and c.B > 1:
                grads[name] = grads[name].sum(0, keepdim=True)
    if rate is not None and wanted:
        # In the kernels u = log2(1 + rate d) * (rho ln 2), and slopes are times log2(e).
        if c.K:
            per_head = pieces.sum((0, 2))
            grads["pslope"], grads["poffset"] = per_head[:, 0].clone(), per_head[:, 1].clone()
            by_rho = by_rho.sum(1) * (LN2 * LN2)
        else:
            grads["pslope"] = key.sum((0, 2))[:, None]
            grads["poffset"] = torch.zeros_like(poffset)
        if "rate" in wanted:
            of_rate = key_rate.sum((0, 2))
            of_rate = of_rate if c.K else of_rate * pslope[:, 0] * LOG2E
            of_rate = of_rate.sum(0, keepdim=True) if rate.numel() == 1 else of_rate
            grads["rate"] = of_rate / rate.clamp(min=1e-12)
        if "rho" in wanted:
            assert c.K  # without knots `unsupported` refuses it
            grads["rho"] = by_rho.sum(0, keepdim=True) if rho.shape[0] == 1 and c.B > 1 else by_rho
    if "values" in wanted:
        grads["values"] = _distance_gradient(c, do, lse, delta, key, values, origin, causal, window, docs)
    # An operator's results may not be one tensor twice, nor one of its inputs.
    return (dq, dk, dv, *[grads[name] if name in wanted else lse.new_empty(0) for name in GRADS])


def _distance_gradient(c: _Call, do, lse, delta, far, values, origin, causal, window, docs) -> Tensor:
    q, k, v = c.q, c.k, c.v
    n, *_ = use = _blocks("backward_distance", q)
    reach = values.shape[1] - 1 - origin
    # Tiles that lie wholly beyond the reach were summed by backward_k, unless masks kept it from telling them apart.
    everything = not causal or docs is not None or window > 0
    tile = _blocks("backward_k", q)
    last = c.Tk - 1 if everything else min(reach + tile[0] + tile[1], c.Tk - 1)
    first = 0 if causal else -(-c.Tk // n)
    diagonals = -(-(last + n) // n) + first
    blocks = c.B * -(-c.Tq // n)
    shares = max(1, min(blocks, -(-1056 // (c.H * diagonals))))
    out = lse.new_empty(shares, c.H, diagonals, 2, n)
    scratch = lse.new_empty(shares * c.H * diagonals, n, n)
    strip, zero, length, per_head = c.strip
    _kernels().backward_distance[(diagonals, c.H * shares)](
        q, k, v, do, lse, delta, out, scratch, *c.mask, strip, *_strides(q, k, v, do),
        c.B, *c.sizes, reach, zero, length, per_head, -first, BM=n, KM=0 if everything else tile[0], KN=tile[1],
        **c.flags,
        **_resources(use),
    )  # fmt: skip
    halves = out.sum(0)  # entry x of diagonal block m is distance m * n + x - (n - 1)
    sums = lse.new_zeros(c.H, diagonals + 1, n)
    sums[:, :-1] += halves[:, :, 0]
    sums[:, 1:] += halves[:, :, 1]
    sums = sums.flatten(1)  # column x is distance x - first * n - (n - 1)
    shift = first * n + n - 1  # column of distance 0
    low, high = shift - origin, shift + reach  # columns of the first and last entry of the table
    size = values.shape[1]
    grad = lse.new_zeros(c.H, size)
    start, stop = max(low, 0), min(high, sums.shape[1])
    if stop > start:
        grad[:, start - low : stop - low] = sums[:, start:stop]
    grad[:, -1] += sums[:, max(high, 0) :].sum(1) + far.sum((0, 2))
    if low > 0:
        grad[:, 0] += sums[:, :low].sum(1)
    return grad


_T = Tensor
_O = Optional[Tensor]  # noqa: UP045 - the operator's schema is read from it


@torch.library.custom_op("relpos::attend", mutates_args=())
def _attend(q: _T, k: _T, v: _T, slopes: _O, sq: _O, sk: _O, gate: _O, rate: _O, rho: _O, knots: _O, pslope: _O,
            poffset: _O, values: _O, strip: _O, meta: _O, docs: _O, origin: int, causal: bool, pot: int, window: int,
            q_offset: int,
            scale: float) -> tuple[_T, _T]:  # fmt: skip
    return _forward(q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs,
    origin, causal,
                    pot, window, q_offset, scale)  # fmt: skip


@_attend.register_fake
def _(q, k, v, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs, origin, causal,
pot, window,
      q_offset, scale):  # fmt: skip
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("relpos::attend_backward", mutates_args=())
def _attend_backward(do: _T, q: _T, k: _T, v: _T, out: _T, lse: _T, slopes: _O, sq: _O, sk: _O, gate: _O,
                     rate: _O, rho: _O, knots: _O, pslope: _O, poffset: _O, values: _O, strip: _O, meta: _O,
                     docs: _O, origin: int,
                     causal: bool, pot: int, window: int, q_offset: int, scale: float, wants: int,
                     ) -> tuple[_T, _T, _T, _T, _T, _T, _T, _T, _T, _T, _T, _T]:  # fmt: skip
    return _backward(do, q, k, v, out, lse, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip,
    meta,
                     docs, origin, causal, pot, window, q_offset, scale, wants)  # fmt: skip


@_attend_backward.register_fake
def _(do, q, k, v, out, lse, slopes, sq, sk, gate, rate, rho, knots, pslope, poffset, values, strip, meta, docs, origin,
      causal, pot, window, q_offset, scale, wants):  # fmt: skip
    given = (slopes, sq, sk, gate, rate, rho, pslope, poffset, values)
    return (
        _like(q), _like(k), _like(v),
        *[lse.new_empty(x.shape if wants >> bit & 1 else 0) for bit, x in enumerate(given)],
    )  # fmt: skip


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:16])
    ctx.scalars = inputs[16:22]


def _gradients(ctx, do, _lse):
    needs = ctx.needs_input_grad
    slots = (3, 4, 5, 6, 7, 8, 10, 11, 12)  # where GRADS stand among the operator's arguments
    wants = sum(1 << bit for bit, slot in enumerate(slots) if needs[slot])
    dq, dk, dv, *grads = _attend_backward(do, *ctx.saved_tensors, *ctx.scalars, wants)
    by_slot = dict(zip(slots, grads, strict=True))
    return (dq, dk, dv, *[by_slot.get(n) if needs[n] else None for n in range(3, 22)])


_attend.register_autograd(_gradients, setup_context=_save)


def _flat(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _sorted_by(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The order that brings the True entries of mask [B, T] to the front, and its inverse."""
    order = torch.sort((~mask).to(torch.uint8), dim=-1, stable=True).indices
    inverse = torch.empty_like(order).scatter_(-1, order, torch.arange(mask.shape[1],
        device=mask.device).expand_as(order))
    return order, inverse


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, T, ...] with its tokens in the order [B, T]."""
    index = order[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]) if x.dim() == 4 else index)


def attend(q: Tensor, k: Tensor, v: Tensor, terms: list[Term], layout: Layout, scale: float) -> Tensor:
    """Output [B,H,Tq,D] of q, k, v that are already rotated."""
    if torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type))
    k, v = k.to(q.dtype), v.to(q.dtype)
    if decode.serves(q, k, v, terms, layout):
        return decode.attend(q, k, v, terms, layout, scale)
    B = q.shape[0]
    meta = docs = back = real = None
    offset: int | Tensor = layout.Tk - layout.Tq if layout.q_offset is None else layout.q_offset
    if layout.key_padding_mask is not None:
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
        meta = torch.stack((offset, torch.full_like(offset, layout.Tk)), -1).int()
    if layout.cu_seqlens is not None:
        borders = layout.cu_seqlens.int()
        number = torch.bucketize(torch.arange(layout.Tk, device=q.device), layout.cu_seqlens, right=True)
        docs = torch.stack((borders[number - 1], borders[number])).contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))

    given: dict[str, Tensor | None] = dict.fromkeys(
        ("slopes", "sq", "sk", "gate", "rate", "rho", "knots", "pslope", "poffset", "values", "strip")
    )
    origin = pot = 0
    for term in terms:
        if isinstance(term, Slope):
            given["slopes"] = _flat(term.slopes)
        elif isinstance(term, Potential):
            pot = 2 if term.log else 1
            given["sq"], given["sk"] = _flat(term.query), _flat(term.key)
            given["gate"] = None if term.gate is None else _flat(term.gate)
        elif isinstance(term, Profile):
            rate = given["rate"] = _flat(term.rate.reshape(-1))
            given["rho"], given["knots"] = _flat(term.rho), _flat(term.knots)
            given["pslope"], given["poffset"] = _flat(term.slope), _flat(term.offset)
            d = torch.arange(0 if layout.causal else 1 - layout.Tk, layout.Tk, device=q.device).abs()
            logs = torch.log1p(rate[:, None] * d) * LOG2E
            # A rate that all heads share (knots follow) can afford float32: one strip serves them all.
            dtype = torch.float32 if logs.shape[0] == 1 else q.dtype
            given["strip"] = _strip(logs, 0 if layout.causal else layout.Tk - 1, layout.causal, layout.Tk, dtype)
        elif isinstance(term, Distance):
            values, origin = _flat(term.values), term.origin
            given["values"] = values
            given["strip"] = _strip(values * LOG2E, origin, layout.causal, layout.Tk, q.dtype)
    start = 0 if isinstance(offset, Tensor) else int(offset)
    out, _ = _attend(
        q, k, v, *given.values(), meta, docs, origin, layout.causal, pot, layout.window or 0, start, float(scale)
    )
    if back is not None and real is not None:
        out = _take(out, back).masked_fill(~real[:, None, :, None], 0)
    return out


def _reorder(term: Term, q_order: Tensor, order: Tensor, B: int) -> Term:
    if isinstance(term, Potential):
        return replace(
            term,
            query=_take(term.query.expand(B, -1, -1), q_order),
            key=_take(term.key.expand(B, -1, -1), order),
            gate=None if term.gate is None else _take(term.gate.expand(B, -1, -1), q_order),
        )
    if isinstance(term, Profile):
        return replace(term, rho=term.rho.expand(B, -1).gather(1, q_order))
    return term
