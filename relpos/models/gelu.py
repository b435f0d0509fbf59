"""GPT-2's GELU, `x (1 + tanh u) / 2 = x sigmoid(2u)` with `u = sqrt(2/pi) (x + 0.044715 x^3)`.

Compiled for a GPU the sigmoid is cheaper than the tanh (H200, 32,768 rows of 3,072 in bfloat16: 98 us instead of 130,
the gradient 145 instead of 170). Behind a linear layer the gradient of its output and that of its bias are one Triton
kernel (170 us, the last sum included): torch.compile would read the one again to sum up the other (205).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.models.compiled import plain, takes

BLOCK = 64  # rows and columns of a program
TWICE = 2 * math.sqrt(2 / math.pi)
CUBE = TWICE * 0.044715


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _gelu(x).to(x.dtype) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")

    def behind(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Of the output of a linear layer."""
        if torch.compiler.is_compiling() and plain(self, TanhGELU) and plain(linear, nn.Linear):
            if linear.bias is not None and takes(x, linear.weight):
                return fused(F.linear(x, linear.weight), linear.bias)
        return self(linear(x))


def _gelu(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.sigmoid(wide * (TWICE + CUBE * wide * wide))


def fused(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of `x + bias` with the kernels."""
    return _bias_gelu(x, bias)


@functools.cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def gelu_forward(X, Bias, Out, rows, size, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
        columns = tl.cdiv(size, N)
        n = tl.program_id(0) % columns * N + tl.arange(0, N)[None, :]
        row = (tl.program_id(0) // columns).to(tl.int64) * N + tl.arange(0, N)[:, None]
        at = row * size + n
        ok = (row < rows) & (n < size)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        x += tl.load(Bias + n, mask=n < size, other=0.0).to(tl.float32)
        tl.store(Out + at, (x * tl.sigmoid(x * (A + B * x * x))).to(Out.dtype.element_ty), mask=ok)

    @triton.jit
    def gelu_backward(D, X, Bias, Grad, Sums, rows, size, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
        columns = tl.cdiv(size, N)
        n = tl.program_id(0) % columns * N + tl.arange(0, N)[None, :]
        row = (tl.program_id(0) // columns).to(tl.int64) * N + tl.arange(0, N)[:, None]
        at = row * size + n
        ok = (row < rows) & (n < size)
        d = tl.load(D + at, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        x += tl.load(Bias + n, mask=n < size, other=0.0).to(tl.float32)
        s = tl.sigmoid(x * (A + B * x * x))
        grad = (d * s * (1 + x * (1 - s) * (A + 3 * B * x * x))).to(Grad.dtype.element_ty)
        tl.store(Grad + at, grad, mask=ok)
        tl.store(
            Sums + (tl.program_id(0) // columns).to(tl.int64) * size + n,
            tl.sum(grad.to(tl.float32), 0)[None, :],
            mask=n < size,
        )

    return gelu_forward, gelu_backward


def _launch(number: int, *tensors: Tensor) -> None:
    x = tensors[0]
    size = x.shape[-1]
    rows = x.numel() // size
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if rows:
            programs = -(-size // BLOCK) * -(-rows // BLOCK)
            _kernels()[number][(programs,)](*tensors, rows, size, A=TWICE, B=CUBE, N=BLOCK, num_warps=4)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("relpos::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    out = _like(x)
    _launch(0, x.contiguous(), bias, out)
    return out


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return _like(x)


@torch.library.custom_op("relpos::bias_gelu_backward", mutates_args=())
def _backward(d: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x, and parts of the sum over rows for the bias, float32 [blocks of rows, size]."""
    grad, parts = _gradients(x, bias)
    _launch(1, d.contiguous(), x.contiguous(), bias, grad, parts)
    return grad, parts


@_backward.register_fake
def _(d: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients(x, bias)


def _gradients(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-x.numel() // (x.shape[-1] * BLOCK))
    return _like(x), bias.new_empty(blocks, x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    grad, parts = _backward(d, x, bias)
    return grad, parts.sum(0).to(bias.dtype)  # here, where it is compiled too


_bias_gelu.register_autograd(_gradient, setup_context=_save)

__all__ = ["TanhGELU", "fused"]
