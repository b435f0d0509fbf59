"""Inkling: a bank of distance profiles that each query mixes for itself, `(r_i @ P)[i - j]`, zero beyond the bank.

`r = x W`, W `[hidden_size, rank * H]` without bias, x the layer's input; P `[rank, length]` is shared by the heads.
Added after the scaling; drawn N(0, 0.02). Known from x-transformers (https://github.com/lucidrains/x-transformers) as
its relative projection; its factor that grows as ln(n) is left out. Causal only: the bank has no column for the future.
"""

from __future__ import annotations

import torch
from torch import nn

from relpos.encodings.base import Encoding, wide
from relpos.terms import Bank, Context, Term


class Inkling(Encoding):
    title = "Inkling"
    formula = "(r_i P)[d], r = x W; 0 for d >= 1024"
    paper = "https://github.com/lucidrains/x-transformers"
    bidirectional = False
    content = True

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        rank: int = 16,
        length: int = 1024,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(rank >= 1, f"rank must be at least 1, not {rank}")
        self.require(length >= 1, f"length must be at least 1, not {length}")
        self.rank, self.formula = rank, f"(r_i P)[d], r = x W; 0 for d >= {length}"
        self.mix = nn.Linear(hidden_size, rank * heads, bias=False)
        self.bank = nn.Parameter(torch.empty(rank, length))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mix.weight, std=0.02)
        nn.init.normal_(self.bank, std=0.02)

    @property
    def rows(self) -> nn.Module:
        return self.mix

    def terms(self, ctx: Context) -> list[Term]:
        assert ctx.hidden is not None
        mix = self.mix(ctx.hidden).unflatten(-1, (self.heads, self.rank)).transpose(1, 2)  # [B, H, Tq, rank]
        return [Bank(wide(mix), wide(self.bank))]
