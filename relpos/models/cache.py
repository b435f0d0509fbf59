"""What decoding remembers: rotated keys and values, and beside them the encoding's own state.

transformers' `Cache` holds one layer object per model layer and calls reorder, repeat, select, crop and reset on each.
Ours carries the per-key state that `Encoding.key_state` returned (float32 whatever the model's dtype: a running sum in
bfloat16 stalls) through all of them. The first layer also keeps what belongs to the whole sequence: explicit
positions, and the length of the call that began the cache, from which some rope scalings choose their frequencies.

`generate` and users make a plain `DynamicCache`; `adopt` puts our layers into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from relpos.errors import UserError


class RelPosCacheLayer(DynamicLayer):
    """K and V [B, Hkv, T, D], `state` [B, S, T] or None, `positions` [B, T] or None, `first_length`. In an offloaded
    cache K and V travel; the state is a hundredth of their size and stays."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.state: Tensor | None = None
        self.positions: Tensor | None = None
        self.first_length: int | None = None

    def add_state(self, new: Tensor | None) -> Tensor | None:
        """Append the state of the new keys [B, S, t] and return that of all keys."""
        if new is not None:
            self.state = new if self.state is None else torch.cat([self.state, new.to(self.state.dtype)], -1)
        return self.state

    def _per_batch(self, act: Any) -> None:
        """Apply `act` to what has a batch dimension beside K and V."""
        self.state = None if self.state is None else act(self.state)
        self.positions = None if self.positions is None else act(self.positions)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._per_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._per_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._per_batch(lambda x: x[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        if not self.is_initialized:
            return
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        if length == 0:
            return self.reset()
        self._per_batch(lambda x: x[..., :length])

    def reset(self) -> None:
        """Forget everything. (The stock layer zeroes its keys and keeps its length: they would be attended to.)"""
        self.keys = self.values = self.state = self.positions = self.first_length = None
        self.is_initialized = False


def adopt(cache: Cache, layers: int) -> Cache:
    """Put our layers into an empty dynamic cache, in place. Any other kind of cache is an error."""
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise UserError(f"past_key_values must be a Cache such as transformers.DynamicCache(), not {type(cache)}")
    for index in range(layers):
        if index >= len(cache.layers):
            if not isinstance(cache, DynamicCache):
                break
            cache.layers.append(RelPosCacheLayer())
        layer = cache.layers[index]
        if isinstance(layer, RelPosCacheLayer):
            continue
        if type(layer) is not DynamicLayer or layer.is_initialized:
            break
        cache.layers[index] = RelPosCacheLayer()
    else:
        return cache
    raise UserError(
        f"{type(cache).__name__} cannot hold the state of a positional encoding: use a DynamicCache that starts empty "
        "(generate makes one by default; cache_implementation 'static' and 'quantized' are not supported)"
    )


__all__ = ["RelPosCacheLayer", "adopt"]
