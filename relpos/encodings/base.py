"""What an encoding is: a formula, its parameters, and at most four hooks that say where position enters.

An encoding overrides the fewest hooks it can. Options are the keyword-only arguments of its constructor, typed and with
defaults; the registry reads them from the signature to parse `"name:option=value"`, to check and to list them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from relpos.errors import UserError
from relpos.terms import Context, Distance, Layout, Rotation, Term


class Encoding(nn.Module):
    """Base of all encodings. Every hook's default does nothing.

    Initial values are drawn in `reset_parameters()`, never in `__init__`, so that a model can be built on the meta
    device. Nothing is kept in buffers: `.bfloat16()` would round them.
    """

    name: ClassVar[str]  # the stem of the file, set by the registry
    title: ClassVar[str] = ""  # how the name is written in text, "ALiBi"
    formula: str = ""  # one line, with i the query, j the key, d = i - j; an option may change it
    paper: ClassVar[str] = ""  # address
    bidirectional: bool = True  # False: causal only, anything else is an error
    additive: ClassVar[bool] = True  # False: there is no bias to draw (rotations, embeddings)
    content: bool = False  # True: terms depend on the hidden state, so they are built in every layer
    decode_state: str = "none"  # what a cache holds for it beside K and V

    def __init__(self, *, heads: int, head_dim: int, hidden_size: int, share: bool = False):
        super().__init__()
        self.heads, self.head_dim, self.hidden_size, self.share = heads, head_dim, hidden_size, share

    def reset_parameters(self) -> None:
        """Draw the initial values of the encoding's own parameters."""

    # The four hooks.

    def embed(self, positions: Tensor) -> Tensor | None:
        """A vector added to the token embedding at integer `positions` [...]: [..., hidden_size]."""
        return None

    def rotate(self, ctx: Context) -> Rotation | None:
        """How q and k are turned before they meet."""
        return None

    def terms(self, ctx: Context) -> list[Term]:
        """What is added to the scores after the scaling and before the mask and softmax."""
        return []

    rescores: ClassVar[bool] = False  # True where `rescore` is overridden

    def rescore(self, scores: Tensor, bias: Tensor, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        """New scores from whole rows of all heads: scaled `scores` [B,H,q,Tk] without the bias of the terms, that
        `bias` (broadcastable), the rows of q [B,H,q,D], k [B,H,Tk,D] and `allowed` (broadcastable bool)."""
        return scores + bias

    # State of content-aware encodings.

    def key_state(self, hidden: Tensor, layout: Layout, past: Tensor | None = None) -> Tensor | None:
        """Per-key float32 state [B, S, T] of the tokens in `hidden` [B, T, hidden_size]; `past` is the state of the
        tokens before them. `layout` is that of all keys, of which these are the last T. Returned, never kept."""
        return None

    @property
    def stateful(self) -> bool:
        """Whether `key_state` gives something, which a cache must then hold."""
        return type(self).key_state is not Encoding.key_state

    def checks(self, layout: Layout, dtype: torch.dtype) -> None:
        """Raise UserError where this encoding cannot serve such a call (a table too short, say). `dtype` is q's."""
        if not layout.causal and not self.bidirectional:
            raise UserError(f"{self.name} is defined for causal attention only; use a causal model or another encoding")

    @property
    def rows(self) -> nn.Module | None:
        """The linear layer whose output for the layer's input, unchanged, is the rows of its `Bank`: all profiles of
        head 0, then those of head 1. Attention may then compute them beside q, k and v, and never see the `Bank`'s."""
        return None

    # What people ask of it.

    def require(self, ok: bool, message: str) -> None:
        """For a constructor: an option out of range is the user's mistake."""
        if not ok:
            raise UserError(f"{getattr(self, 'name', type(self).__name__)}: {message}")

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}"

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


class DistanceEncoding(Encoding):
    """A bias that depends on the distance alone: give `by_distance`."""

    reach: int | None = None  # the bias is constant from this distance on; None: it never is

    def by_distance(self, d: Tensor) -> Tensor:
        """Bias at the whole distances `d` [...], future negative, as float32 (float64 in a float64 model): [H, ...]."""
        raise UserError(f"{self.name}: its class {type(self).__name__} must define by_distance(self, d)")

    def terms(self, ctx: Context) -> list[Term]:
        layout = ctx.layout
        n = layout.Tk if self.reach is None else min(layout.Tk, self.reach + 1)
        origin = 0 if layout.causal else n - 1

        def formula(d: Tensor) -> Tensor:
            values = self.by_distance(d.to(ctx.dtype))
            wanted = (self.heads, *d.shape)
            if not isinstance(values, Tensor) or values.shape != wanted:
                found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserError(f"{self.name}: by_distance must give [heads, ...] = {list(wanted)}, not {found}")
            return values

        return [Distance(formula(torch.arange(-origin, n, device=layout.device)), origin, formula)]


def running_sum(steps: Tensor, layout: Layout, past: Tensor | None = None) -> Tensor:
    """Float32 cumulative sum of `steps` [B, S, T] along the tokens: padded tokens add nothing, and the sum goes on
    from the last column of `past` and starts anew in every packed document. The first token's own step counts."""
    T = steps.shape[-1]
    if layout.key_padding_mask is not None:
        steps = steps * layout.key_padding_mask[:, None, layout.Tk - T :].to(steps.dtype)
    if layout.cu_seqlens is None:
        total = steps.cumsum(-1)
        return total if past is None else total + past[..., -1:].to(total.dtype)
    # One long float32 sum over many documents would lose the low digits of the later ones.
    total = steps.double().cumsum(-1)
    documents = layout.documents()
    assert documents is not None
    starts = layout.cu_seqlens.long()[documents - 1]  # [1, T]: the column where each token's document begins
    before = torch.cat([torch.zeros_like(total[..., :1]), total], -1).gather(
        -1, starts[:, None].expand(*total.shape[:2], T)
    )
    return (total - before).to(steps.dtype)


@functools.lru_cache(maxsize=256)
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could not serve training later
        return torch.tensor(values, dtype=dtype, device=device)


def constant(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A short tensor of numbers that are the same in every call, not to be written to. It is kept: sending it to a GPU
    would make the host wait for all that is queued there."""
    values = tuple(values)
    if torch.compiler.is_compiling() or device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return _kept(values, dtype, device)


def wide(x: Tensor) -> Tensor:
    """At least float32: the precision positions and biases are computed in."""
    return x if x.dtype == torch.float64 else x.float()
