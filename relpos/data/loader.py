"""Token windows as a map-style dataset whose order is a pure function of the seed: `example k = f(seed, k)`.

A split is cut into windows of `length` tokens. Epoch e reads all windows in an order of its own: a Feistel network
over the window numbers, keyed by (seed, e), which is a permutation that needs neither memory nor state (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: cycle-walking). So step s of a run reads the same examples
whether the run was interrupted or not and however many processes share the batch: process r of W takes every W-th
batch, and no two take the same example of an epoch.

With `documents=True` the rows of a batch are laid end to end as one row with `cu_seqlens`, borders at the start of
every window and of every document, so attention does not cross them. `cu_seqlens` always has the same length (padded
with empty documents at the end): fixed shapes compile once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from relpos.data.shards import TokenStream
from relpos.errors import UserError

IGNORE = -100  # the label that the loss leaves out


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where `index` (int64, each in [0, n)) goes under the permutation of range(n) that `key` names."""
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    with np.errstate(over="ignore"):
        keys = _mix(np.uint64(key & (2**64 - 1)) + np.arange(1, 7, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        out = np.array(index, dtype=np.uint64)
        todo = np.ones(out.shape, dtype=bool)
        while todo.any():  # walk until the value falls into range; the domain is less than 4n
            left, right = out[todo] >> half, out[todo] & mask
            for k in keys:
                left, right = right, left ^ (_mix(right + k) & mask)
            out[todo] = (left << half) | right
            todo[todo] = out[todo] >= n
    return out.astype(np.int64)


class Windows(Dataset[dict[str, Any]]):
    """`count` examples of `length` tokens each. `shuffle=False` reads the windows in order (validation)."""

    def __init__(
        self,
        stream: TokenStream,
        length: int,
        *,
        seed: int = 0,
        count: int | None = None,
        shuffle: bool = True,
        documents: bool = False,
    ):
        self.stream, self.length, self.seed, self.shuffle = stream, length, seed, shuffle
        if length < 2:
            raise UserError(f"a window needs at least 2 tokens, not {length}")
        self.windows = len(stream) // length
        if self.windows < 1:
            raise UserError(
                f"the data holds {len(stream)} tokens, fewer than one window of {length}; shorten --length or add text"
            )
        self.count = self.windows if count is None else count
        self.starts = stream.starts if documents else None

    def __len__(self) -> int:
        return self.count

    def order(self, examples: np.ndarray) -> np.ndarray:
        """The window that each example reads."""
        epochs, within = np.divmod(np.asarray(examples, dtype=np.int64), self.windows)
        if not self.shuffle:
            return within
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            at = epochs == epoch
            # Two 32-bit halves: no epoch of one seed is an epoch of another.
            out[at] = permute(within[at], self.windows, ((self.seed & 0xFFFFFFFF) << 32) | (int(epoch) & 0xFFFFFFFF))
        return out

    def __getitem__(self, example: int) -> dict[str, Any]:
        return self.__getitems__([example])[0]

    def __getitems__(self, examples: list[int]) -> list[dict[str, Any]]:
        rows = []
        for example, window in zip(examples, self.order(np.asarray(examples)), strict=True):
            begin = int(window) * self.length
            row: dict[str, Any] = {"input_ids": torch.from_numpy(self.stream.read(begin, self.length))}
            row["example"] = example
            if self.starts is not None:
                low, high = np.searchsorted(self.starts, [begin + 1, begin + self.length])
                row["starts"] = torch.from_numpy(self.starts[low:high] - begin)
            rows.append(row)
        return rows

    def borders(self) -> int:
        """The most documents that begin inside one window: how long `cu_seqlens` can get."""
        assert self.starts is not None
        inside = self.starts[(self.starts % self.length != 0) & (self.starts < self.windows * self.length)]
        return int(np.bincount(inside // self.length).max()) if len(inside) else 0


def collate(rows: list[dict[str, Any]], borders: int | None = None) -> dict[str, torch.Tensor]:
    """A batch for a causal model: `input_ids` and `labels` [B, T]. With `borders` (the most per window), packed:
    [1, B*T] and `cu_seqlens` [B * (borders + 1) + 1], int32. The first token of a document has no label: nothing
    precedes it."""
    ids = torch.stack([row["input_ids"] for row in rows])
    if borders is None:
        return {"input_ids": ids, "labels": ids.clone()}
    B, T = ids.shape
    zero = torch.zeros(1, dtype=torch.int64)
    starts = torch.cat([torch.cat([zero, row["starts"]]) + i * T for i, row in enumerate(rows)])
    flat = ids.reshape(1, B * T)
    labels = flat.clone()
    labels[0, starts] = IGNORE
    cu_seqlens = torch.full((B * (borders + 1) + 1,), B * T, dtype=torch.int32)
    cu_seqlens[: len(starts)] = starts.to(torch.int32)
    return {"input_ids": flat, "labels": labels, "cu_seqlens": cu_seqlens}


def masked(
    ids: torch.Tensor, *, mask: int, vocab_size: int, generator: torch.Generator, probability: float = 0.15
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels for masked language modelling (BERT: of the 15% chosen, 80% masked, 10% random, 10% left)."""
    chosen = torch.rand(ids.shape, generator=generator) < probability
    kind = torch.rand(ids.shape, generator=generator)
    random = torch.randint(vocab_size, ids.shape, generator=generator)
    labels = torch.where(chosen, ids, IGNORE)
    ids = torch.where(chosen & (kind < 0.8), mask, ids)
    return torch.where(chosen & (kind >= 0.9), random, ids), labels


class MaskedRows:
    """Collates for an encoder. What is masked is a function of the seed and the example, as its text is."""

    def __init__(self, *, mask: int, vocab_size: int, seed: int, borders: int | None = None):
        self.mask, self.vocab_size, self.seed, self.borders = mask, vocab_size, seed, borders

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        inputs, labels = [], []
        for row in rows:
            key = _mix(np.asarray([((self.seed & 0xFFFFFFFF) << 32) ^ int(row["example"])], dtype=np.uint64))
            generator = torch.Generator().manual_seed(int(key[0]) >> 1)
            one = masked(row["input_ids"], mask=self.mask, vocab_size=self.vocab_size, generator=generator)
            inputs.append(row | {"input_ids": one[0]})
            labels.append(one[1])
        batch = collate(inputs, self.borders)
        return batch | {"labels": torch.stack(labels).reshape(batch["input_ids"].shape)}
