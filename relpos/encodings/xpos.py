"""xPos: RoPE whose pairs also shrink with distance, `zeta_t^(d/scale_base)` (https://arxiv.org/abs/2212.10554).

`zeta_t = (2t + 0.4 D) / (1.4 D)`; q is multiplied by `zeta^(i/scale_base)`, k by `zeta^(-j/scale_base)`. Pairs are
interleaved and scale_base is 512, as in the authors' code. Causal only: a key ahead of the query would grow.

The authors centre positions at half the current length, which cancels in the score but leaves cached keys inconsistent
as the text grows; positions here are the positions. The keys' factor then grows without bound, so a text too long for
q's dtype is an error, with room for keys 16 times the usual size: beyond 3,399 positions in float16, 35,125 in bfloat16
and float32. Explicit `positions` are not checked: that would read values.
"""

from __future__ import annotations

import math

import torch

from relpos.encodings.base import Encoding, constant
from relpos.errors import UserError
from relpos.terms import Context, Layout, Rotation


class XPos(Encoding):
    title = "xPos"
    formula = "q_i . zeta^((i - j)/512) R((i - j) w) k_j, zeta_t = (2t + 0.4 D) / 1.4 D"
    paper = "https://arxiv.org/abs/2212.10554"
    additive = False
    bidirectional = False

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        base: float = 10000.0,
        scale_base: float = 512.0,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(head_dim % 2 == 0, f"it turns pairs of features, so head_dim must be even, not {head_dim}")
        self.require(base > 1, f"base must be above 1, not {base}")
        self.require(scale_base > 0, f"scale_base must be above 0, not {scale_base}")
        self.base, self.scale_base = base, scale_base
        self.formula = self.formula.replace("512", f"{scale_base:g}")

    def limit(self, dtype: torch.dtype) -> int:
        """The last position whose key still fits."""
        return int(self.scale_base * math.log(torch.finfo(dtype).max / 16) / math.log(1.4 / 0.4))

    def checks(self, layout: Layout, dtype: torch.dtype) -> None:
        super().checks(layout, dtype)
        needed = layout.Tk
        if layout.cu_seqlens is not None or layout.positions is not None:
            # A look at the values is cheap on a CPU alone.
            if layout.device.type != "cpu" or torch.compiler.is_compiling() or not layout.Tk:
                return
            needed = int(layout.k_positions().max()) + 1
        if needed > self.limit(dtype) + 1:
            raise UserError(
                f"xpos keeps keys within {str(dtype).removeprefix('torch.')} up to {self.limit(dtype) + 1} tokens and "
                f"there are {needed}: use a wider dtype, a larger scale_base, or rope"
            )

    def rotate(self, ctx: Context) -> Rotation:
        layout, D = ctx.layout, self.head_dim
        pairs = range(D // 2)
        w = constant([self.base ** (-2 * t / D) for t in pairs], ctx.dtype, layout.device)
        decay = [math.log((2 * t + 0.4 * D) / (1.4 * D)) / self.scale_base for t in pairs]
        shrink = constant(decay, ctx.dtype, layout.device)

        def turn(positions: torch.Tensor, direction: int) -> tuple[torch.Tensor, torch.Tensor]:
            p = positions[..., None].to(ctx.dtype)
            size = torch.exp(direction * p * shrink)
            return (p * w).cos() * size, (p * w).sin() * size

        q_cos, q_sin = turn(layout.q_positions(), 1)
        k_cos, k_sin = turn(layout.k_positions(), -1)
        return Rotation(q_cos, q_sin, k_cos, k_sin, interleaved=True)
