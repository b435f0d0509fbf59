"""KERPLE: log `-p_h ln(1 + a_h d)` and power `-a_h d^p_h` (https://arxiv.org/abs/2205.09921).

`p` and `a` are stored themselves and floored at 0.01 (power: p also capped at 2, which keeps the kernel conditionally
positive definite). The authors write the floor back into the weights at every forward pass; here the floor is out of
place, so evaluation, EMA copies and compiled graphs see the weights as the optimizer left them. The authors share one
module across all layers, the CABLE paper has one per layer: `share=false`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from relpos.encodings.base import DistanceEncoding, wide
from relpos.terms import Context, Profile, Term

FLOOR = 0.01


class Kerple(DistanceEncoding):
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
        if self.form == "power":
            return super().terms(ctx)
        # A profile without knots: a logarithm is cheaper to take again in a kernel than to fetch.
        rate, slope = wide(self.a).clamp(min=FLOOR), -wide(self.p).clamp(min=FLOOR)[:, None]
        rho = torch.ones(1, 1, dtype=rate.dtype, device=rate.device).expand(1, ctx.layout.Tq)
        return [Profile(rate, rho, rate.new_empty(0), slope, torch.zeros_like(slope))]

    def by_distance(self, d: Tensor) -> Tensor:
        """The power form."""
        shape = (self.heads, *[1] * d.dim())
        a = wide(self.a).clamp(min=FLOOR).view(shape)
        p = wide(self.p).clamp(min=FLOOR, max=2).view(shape)
        # d = 0 gives 0 whatever p; keeping it out of pow keeps 0 * log 0 out of the gradient of p.
        far = d.abs().clamp(min=1)
        return -a * torch.where(d == 0, 0.0, far**p)
