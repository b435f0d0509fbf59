"""GPT-2 as plain PyTorch writes it, the peer of a training step: scaled_dot_product_attention without any bias, learned
positions, no biases in its layers, and a vocabulary padded to a multiple of 64. The choices are those of nanoGPT
(https://github.com/karpathy/nanoGPT); the code is not."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Result(NamedTuple):
    loss: Tensor


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class PlainGPT2(nn.Module):
    def __init__(self, length: int, vocab_size: int, width: int, layers: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size + -vocab_size % 64, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if "project" in name or "down" in name else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.last(x), self.tokens.weight)
        return Result(F.cross_entropy(logits.flatten(0, 1), F.pad(labels[:, 1:], (0, 1), value=-100).flatten()))
