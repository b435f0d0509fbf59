"""DAPE: a small network over all heads bends an additive bias by the scores it meets (https://arxiv.org/abs/2405.14722).

With A the scaled scores and B the bias of any additive encoding, `A + B + f([A; B])`. Version 1: f sees one cell,
Linear(2H, width), LeakyReLU, Linear(width, H). Version 2 (https://arxiv.org/abs/2410.04798): both layers are
1 x `kernel` convolutions along the keys. A linear map of one cell is a convolution of width 1, so one code does both.

Version 2 zeroes masked and padded cells before each convolution. The authors do so before the first only, and at the
end of a row the second then reads their hidden units; here a row is the same whether its later keys exist yet or not,
so cached decoding equals the full pass. Padding inside a text (a hole in the mask) still parts its neighbours.
The base lives inside, so it is shared across layers only if the whole is. `dape:version=2,base=kerple:form=power`.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.encodings.base import Encoding
from relpos.terms import Context, Layout, Rotation, Term, full_precision


class DAPE(Encoding):
    title = "DAPE"
    formula = "b_ij + f([q_i . k_j / sqrt(D); b_ij]), f a two-layer network over the heads, b the bias of the base"
    paper = "https://arxiv.org/abs/2405.14722"
    rescores = True

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        version: Literal[1, 2] = 1,
        width: int = 32,
        kernel: int = 3,
        share: bool = False,
        base: str = "kerple",
    ):
        from relpos.encodings import build  # the registry imports this file

        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.require(width >= 1, f"width must be at least 1, not {width}")
        self.require(kernel >= 1 and kernel % 2 == 1, f"kernel must be odd, so that a cell has a middle, not {kernel}")
        self.base = build(base, heads=heads, head_dim=head_dim, hidden_size=hidden_size, reset=False)
        self.require(
            self.base.additive and not self.base.rescores,
            f"the base must add a bias of its own to the scores, such as kerple, alibi or cable; {base} "
            + ("rescores them itself" if self.base.rescores else "adds none"),
        )
        # What a model asks an encoding about is the base's to answer.
        self.bidirectional = self.base.bidirectional
        self.content = self.base.content
        self.decode_state = self.base.decode_state
        self.version = version
        k = kernel if version == 2 else 1
        self.inner = nn.Conv2d(2 * heads, width, (1, k), padding=(0, k // 2))
        self.outer = nn.Conv2d(width, heads, (1, k), padding=(0, k // 2))

    def reset_parameters(self) -> None:
        self.base.reset_parameters()
        self.inner.reset_parameters()
        self.outer.reset_parameters()

    @property
    def stateful(self) -> bool:
        return self.base.stateful

    def checks(self, layout: Layout, dtype: torch.dtype) -> None:
        self.base.checks(layout, dtype)  # first: where the base is causal only, it is the one to name
        super().checks(layout, dtype)

    def rotate(self, ctx: Context) -> Rotation | None:
        return self.base.rotate(ctx)

    def terms(self, ctx: Context) -> list[Term]:
        return self.base.terms(ctx)

    def key_state(self, hidden: Tensor, layout: Layout, past: Tensor | None = None) -> Tensor | None:
        return self.base.key_state(hidden, layout, past)

    def rescore(self, scores: Tensor, bias: Tensor, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        def convolve(layer: nn.Conv2d, cells: Tensor) -> Tensor:
            if self.version == 2:
                cells = cells.masked_fill(~allowed, 0.0)
            assert layer.bias is not None
            with full_precision(cells):
                return F.conv2d(cells, layer.weight.to(cells.dtype), layer.bias.to(cells.dtype), padding=layer.padding)

        both = torch.cat((scores, bias.to(scores.dtype).expand_as(scores)), 1)
        return scores + bias + convolve(self.outer, F.leaky_relu(convolve(self.inner, both), 0.01))
