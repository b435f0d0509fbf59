"""Sandwich: `(sum_t cos(d / 10000^(2t/D)) - D/2) / (8h/H)`, t = 0 .. D/2 - 1 (https://arxiv.org/abs/2212.10356).

The inner product of two sinusoidal embeddings as a bias: no parameters, oscillating, strongest in the first head
(divided by 8/H) and weakest in the last (by 8). D is `dim`, 128, whatever the model's size. NeMo sums t = 1 .. D/2.
The constant `-D/2` cancels in the softmax and makes the bias 0 at distance 0.
"""

from __future__ import annotations

from torch import Tensor

from relpos.encodings.base import DistanceEncoding, constant


class Sandwich(DistanceEncoding):
    title = "Sandwich"
    formula = "H / (8h) * sum_t (cos(d 10000^(-2t/128)) - 1)"
    paper = "https://arxiv.org/abs/2212.10356"

    def __init__(self, *, heads: int, head_dim: int, hidden_size: int, dim: int = 128, share: bool = False):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(2 <= dim <= 1 << 16 and dim % 2 == 0, f"dim must be even and from 2 to 65536, not {dim}")
        self.dim, self.formula = dim, f"H / (8h) * sum_t (cos(d 10000^(-2t/{dim})) - 1)"

    def by_distance(self, d: Tensor) -> Tensor:
        w = constant([10000.0 ** (-2 * t / self.dim) for t in range(self.dim // 2)], d.dtype, d.device)
        strength = constant([self.heads / (8 * h) for h in range(1, self.heads + 1)], d.dtype, d.device)
        return strength.view(-1, *[1] * d.dim()) * ((d[..., None] * w).cos() - 1).sum(-1)
