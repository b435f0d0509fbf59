"""FIRE: `f(psi(d) / (psi(max(L, i)) + 1e-6))`, `psi(x) = ln(|c| x + 1)` (https://arxiv.org/abs/2310.04418).

f is Linear(1, width), ReLU, Linear(width, H). c starts at 0.1; L is 512 times a trained multiplier, in absolute value;
i is the 0-based position of the query. f is piecewise linear in one scalar with at most `width` knots that all heads
share, so it reaches the kernel as knots and, per head and piece, a slope and an offset: no T x T x width tensor exists.
Bidirectional: |d|, normalised by the query's position (no published form; the causal one read symmetrically).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from relpos.encodings.base import Encoding, wide
from relpos.terms import Context, Profile, Term

EPS = 1e-6


class Fire(Encoding):
    title = "FIRE"
    formula = "f_h(ln(1 + |c d|) / ln(1 + |c| max(L, i))), f a two-layer ReLU network"
    paper = "https://arxiv.org/abs/2310.04418"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        width: int = 32,
        length: int = 512,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(width >= 1, f"width must be at least 1, not {width}")
        self.require(1 <= length < 1 << 31, f"length must be from 1 to 2147483647, not {length}")
        self.length = length
        self.inner = nn.Linear(1, width)
        self.outer = nn.Linear(width, heads)
        self.c = nn.Parameter(torch.empty(1))  # [1], not []: fully_shard takes no scalar
        self.multiplier = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        for linear in (self.inner, self.outer):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.multiplier)

    def pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """Knots [K] and per head the slope and offset of f between them, [H, K + 1]."""
        w, b = wide(self.inner.weight)[:, 0], wide(self.inner.bias)
        with torch.no_grad():
            # Only far out of reach (u is near [0, 1]) may a knot be moved: f must be continuous at every other. Where
            # w is 0 there is none, and it may be put anywhere.
            knots = (-b / w).nan_to_num(0.0).clamp(-1e4, 1e4).sort().values
            middle = (pad(knots, (1, 0), value=-3e4) + pad(knots, (0, 1), value=3e4)) / 2  # of each piece
            active = (middle[:, None] * w + b > 0).to(w.dtype)  # [K + 1, width]
        # Sums, not products of matrices: those TF32 would round, and in a compiled backward pass autocast, whatever is
        # said here.
        out = wide(self.outer.weight)[:, None]
        slope, offset = (out * (active * w)).sum(-1), (out * (active * b)).sum(-1)
        return knots, slope, offset + wide(self.outer.bias)[:, None]

    def terms(self, ctx: Context) -> list[Term]:
        rate = wide(self.c).abs()
        limit = (wide(self.multiplier) * self.length).abs()
        positions = ctx.layout.q_positions().to(rate.dtype)
        rho = (torch.log1p(rate * torch.maximum(limit, positions)) + EPS).reciprocal()
        return [Profile(rate, rho, *self.pieces())]
