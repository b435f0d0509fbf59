"""ALiBi: `-m_h |i - j|` (https://arxiv.org/abs/2108.12409).

Slopes for a power of two of heads are `2^(-8h/H)`, h = 1..H. For other H there are two published readings:
`closest_power_of_two` takes the series of the largest power of two below H and fills up with every second slope of the
next one (the authors' code, BLOOM, MPT); `geometric` keeps `2^(-8h/H)` (the figures of the CABLE paper).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from relpos.encodings.base import Encoding, constant, wide
from relpos.terms import Context, Slope, Term


def slope_values(heads: int, rule: str) -> list[float]:
    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    if rule == "geometric":
        return series(heads)
    power = 2 ** int(math.log2(heads))
    return series(power) + series(2 * power)[0::2][: heads - power]


class ALiBi(Encoding):
    title = "ALiBi"
    formula = "-m_h |d|"
    paper = "https://arxiv.org/abs/2108.12409"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        slopes: Literal["closest_power_of_two", "geometric"] = "closest_power_of_two",
        learn: bool = False,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.rule = slopes
        self.slopes = nn.Parameter(torch.empty(heads)) if learn else None

    def reset_parameters(self) -> None:
        if self.slopes is not None:
            with torch.no_grad():
                self.slopes.copy_(torch.tensor(slope_values(self.heads, self.rule)))

    def terms(self, ctx: Context) -> list[Term]:
        if self.slopes is not None:
            return [Slope(wide(self.slopes))]
        values = slope_values(self.heads, self.rule)
        return [Slope(constant(values, ctx.dtype, ctx.layout.device))]
