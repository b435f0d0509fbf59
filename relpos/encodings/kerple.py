"""KERPLE: log `-p_h ln(1 + a_h d)` and power `-a_h d^p_h` (https://arxiv.org/abs/2205.09921).

`p` and `a` are stored themselves and floored at 0.01 (power: p also capped at 2, which keeps the kernel conditionally
positive definite). The authors write the floor back into the weights at every forward pass; here the floor is out of
place, so evaluation, EMA copies and compiled graphs see the weights as the optimizer left them. The authors share one
module across all layers, the CABLE paper has one per layer: `share=false`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from relpos.encodings.base import Encoding, wide
from relpos.terms import Context, Profile, Term

FLOOR = 0.01


class Kerple(Encoding):
    title = "KERPLE"
    formula = "-p_h ln(1 + a_h |d|), or -a_h |d|^p_h"
    paper = "https://arxiv.org/abs/2205.09921"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        form: Literal["log", "power"] = "log",
        share: bool = True,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.form = form
        if form == "power":
            self.formula = "-a_h |d|^p_h"
        self.p = nn.Parameter(torch.empty(heads))
        self.a = nn.Parameter(torch.empty(heads))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.p, 0, 2)
        nn.init.uniform_(self.a, 0, 1)

    def terms(self, ctx: Context) -> list[Term]:
        a, p = wide(self.a).clamp(min=FLOOR), wide(self.p).clamp(min=FLOOR)
        rate, slope = (p.clamp(max=2), -a) if self.form == "power" else (a, -p)
        # A profile without knots: a logarithm is cheaper to take again in a kernel than to fetch.
        rho = torch.ones(1, 1, dtype=rate.dtype, device=rate.device).expand(1, ctx.layout.Tq)
        slope = slope[:, None]
        knots = rate.new_empty(0)
        return [Profile(rate, rho, knots, slope, torch.zeros_like(slope), power=self.form == "power")]
