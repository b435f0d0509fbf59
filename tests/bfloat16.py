"""bfloat16 in Triton's interpreter as on a GPU. That of Triton 3.6 cuts off what a GPU rounds, and multiplies
matrices of bit patterns."""

from __future__ import annotations

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """To the nearest, of two as near to the even one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)


def mend() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    if getattr(Builder, "mended", False):
        return
    cast, product = Builder.cast_impl, Builder.create_dot

    def mended_cast(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(source.data), tl.bfloat16)
        return cast(self, source, target)

    def mended_product(self, a, b, c, precision, imprecise):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(widen(x.data), tl.float32) for x in (a, b))
        return product(self, a, b, c, precision, imprecise)

    Builder.cast_impl, Builder.create_dot, Builder.mended = mended_cast, mended_product, True
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(Builder, name, lambda self, source, target: self.cast_impl(source, target))
