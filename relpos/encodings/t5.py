"""T5's relative bias: one trained value per head and range of distances (https://arxiv.org/abs/1910.10683).

- `bucketed`: the distances below half of the buckets have one each, the rest share buckets that grow as a logarithm up
  to `max_distance`, and everything beyond shares the last one. A bidirectional model gives half of the buckets to the
  future. One table for all layers.
- `clipped`: `table[clamp(i - j, -clip, clip)]`, one table per layer: what the CABLE paper calls T5-bias.

Bucket borders are whole numbers found exactly in integers: a logarithm in floating point puts the distances 16, 32 and
64 of a bidirectional model one bucket too low on some devices. T5 itself does not divide scores by sqrt(D), so in its
terms the bias weighs more; `scale` multiplies it (GPT-NeoX: 8 for heads of 64). Initial values N(0, 0.02), the CABLE
paper's; T5 in Hugging Face draws with hidden_size^-0.5 (`std=0.036`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from relpos.encodings.base import Encoding, constant, wide
from relpos.errors import UserError
from relpos.terms import Context, Distance, Layout, Term


def borders(buckets: int, max_distance: int) -> list[int]:
    """First distance of the buckets 1, 2, ... of one direction.

    Bucket `exact + s` begins at the first n with `ln(n / exact) / ln(max_distance / exact) * (buckets - exact) >= s`,
    that is, in integers, `n^m exact^s >= max_distance^s exact^m` with m = buckets - exact. Such powers are slow for
    thousands of buckets, so they are taken only where floating point leaves more than one n.
    """
    exact = buckets // 2
    m = buckets - exact
    out = list(range(1, exact + 1))
    for s in range(1, m):
        about = exact * (max_distance / exact) ** (s / m)
        low, high = math.ceil(about * (1 - 1e-12)) - 1, math.ceil(about * (1 + 1e-12))  # the border lies in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            if middle**m * exact**s >= max_distance**s * exact**m:
                high = middle
            else:
                low = middle
        out.append(high)
    return out


class T5(Encoding):
    title = "T5 bias"
    formula = "table_h[bucket(d)], or table_h[clamp(d, -256, 256)]"
    paper = "https://arxiv.org/abs/1910.10683"

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        form: Literal["bucketed", "clipped"] = "bucketed",
        buckets: int = 32,
        max_distance: int = 128,
        clip: int = 256,
        scale: float = 1.0,
        std: float = 0.02,
        share: bool | None = None,
    ):
        share = form == "bucketed" if share is None else share
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.form, self.buckets, self.max_distance, self.clip = form, buckets, max_distance, clip
        self.scale, self.std = scale, std
        if form == "clipped":
            self.formula = f"table_h[clamp(d, -{clip}, {clip})]"
        self.require(buckets >= 2, f"buckets must be at least 2, not {buckets}")
        self.require(
            max_distance > buckets // 2,
            f"max_distance={max_distance} must be above {buckets // 2}, the distances that have a bucket of their own",
        )
        self.require(max_distance < 1 << 31, f"max_distance must be at most 2147483647, not {max_distance}")
        self.require(clip >= 1, f"clip must be at least 1, not {clip}")
        self.require(std >= 0, f"std must not be negative, not {std}")
        # Of a causal model, and of each direction of a bidirectional one.
        self.borders = {n: borders(n, max_distance) for n in (buckets, buckets // 2) if n >= 2}
        self.table = nn.Parameter(torch.empty(buckets if form == "bucketed" else 2 * clip + 1, heads))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def checks(self, layout: Layout, dtype: torch.dtype) -> None:
        super().checks(layout, dtype)
        if not layout.causal and self.form == "bucketed" and (self.buckets % 2 or self.buckets < 4):
            raise UserError(
                f"t5: a bidirectional model splits the buckets between past and future: their number must be even and "
                f"at least 4, not {self.buckets}"
            )

    def index(self, d: Tensor, causal: bool) -> Tensor:
        """Row of the table for the integer distances `d`."""
        if self.form == "clipped":
            return d.clamp(-self.clip, self.clip) + self.clip
        side = self.buckets if causal else self.buckets // 2
        first = constant(self.borders[side], torch.int64, d.device)
        if causal:
            return torch.bucketize(d.clamp(min=0), first, right=True)
        return torch.bucketize(d.abs(), first, right=True) + side * (d < 0)

    def terms(self, ctx: Context) -> list[Term]:
        layout = ctx.layout

        def formula(d: Tensor) -> Tensor:
            return (wide(self.table)[self.index(d, layout.causal)] * self.scale).movedim(-1, 0)

        if self.form == "clipped":
            reach = self.clip
        else:
            reach = self.borders[self.buckets if layout.causal else self.buckets // 2][-1]
        n = min(layout.Tk, reach + 1)
        origin = 0 if layout.causal else n - 1
        return [Distance(formula(torch.arange(-origin, n, device=layout.device)), origin, formula)]
