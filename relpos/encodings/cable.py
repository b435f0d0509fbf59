"""CABLE: context-aware biases from running sums of learned steps (https://arxiv.org/abs/2503.08067).

With x the layer's input (after the layer norm), per head:
- `weighted` (the paper's CABLE): step `a = relu(x W_c + b_c)`, `S = cumsum(a)`, gate `g = softplus(x W_s + b_s)`,
  bias `-g_i (S_i - S_j)`;
- `unweighted` (CABLE_NW): the same without the gate;
- `kernel` (K-CABLE): `-g_i ln((S_i - S_j)^2 + 1)`;
- `softplus` (first release): `-(S_i - S_j)` with softplus steps.

The paper's equations carry a plus sign; its text and all of its code penalise distance, and so do we. Bidirectional:
`|S_i - S_j|`, sums from left to right, gate of the query. Projections have biases, as in the authors' code.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.encodings.base import Encoding, running_sum, wide
from relpos.terms import Context, Layout, Potential, Term

STEPS, GATE = "S = cumsum relu(x W_c + b_c)", "g = softplus(x W_s + b_s)"
FORMULAS = {
    "weighted": f"-g_i |S_i - S_j|, {STEPS}, {GATE}",
    "unweighted": f"-|S_i - S_j|, {STEPS}",
    "kernel": f"-g_i ln((S_i - S_j)^2 + 1), {STEPS}, {GATE}",
    "softplus": "-|S_i - S_j|, S = cumsum softplus(x W_c + b_c)",
}


class Cable(Encoding):
    title = "CABLE"
    formula = FORMULAS["weighted"]
    paper = "https://arxiv.org/abs/2503.08067"
    content = True

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        form: Literal["weighted", "unweighted", "kernel", "softplus"] = "weighted",
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.form, self.formula = form, FORMULAS[form]
        self.step = nn.Linear(hidden_size, heads)
        self.gate = nn.Linear(hidden_size, heads) if form in ("weighted", "kernel") else None
        gated = "S_j and g_j, two float32 per key and head"
        self.decode_state = "S_j, one float32 per key and head" if self.gate is None else gated

    def reset_parameters(self) -> None:
        for linear in (self.step, self.gate):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)

    def key_state(self, hidden: Tensor, layout: Layout, past: Tensor | None = None) -> Tensor:
        """S of every head, and where there are gates these behind them: one product gives both."""
        linears = [linear for linear in (self.step, self.gate) if linear is not None]
        if all(type(linear) is nn.Linear for linear in linears):
            weight, bias = torch.cat([x.weight for x in linears]), torch.cat([x.bias for x in linears])
            z = F.linear(hidden, weight, bias)
        else:  # adapted or quantized
            z = torch.cat([linear(hidden) for linear in linears], -1)
        z = wide(z).transpose(1, 2)
        # Contiguous, because compiled code expects the gradient of softplus to be laid out as its input.
        steps, gates = z[:, : self.heads].contiguous(), z[:, self.heads :].contiguous()
        steps = F.softplus(steps) if self.form == "softplus" else F.relu(steps)
        total = running_sum(steps, layout, None if past is None else past[:, : self.heads])
        return total if self.gate is None else torch.cat([total, F.softplus(gates)], 1)

    def terms(self, ctx: Context) -> list[Term]:
        assert ctx.state is not None
        query, gate = ctx.q_state().split(self.heads, 1) if self.gate is not None else (ctx.q_state(), None)
        return [Potential(query, ctx.state[:, : self.heads], gate, log=self.form == "kernel")]
