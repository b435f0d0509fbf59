"""FoX, the forgetting transformer: `sum_{l=j+1..i} ln f_l`, `f = sigmoid(x W + b)` (https://arxiv.org/abs/2503.02130).

As a potential: `S = cumsum(-ln f)`, bias `-(S_i - S_j)`. Causal only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from relpos.encodings.base import Encoding, running_sum, wide
from relpos.terms import Context, Layout, Potential, Term


class Fox(Encoding):
    title = "FoX"
    formula = "sum of ln f_l for l = j+1..i, f = sigmoid(x W + b)"
    paper = "https://arxiv.org/abs/2503.02130"
    bidirectional = False
    content = True
    decode_state = "running sum of -ln f, one float32 per key and head"

    def __init__(self, *, heads: int, head_dim: int, hidden_size: int, share: bool = False):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.forget = nn.Linear(hidden_size, heads)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.forget.weight, std=0.02)
        nn.init.zeros_(self.forget.bias)

    def key_state(self, hidden: Tensor, layout: Layout, past: Tensor | None = None) -> Tensor:
        return running_sum(-F.logsigmoid(wide(self.forget(hidden))).transpose(1, 2), layout, past)

    def terms(self, ctx: Context) -> list[Term]:
        assert ctx.state is not None
        return [Potential(ctx.q_state(), ctx.state)]
