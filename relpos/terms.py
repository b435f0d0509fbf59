"""The few forms in which position reaches an attention kernel, as plain data.

An encoding says *what* it adds to the scores by returning terms; the attention code adds them without ever knowing
which encoding they came from. Shapes: B batch, H heads, Tq queries, Tk keys; a leading 1 broadcasts over the batch.
`d = position(query) - position(key)`, so the past is positive. All tensors are float32 whatever the model's dtype
(a bfloat16 cannot tell token 257 from token 256), or float64 in a float64 model.

| term      | adds to score (i, j) of head h                                            |
|-----------|---------------------------------------------------------------------------|
| Slope     | `-m_h |d|`                                                                |
| Distance  | `values[h, clamp(origin + d)]`: the first and last value go on for ever   |
| Potential | `-g_i |S_i - S_j|`, or with `log` `-g_i ln((S_i - S_j)^2 + 1)`            |
| Profile   | a piecewise linear function of `u = psi(d) * rho_i`, where `psi` is       |
|           | `ln(1 + rate_h |d|)`, or with `power` `|d|^rate_h`                        |
| Bank      | `r_i @ bank[:, d]`, zero where d is outside the bank                      |

`Rotation` is not a term: it acts on q and k before they meet. `Layout` says which query sits where and may see what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Union

import torch
from torch import Tensor

from relpos.errors import UserError


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast off around the arithmetic of positions: it would run a float32 matrix product in bfloat16."""
    if x.device.type == "meta":  # which has none
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class Slope:
    slopes: Tensor  # [H]


@dataclass(frozen=True)
class Distance:
    values: Tensor  # [H, m]
    origin: int  # the column of `values` that holds distance 0; 0 in a causal model
    formula: Callable[[Tensor], Tensor] | None = None  # integer distances [...] -> [H, ...]: for positions with gaps


@dataclass(frozen=True)
class Potential:
    query: Tensor  # [B, H, Tq], S_i
    key: Tensor  # [B, H, Tk], S_j
    gate: Tensor | None = None  # [B, H, Tq], g_i; None means 1
    log: bool = False

    def rows(self, rows: slice) -> Potential:
        gate = None if self.gate is None else self.gate[:, :, rows]
        return replace(self, query=self.query[:, :, rows], gate=gate)


@dataclass(frozen=True)
class Profile:
    rate: Tensor  # [1 or H], >= 0
    rho: Tensor  # [1 or B, Tq], > 0; at the beginning of a row one value stands for one quantity, with one gradient
    knots: Tensor  # [K], K >= 0, ascending, without gradient: the function is continuous there
    slope: Tensor  # [H, K + 1]; on piece r, between knots r-1 and r, the value is offset[h, r] + slope[h, r] * u
    offset: Tensor  # [H, K + 1]
    power: bool = False  # without knots

    def psi(self, d: Tensor) -> Tensor:
        """At the distances d [...], [1 or H, ...]."""
        rate = self.rate.view(-1, *[1] * d.dim())
        if not self.power:
            return torch.log1p(rate * d.abs())
        # d = 0 gives 0 whatever the rate; keeping it out of pow keeps 0 * log 0 out of the gradient.
        return torch.where(d == 0, 0.0, d.abs().clamp(min=1).to(rate.dtype) ** rate)


@dataclass(frozen=True)
class Bank:
    query: Tensor  # [B, H, Tq, R]
    bank: Tensor  # [R, m], columns are distances 0 .. m-1


Term = Union[Slope, Distance, Potential, Profile, Bank]


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines, times any factor of the encoding, for the first `2 * R` features of q and k."""

    q_cos: Tensor  # [1 or B, Tq, R]
    q_sin: Tensor
    k_cos: Tensor  # [1 or B, Tk, R]
    k_sin: Tensor
    interleaved: bool = False  # pairs (2t, 2t+1); otherwise (t, t + R)


def check_borders(cu_seqlens: Tensor, length: int) -> None:
    """UserError for borders of documents that are none. Their values are read on the CPU alone, and not in a compiled
    model: elsewhere the host would wait for them."""
    if not whole(cu_seqlens) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise UserError(
            f"cu_seqlens must be one row of document borders, whole numbers from 0 to {length}, not "
            f"{list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] != length or sorted(borders) != borders:
            shown = f"{borders[:8]}{'...' if len(borders) > 8 else ''}"
            raise UserError(f"cu_seqlens must rise from 0 to {length}, the number of tokens; it is {shown}")


def check_devices(what: str, device: torch.device, **others: Any) -> None:
    """UserError for a tensor that is not where `what` is."""
    for name, x in others.items():
        if isinstance(x, Tensor) and x.device != device:
            raise UserError(f"{name} is on {x.device} and {what} on {device}: move one of them, .to({str(device)!r})")


def whole(x: Tensor) -> bool:
    """Whether it holds whole numbers."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


