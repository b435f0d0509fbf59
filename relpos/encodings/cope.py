"""CoPE, contextual positions: keys counted only as far as the query cares for them (https://arxiv.org/abs/2405.18719).

`g_ik = sigmoid(score_ik)`, `p_ij = sum of g_ik for k = j..i` (both ends counted), capped at `positions - 1`; the bias
is `q_i . e[p]`, interpolated between the two whole positions around p. q is not scaled there, as in the listing of the
paper. The table e is shared by all heads and starts at zero. Causal only: the count runs from the key to the query.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos.encodings.base import Encoding, wide
from relpos.terms import full_precision


class CoPE(Encoding):
    title = "CoPE"
    formula = "q_i . e[p_ij], p_ij = sum of sigmoid(q_i . k_l / sqrt(D)) for l = j..i"
    paper = "https://arxiv.org/abs/2405.18719"
    bidirectional = False
    rescores = True

    def __init__(self, *, heads: int, head_dim: int, hidden_size: int, positions: int = 64, share: bool = False):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(positions >= 2, f"positions must be at least 2, not {positions}")
        self.positions = positions
        self.table = nn.Parameter(torch.empty(head_dim, positions))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def rescore(self, scores: Tensor, bias: Tensor, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        gates = torch.sigmoid(scores).masked_fill(~allowed, 0.0)
        # From the key to the end of the row; what lies behind the query is masked and counts nothing.
        counted = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.positions - 1)
        below = counted.detach().floor()
        index = below.nan_to_num(0).long()  # NaN goes on through `counted`, not through an index
        with full_precision(q):
            table = (wide(q) @ wide(self.table)).to(scores.dtype)  # [B, H, q, positions]
        low = table.gather(-1, index)
        high = table.gather(-1, (index + 1).clamp(max=self.positions - 1))
        return scores + bias + low + (high - low) * (counted - below)
