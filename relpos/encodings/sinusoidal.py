"""Sinusoidal absolute positions: fixed sines and cosines added to the token embedding (https://arxiv.org/abs/1706.03762).

- `interleaved`, the paper: features 2t and 2t+1 are `sin` and `cos` of `p * 10000^(-2t/D)`;
- `halves`: all sines, then all cosines, same frequencies (GPT-NeoX);
- `tensor2tensor`: halves with the exponent `t / (D/2 - 1)` (tensor2tensor, fairseq; fairseq also counts positions from
  2, which is not done here).

The three are not interchangeable with each other's checkpoints. `scale` multiplies the vector: the code of the CABLE
paper has 0.1; models that multiply their embeddings by sqrt(D) have 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from relpos.encodings.base import Encoding, constant


class Sinusoidal(Encoding):
    title = "sinusoidal"
    formula = "x_i + scale * (sin(i w_t), cos(i w_t)), w_t = 10000^(-2t/D)"
    paper = "https://arxiv.org/abs/1706.03762"
    additive = False

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        scale: float = 1.0,
        layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved",
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(hidden_size % 2 == 0, f"hidden_size must be even to hold sines and cosines, not {hidden_size}")
        self.require(layout != "tensor2tensor" or hidden_size > 2, "layout=tensor2tensor needs a hidden_size above 2")
        self.scale, self.layout = scale, layout

    def frequencies(self) -> list[float]:
        half = self.hidden_size // 2
        last = half - 1 if self.layout == "tensor2tensor" else half
        return [10000.0 ** (-t / last) for t in range(half)]

    def embed(self, positions: Tensor) -> Tensor:
        w = constant(self.frequencies(), torch.float32, positions.device)
        angles = positions[..., None].to(w.dtype) * w
        parts = (angles.sin(), angles.cos())
        vector = torch.stack(parts, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(parts, -1)
        return vector * self.scale
