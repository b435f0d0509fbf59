"""A step of the residual stream, `hidden + x`, and the layer norm behind it.

In a compiled training step on a GPU each of their two passes is one Triton kernel. The backward pass reads the
gradients of both, the sum and two numbers a row, and writes the gradient of the sum, once for the stream and once
rounded for what made x; summed over rows it is that of the bias in x. What torch.compile makes of it keeps the normed
rows in float32 beside the sum, and writes the second copy and the sums over rows in kernels of their own (H200, 32,768
rows of 768 in float32 and bfloat16: 96 us forward and 166 backward; here, without the sum for the bias, 73 and 108).

Operators with a gradient of their own, not torch.autograd.Function: torch 2.11 compiles one that saves its inputs or
its results so that gradients which reach it on another way are lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.models.compiled import plain, takes

_O = Optional[Tensor]  # noqa: UP045 - the operator's schema is read from it
PROGRAMS = 396  # three for each processor of an H200; each leaves a row of sums


class Owing(NamedTuple):
    """A linear layer's output. It has the bias in it; the bias's gradient is left to who adds it up."""

    x: Tensor
    bias: Tensor | None = None

    def paid(self) -> Tensor:
        return self.x if self.bias is None else self.x + (self.bias - self.bias.detach()).to(self.x.dtype)


def owing(linear: nn.Linear, x: Tensor) -> Owing:
    """What a linear layer makes of x, for `add_norm`."""
    if torch.compiler.is_compiling() and plain(linear, nn.Linear) and takes(x, linear.weight):
        if linear.bias is not None:
            return Owing(F.linear(x, linear.weight, linear.bias.detach()), linear.bias)
    return Owing(linear(x))


def add_norm(hidden: Tensor, more: Owing | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """`hidden + more`, and that normed."""
    if more is None:
        return hidden, norm(hidden)
    wanted = any(x is not None and x.requires_grad for x in (hidden, *more))
    if torch.compiler.is_compiling() and wanted and plain(norm, nn.LayerNorm) and norm.weight is not None:
        if takes(hidden, more.x, norm.weight):
            return fused(hidden, more, norm)
    hidden = hidden + more.paid()
    return hidden, norm(hidden)


def fused(hidden: Tensor, more: Owing, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The same with the kernels."""
    x, bias = more
    kind = hidden.device.type
    # Under autocast the layers behind it round it anyway, and so its gradient comes rounded.
    auto = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if auto else torch.promote_types(hidden.dtype, x.dtype)
    return _add_norm(hidden, x, norm.weight, norm.bias, norm.eps, dtype, bias)[:2]


