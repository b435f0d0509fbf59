"""The layers both families are made of: attention with a plan of positions, and the feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN

from relpos.attention import attend
from relpos.attention.fused import Packed, packs_rows
from relpos.attention.rotary import turn
from relpos.errors import UserError, nearest
from relpos.models.compiled import plain, takes
from relpos.models.config import RelPosConfig
from relpos.models.gelu import TanhGELU
from relpos.models.positions import Plan


def activation(name: str) -> nn.Module:
    if name not in ACT2FN:
        raise UserError(f"there is no activation {name!r}.{nearest(name, ACT2FN)}")
    return TanhGELU() if name in ("gelu_new", "gelu_pytorch_tanh") else ACT2FN[name]


class Attention(nn.Module):
    """Multi-head attention with q, k and v in one projection; grouped-query where there are fewer key heads."""

    def __init__(self, config: RelPosConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.head_dim = config.head_dim
        self.sizes = [n * config.head_dim for n in (config.num_attention_heads, config.kv_heads, config.kv_heads)]
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(
        self, hidden: Tensor, plan: Plan, cache: Cache | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, T, hidden_size] and, if needed, the weights [B, H, T, Tk]."""
        merged, weights = self.heads(hidden, plan, cache, need_weights)
        return self.out(merged), weights

    def heads(
        self, hidden: Tensor, plan: Plan, cache: Cache | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs side by side, before the last projection, and the weights."""
        qkv = self.qkv(hidden)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in qkv.split(self.sizes, -1))
        rotation, terms = plan.for_layer(hidden, None if cache is None else cache.layers[self.layer])
        packed = self._packed(hidden, qkv, plan.encoding.rows) if rotation is None and cache is None else None
        if rotation is not None:
            new = plan.layout.Tk - plan.layout.Tq  # the keys before it are cached as they were turned
            q = turn(q, rotation.q_cos, rotation.q_sin, rotation.interleaved)
            k = turn(k, rotation.k_cos[:, new:], rotation.k_sin[:, new:], rotation.interleaved)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        out = attend(
            q,
            k,
            v,
            terms,
            plan.layout,
            scale=self.config.scale,
            rescore=plan.encoding.rescore if plan.encoding.rescores else None,
            impl=self.config.impl,
            return_weights=need_weights,
            packed=packed,
        )
        out, weights = out if isinstance(out, tuple) else (out, None)
        return out.transpose(1, 2).flatten(2), weights

    def _packed(self, hidden: Tensor, qkv: Tensor, rows: nn.Module | None) -> Packed | None:
        """q, k and v in one tensor. For a compiled training step they are projected again, in a form whose gradients
        cost less: with the rows of a bank in the same product, and with a bias that leaves its gradient to attention.
        Of the two forms a compiled graph computes the one that is used."""
        if not torch.compiler.is_compiling():
            return None
        weight, bias = self.qkv.weight, self.qkv.bias
        if not (plain(self.qkv, nn.Linear) and takes(hidden, weight)):
            return Packed(qkv)
        still = None if bias is None else bias.detach()
        if isinstance(rows, nn.Linear) and plain(rows, nn.Linear) and rows.bias is None:
            size = rows.out_features
            if packs_rows(size // self.config.num_attention_heads):
                still = None if still is None else F.pad(still, (0, size))
                return Packed(F.linear(hidden, torch.cat([weight, rows.weight]), still), bias, rows=True)
        return Packed(F.linear(hidden, weight, still), bias)


class MLP(nn.Module):
    def __init__(self, config: RelPosConfig):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.inner_size, bias=config.bias)
        self.act = activation(config.hidden_act)
        self.out = nn.Linear(config.inner_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.features(hidden))

    def features(self, hidden: Tensor) -> Tensor:
        """What comes before the last projection."""
        if isinstance(self.act, TanhGELU):
            return self.act.behind(self.inner, hidden)
        return self.act(self.inner(hidden))


__all__ = ["MLP", "Attention", "activation"]
