"""Learned absolute positions: row `p` of a trained table is added to the token embedding at position p (GPT-2, BERT).

Initial values N(0, 0.02), as in Hugging Face's GPT-2 (OpenAI's own weights were drawn with 0.01: `std=0.01`). There is
nothing beyond the table, so a longer text is an error: it neither wraps around nor clamps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.encodings.base import Encoding
from relpos.errors import UserError
from relpos.terms import Layout


class Learned(Encoding):
    title = "learned"
    formula = "x_i + table[i]"
    paper = "https://arxiv.org/abs/1810.04805"
    additive = False

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        max_positions: int = 1024,
        std: float = 0.02,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(max_positions >= 1, f"max_positions must be at least 1, not {max_positions}")
        self.require(std >= 0, f"std must not be negative, not {std}")
        self.max_positions, self.std = max_positions, std
        self.table = nn.Parameter(torch.empty(max_positions, hidden_size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def _too_long(self, length: int) -> UserError:
        return UserError(
            f"learned has {self.max_positions} positions and the text needs {length}: shorten it to "
            f"{self.max_positions} tokens, train with learned:max_positions={length}, or use one without a table "
            "(alibi, rope, ...)"
        )

    def checks(self, layout: Layout, dtype: torch.dtype) -> None:
        super().checks(layout, dtype)
        # Packed documents, explicit positions and padding say nothing of the largest position without reading values,
        # which `embed` does where it is cheap; on a GPU better no padding than an index that stops the process.
        mask = layout.key_padding_mask
        seen = mask is not None and mask.device.type == "cpu" and not torch.compiler.is_compiling()
        if layout.cu_seqlens is None and layout.positions is None and not seen and layout.Tk > self.max_positions:
            raise self._too_long(layout.Tk)

    def embed(self, positions: Tensor) -> Tensor:
        # On a CPU a look at the values is cheap, and better than "index out of range in self".
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            first, last = (int(x) for x in positions.aminmax())
            if first < 0:
                raise UserError(f"learned has positions from 0 on, not {first}")
            if last >= self.max_positions:
                raise self._too_long(last + 1)
        return F.embedding(positions, self.table)