@dataclass(frozen=True)
class Layout:
    """Which query sits at which column of the keys, at which position, and which keys it may see.

    Column and position differ with left padding and packed documents: a position counts the real tokens of its own
    document. Nothing here reads a value of a tensor on the host, so a model that uses it compiles without a break.
    """

    Tq: int
    Tk: int
    device: torch.device
    causal: bool = True
    q_offset: int | Tensor | None = None  # column of query 0: int or [B]; None means Tk - Tq
    key_padding_mask: Tensor | None = None  # [B, Tk], True for real tokens
    cu_seqlens: Tensor | None = None  # [documents + 1], int: document borders over the columns, batch 1
    positions: Tensor | None = None  # [1 or B, Tk]: overrides the counted positions; distances may then have gaps
    window: int | None = None  # a query sees keys with |d| < window only
    first_length: int | None = None  # length of the call that began this cache; None means Tk

    @property
    def length(self) -> int:
        return self.Tk if self.first_length is None else self.first_length

    def columns(self) -> Tensor:
        """Column of each query, [1 or B, Tq]."""
        i = torch.arange(self.Tq, device=self.device)
        offset = self.Tk - self.Tq if self.q_offset is None else self.q_offset
        return i[None] + (offset[:, None] if isinstance(offset, Tensor) else offset)

    def at_queries(self, per_key: Tensor) -> Tensor:
        """The entries of `per_key` [1 or B, ..., Tk] that belong to the queries, [1 or B, ..., Tq]."""
        if not isinstance(self.q_offset, Tensor):
            start = self.Tk - self.Tq if self.q_offset is None else self.q_offset
            return per_key[..., start : start + self.Tq]
        columns = self.columns()
        columns = columns.view(columns.shape[0], *[1] * (per_key.dim() - 2), self.Tq)
        rows = max(columns.shape[0], per_key.shape[0])
        return per_key.expand(rows, *per_key.shape[1:]).gather(-1, columns.expand(rows, *per_key.shape[1:-1], -1))

    def documents(self) -> Tensor | None:
        """Document number of each key column, [1, Tk]; None without packing."""
        if self.cu_seqlens is None:
            return None
        columns = torch.arange(self.Tk, device=self.device, dtype=self.cu_seqlens.dtype)
        return torch.bucketize(columns, self.cu_seqlens, right=True)[None]

    def k_positions(self) -> Tensor:
        """Position of each key, [1 or B, Tk], int64."""
        if self.positions is not None:
            return self.positions.long()
        columns = torch.arange(self.Tk, device=self.device)[None]
        documents = self.documents()
        if documents is not None and self.cu_seqlens is not None:
            return columns - self.cu_seqlens.long()[documents - 1]
        if self.key_padding_mask is not None:
            return (self.key_padding_mask.long().cumsum(-1) - 1).clamp(min=0)
        return columns

    def q_positions(self) -> Tensor:
        return self.at_queries(self.k_positions())

    @property
    def plain(self) -> bool:
        """Whether every position is its column and all rows of the batch are alike."""
        given = (self.key_padding_mask, self.cu_seqlens, self.positions)
        return all(x is None for x in given) and not isinstance(self.q_offset, Tensor)

    def distances(self, rows: slice | None = None, keys: int | None = None) -> Tensor:
        """[1 or B, q, keys], int64: some rows of queries and the first `keys` keys, all by default."""
        rows = rows or slice(None)
        return self.q_positions()[:, rows, None] - self.k_positions()[:, None, :keys]

    def allowed(self, rows: slice | None = None, keys: int | None = None) -> Tensor:
        """[1 or B, q, keys], True where the query may see the key. The row of a padded query is False throughout."""
        rows = rows or slice(None)
        columns = torch.arange(self.Tk, device=self.device)[:keys]
        own = self.columns()[:, rows, None]
        ok = columns[None, None] <= own if self.causal else (columns[None, None] >= 0).expand(1, own.shape[1], -1)
        if self.key_padding_mask is not None:
            real = self.key_padding_mask.bool()
            ok = ok & real[:, None, :keys] & self.at_queries(real)[:, rows, None]
        documents = self.documents()
        if documents is not None:
            ok = ok & (documents[:, None, :keys] == self.at_queries(documents)[:, rows, None])
        if self.window is not None:
            ok = ok & (self.distances(rows, keys).abs() < self.window)
        return ok


@dataclass(frozen=True)
class Context:
    """What an encoding may look at when it builds its terms or its rotation."""

    layout: Layout
    hidden: Tensor | None = None  # [B, Tq, hidden_size]: the layer's input at the query rows
    state: Tensor | None = None  # [B, S, Tk] float32: what `Encoding.key_state` gave for every key
    dtype: torch.dtype = torch.float32  # float32, or float64 in a float64 model: what positions are computed in

    def q_state(self) -> Tensor:
        """The state at the query rows, [B, S, Tq]."""
        assert self.state is not None
        return self.layout.at_queries(self.state)
