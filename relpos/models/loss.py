"""Cross entropy straight from the hidden states: `-log softmax(h W^T + b)[target]`, a few rows at a time.

The logits of 32k tokens over 50k words are 6 GB in float32 and their gradient as much again; here only the rows of one
chunk exist. The gradient of a chunk is at hand as soon as its softmax is, so it is computed in the forward pass and
nothing is computed twice (the idea of Liger-Kernel's fused linear cross entropy, https://arxiv.org/abs/2410.10989).
Exact: the numbers are those of the plain loss up to the order of the sums, which are float32 whatever the dtype of the
matmuls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.errors import once
from relpos.models import softmax

IGNORE = -100  # the label of a token that does not count
CELLS = 1 << 26  # logits held at once: 256 MiB in float32, and a few temporaries of that size


def cells_for(memory: int) -> int:
    """CELLS for a GPU with so many bytes: at most 1/128 of their number, a power of two; a logit and its gradient take
    four bytes in 16 bits. A compiled step unrolls the chunks, so fewer of them compile faster, and each passes
    once over the gradient of the output matrix."""
    return max(1 << 26, 1 << (memory // 128).bit_length() - 1)


def shifted(labels: Tensor, documents: Tensor | None = None) -> Tensor:
    """The target of each token [B, T]: the label of the next one. The last token has none, and with `documents`
    [1, T] neither has the last of each document."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if documents is not None:
        ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1))
        targets = targets.masked_fill(ends, IGNORE)
    return targets


def plain_loss(logits: Tensor, targets: Tensor, items: Tensor | int | None) -> Tensor:
    """Mean, or sum over `items`, of the cross entropy of logits [..., V] in float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / _count(targets, items, total.device)


def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, items: Tensor | int | None
) -> Tensor:
    """The same from hidden states [..., D], an output matrix [V, D] and its bias [V], without the logits."""
    total = linear_cross_entropy(hidden, weight, bias, targets)
    return total / _count(targets, items, total.device)


def _count(targets: Tensor, items: Tensor | int | None, device: torch.device) -> Tensor | int:
    """What the sum is divided by: the trainer's count over all processes and accumulation steps, or our own."""
    if items is None:
        return (targets != IGNORE).sum().clamp(min=1)
    return items.to(device) if isinstance(items, Tensor) else items


def _flat(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Any, ...]:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return hidden.flatten(0, -2), weight, bias, targets.flatten()


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Rows of hidden [N, D] whose logits are held together."""
    step = max(1, CELLS // weight.shape[0])
    step -= step % 128 if step > 128 else 0  # whole tiles of a matmul
    # Written so that a compiled graph depends on the number of chunks and not on N.
    return [slice(n * step, (n + 1) * step) for n in range(-(-hidden.shape[0] // step))]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Sum of the cross entropy over all targets that are not IGNORE; differentiable once."""
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    return _LinearCrossEntropy.apply(*_flat(hidden, weight, bias, targets), grad)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Cross entropy of every target, float32 of the shape of `targets`; 0 where the target is IGNORE."""
    hidden, weight, bias, flat = _flat(hidden, weight, bias, targets)
    parts = [_chunk(hidden[rows], weight, bias, flat[rows])[0] for rows in _chunks(hidden, weight)]
    return torch.cat([hidden.new_zeros(0, dtype=torch.float32), *parts]).view(targets.shape)


def _chunk(
    h: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, *, grad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Losses [n] of one chunk and, if wanted, the gradient of its logits [n, V], in float32 or in the dtype of h."""
    logits = F.linear(h, weight, bias)
    if softmax.serves(logits):
        return softmax.rows(logits, t, IGNORE, grad=grad)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    lse = logits.logsumexp(-1)
    at = t.masked_fill(t == IGNORE, 0)[:, None]  # any other that is no word is an error
    losses = torch.where(t == IGNORE, 0.0, lse - logits.gather(-1, at)[:, 0])
    if not grad:
        return losses, None
    d = logits.sub_(lse[:, None]).exp_()  # softmax - one-hot
    d.scatter_add_(-1, at, torch.full_like(lse, -1.0)[:, None])
    return losses, d.masked_fill_((t == IGNORE)[:, None], 0.0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad: bool) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # Nothing that is saved is written in place: compiled by torch 2.11 it would be saved as it was before.
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_rows: list[Tensor] = []
        d_weight = torch.zeros_like(weight, dtype=wide) if grad else None
        d_bias = torch.zeros_like(bias, dtype=wide) if grad and bias is not None else None
        for rows in _chunks(hidden, weight):
            h, t = hidden[rows], targets[rows]
            losses, d = _chunk(h, weight, bias, t, grad=grad)
            total = total + losses.sum()
            if d_weight is not None and d is not None:
                if d_bias is not None:
                    d_bias = d_bias + d.sum(0, dtype=wide)
                d = d.to(h.dtype)
                d_rows.append(d @ weight)
                d_weight = d_weight + d.T @ h
        ctx.save_for_backward(torch.cat(d_rows) if d_rows else None, d_weight, d_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        once("the loss without logits", "skip_logits=False has one")
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        return (
            (d_hidden * g).to(d_hidden.dtype),
            (d_weight * g).to(of_weight),
            None if d_bias is None else (d_bias * g).to(of_bias),
            None,
            None,
        )


__all__ = ["IGNORE", "chunked_loss", "linear_cross_entropy", "plain_loss", "shifted", "token_losses"]