@functools.cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def norm_forward(
        Hidden, X, Weight, Bias, Total, Out, Mean, Rstd, size, eps, N: tl.constexpr, BIAS: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, N)
        ok = n < size
        at = row * size + n
        total = tl.load(Hidden + at, mask=ok, other=0.0).to(tl.float32)
        total += tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        total = total.to(Total.dtype.element_ty)
        tl.store(Total + at, total, mask=ok)
        total = total.to(tl.float32)
        mean = tl.sum(total, 0) / size
        total = tl.where(ok, total - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(total * total, 0) / size + eps)
        tl.store(Mean + row, mean)
        tl.store(Rstd + row, rstd)
        out = total * rstd * tl.load(Weight + n, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(Bias + n, mask=ok, other=0.0).to(tl.float32)
        tl.store(Out + at, out.to(Out.dtype.element_ty), mask=ok)

    @triton.jit
    def norm_backward(
        DTotal, DOut, Total, Mean, Rstd, Weight, Grad, Rounded, Sums, rows, size,
        N: tl.constexpr, TWICE: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        n = tl.arange(0, N)
        ok = n < size
        weight = tl.load(Weight + n, mask=ok, other=0.0).to(tl.float32)
        of_weight = tl.zeros((N,), tl.float32)
        of_bias = tl.zeros((N,), tl.float32)
        of_more = tl.zeros((N,), tl.float32)
        for i in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            row = tl.full((), i, tl.int64)
            at = row * size + n
            d = tl.load(DOut + at, mask=ok, other=0.0).to(tl.float32)
            x = tl.load(Total + at, mask=ok, other=0.0).to(tl.float32)
            g = tl.load(DTotal + at, mask=ok, other=0.0).to(tl.float32)
            rstd = tl.load(Rstd + row)
            x = tl.where(ok, (x - tl.load(Mean + row)) * rstd, 0.0)
            of_weight += d * x
            of_bias += d
            d *= weight
            g += rstd * (d - tl.sum(d, 0) / size - x * (tl.sum(d * x, 0) / size))
            of_more += g
            tl.store(Grad + at, g.to(Grad.dtype.element_ty), mask=ok)
            if TWICE:
                tl.store(Rounded + at, g.to(Rounded.dtype.element_ty), mask=ok)
        Sums += tl.program_id(0) * 3 * size + n
        tl.store(Sums, of_weight, mask=ok)
        tl.store(Sums + size, of_bias, mask=ok)
        tl.store(Sums + 2 * size, of_more, mask=ok)

    return norm_forward, norm_backward


def _launch(number: int, programs: int, tensors: Sequence[Tensor | None], *numbers: float, **flags: int) -> None:
    given = [tensors[0] if x is None else x for x in tensors]  # a pointer that is never read
    with torch.cuda.device_of(given[0]):  # Triton launches on the current device
        if programs:
            _kernels()[number][(programs,)](*given, *numbers, **flags)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _results(hidden: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
    return _like(hidden, torch.promote_types(hidden.dtype, x.dtype)), _like(hidden, dtype), mean, _like(mean)


@torch.library.custom_op("relpos::add_norm", mutates_args=())
def _add_norm(
    hidden: Tensor, x: Tensor, weight: Tensor, bias: _O, eps: float, dtype: torch.dtype, of_x: _O
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hidden + x`; that normed; mean and 1 / deviation of its rows. `of_x`, a bias that x has in it, is there for its
    gradient alone."""
    results = _results(hidden, x, dtype)
    size = hidden.shape[-1]
    given = [hidden.contiguous(), x.contiguous(), weight, bias, *results]
    _launch(0, results[2].numel(), given, size, eps, **_block(size), BIAS=bias is not None)
    return results


@_add_norm.register_fake
def _(hidden, x, weight, bias, eps, dtype, of_x):  # type: ignore[no-untyped-def]
    return _results(hidden, x, dtype)


@torch.library.custom_op("relpos::add_norm_backward", mutates_args=())
def _backward(
    d_total: Tensor, d_out: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, of_x: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the total; the same in `of_x`, empty where that is no other dtype; parts of the sums over rows for
    the weight, the bias and a bias in x, float32 [PROGRAMS, 3, size]."""
    _, rounded, _ = results = _gradients(total, weight, of_x)
    size = total.shape[-1]
    given = [d_total.contiguous(), d_out.contiguous(), total, mean, rstd, weight, *results]
    stages = 3 if size <= 2048 else 1  # rows on their way take 24 bytes an entry of shared memory
    _launch(1, PROGRAMS, given, mean.numel(), size, **_block(size), TWICE=rounded.numel() > 0, STAGES=stages)
    return results


@_backward.register_fake
def _(d_total, d_out, total, mean, rstd, weight, of_x):  # type: ignore[no-untyped-def]
    return _gradients(total, weight, of_x)


def _gradients(total: Tensor, weight: Tensor, of_x: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rounded = _like(total if of_x != total.dtype else total[:0], of_x)
    return _like(total), rounded, weight.new_empty(PROGRAMS, 3, total.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    hidden, x, weight, bias, _, _, more = inputs
    total, _, mean, rstd = output
    ctx.save_for_backward(total, mean, rstd, weight)
    ctx.dtypes = (hidden.dtype, x.dtype, *[None if b is None else b.dtype for b in (bias, more)])


def _gradient(ctx: Any, d_total: Tensor, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight = ctx.saved_tensors
    of_hidden, of_x, *of_biases = ctx.dtypes
    grad, rounded, parts = _backward(d_total, d_out, total, mean, rstd, weight, of_x)
    d_weight, *d_biases = parts.sum(0)  # here, where it is compiled too
    d_bias, d_more = (None if dtype is None else d.to(dtype) for d, dtype in zip(d_biases, of_biases, strict=True))
    d_x = rounded if of_x != total.dtype else grad
    return grad.to(of_hidden), d_x, d_weight.to(weight.dtype), d_bias, None, None, d_more


_add_norm.register_autograd(_gradient, setup_context=_save)


def _block(size: int) -> dict[str, int]:
    """A power of two that holds a row, and warps for it."""
    N = 1 << (size - 1).bit_length()
    return {"N": N, "num_warps": min(32, max(4, N // 512))}


__all__ = ["Owing", "add_norm", "fused", "owing"]
