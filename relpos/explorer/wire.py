"""A capture -> the bytes that the page draws from: a capture file (docs/capture.md) with maps in it.

A map is stored in 16 bits: `value = low + u / 65534 * (high - low)` with low and high of its head, and u = 65535 where
a query does not see a key. Causal maps keep the lower triangle row by row, so that 12 heads of 512 x 512 take 3.15 MB;
others keep the square. Maps of more than `PIXELS` a side are means of blocks unless all cells are asked for.

All numbers come from `relpos.capture` (maps) and `relpos.figures` (profiles, windows, colour ranges).
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib
import numpy as np

from relpos.capture import VERSION, Capture
from relpos.errors import UserError
from relpos.figures import maps as _maps
from relpos.figures import profile as _profile
from relpos.figures import window as _window
from relpos.figures.style import DIVERGING, SEQUENTIAL, colours

PIXELS = 512
FULL = 4096  # the longest map that is sent cell by cell, one head at a time
TOP = 65534
UNSEEN = 65535
PALETTES = (SEQUENTIAL, "cividis", "magma", "Greys", DIVERGING.name)


def palettes() -> dict[str, list[int]]:
    """Colour maps as 256 x 3 bytes: the page's colours are those of the figures."""
    made = {}
    for name in PALETTES:
        table = DIVERGING if name == DIVERGING.name else matplotlib.colormaps[name]
        made[name] = np.rint(table(np.linspace(0, 1, 256))[:, :3] * 255).astype(int).ravel().tolist()
    return made


def norm(low: float, high: float, made: _maps.Maps) -> dict[str, Any]:
    """How the figures would colour a map with this range."""
    if low == high and made.kind != "weights":  # one value: the page has no palette of one colour, but its place in one
        size = abs(low) or 1.0
        low, high = (-size, size) if made.signed else (low - 1, low)
    scale, table = colours(low, high, made.kind, made.signed)
    return {
        "log": isinstance(scale, matplotlib.colors.LogNorm),
        "low": scale.vmin,
        "high": scale.vmax,
        "palette": table.name if table.name in PALETTES else SEQUENTIAL,
    }


def quantise(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """float32 [H, n] with NaN where nothing is seen -> uint16 [H, n]."""
    span = np.where(high > low, high - low, 1)[:, None]
    scaled = (values.astype(np.float64) - low[:, None]) / span * TOP
    return np.where(np.isnan(scaled), UNSEEN, np.rint(scaled.clip(0, TOP))).astype(np.uint16)


Parts = tuple[dict[str, np.ndarray], dict[str, Any]]  # tensors, and what the page must know about them


def maps(held: Capture, kind: str, layer: int, heads: list[int] | None = None, full: bool = False) -> bytes:
    return pack(held, layer, *map_parts(held, kind, layer, heads, full))


def profile(held: Capture, kind: str, layer: int) -> bytes:
    return pack(held, layer, *profile_parts(held, kind, layer))


def map_parts(held: Capture, kind: str, layer: int, heads: list[int] | None = None, full: bool = False) -> Parts:
    """Maps of a layer: all heads at up to 512 pixels a side, or one of them cell by cell."""
    layer = held.index(layer)
    held.check(kind, layer, held.length)
    own = held.heads_of(layer)
    heads = list(range(own)) if heads is None else heads
    if any(not 0 <= head < own for head in heads) or not heads:
        raise UserError(f"layer {layer} has heads 0 to {own - 1}")
    pixels = PIXELS
    if full:
        if len(heads) > 1:
            raise UserError("all cells are sent for one head at a time")
        pixels = FULL
    made = _maps.collect(held.rows(kind, layer, heads), heads, held.length, kind, pixels)
    causal = held.layers[layer].causal if layer in held.layers else next(iter(held.layers.values())).causal
    n = made.values.shape[1]
    cells = made.values[:, np.tril(np.ones((n, n), bool))] if causal else made.values.reshape(len(heads), -1)
    facts = {
        "kind": kind,
        "layer": layer,
        "heads": heads,
        "n": n,
        "block": made.block,
        "length": held.length,
        "causal": causal,
        "alone": kind == "weights" and not held.has_content(layer),
        "norms": [norm(float(a), float(b), made) for a, b in zip(made.low, made.high)],
        "shared": norm(float(made.low.min()), float(made.high.max()), made),
    }
    prefix = f"layer.{layer}.map.{kind}"
    tensors = {
        prefix: quantise(cells, made.low, made.high),
        f"{prefix}.range": np.stack([made.low, made.high], 1).astype(np.float32),
    }
    return tensors, facts


def profile_parts(held: Capture, kind: str, layer: int) -> Parts:
    """Profile by distance of every head, with the spread over tokens, and the effective window where weights exist."""
    layer = held.index(layer)
    heads = list(range(held.heads_of(layer)))
    made = _profile.collect(held.rows(kind, layer), heads, held.length, kind)
    prefix = f"layer.{layer}.profile.{kind}"
    tensors = {
        f"{prefix}.distances": made.distances.astype(np.int32),
        f"{prefix}.mean": made.mean.astype(np.float32),
        f"{prefix}.spread": made.spread.astype(np.float32),
    }
    try:
        windows = _window.collect(held.rows("weights", layer), heads, held.length)
        tensors[f"layer.{layer}.window"] = windows.window.mean(1).astype(np.float32)
        tensors[f"layer.{layer}.window.spread"] = windows.window.std(1).astype(np.float32)
        tensors[f"layer.{layer}.entropy"] = windows.entropy.mean(1).astype(np.float32)
    except UserError:
        pass  # scores alone: no weights, so no window
    return tensors, {"kind": kind, "layer": layer, "heads": heads, "alone": not held.has_content(layer)}


def pack(held: Capture, layer: int, tensors: dict[str, np.ndarray], facts: dict[str, Any]) -> bytes:
    """A capture file in memory; `maps` in its metadata says what the maps are."""
    from safetensors.numpy import save

    layer = held.index(layer)
    some = held.layers.get(layer)
    header = {
        "name": held.name,
        "title": held.title,
        "heads": held.heads,
        "length": held.length,
        "num_layers": held.num_layers,
        "layers": {
            str(layer): {
                "terms": [],
                "scale": some.scale if some else 1.0,
                "window": some.window if some else None,
                "causal": some.causal if some else True,
            }
        },
    }
    metadata = {
        "format": "relpos-capture",
        "version": str(VERSION),
        "header": json.dumps(header),
        "maps": json.dumps(facts),
    }
    return save({key: np.ascontiguousarray(value) for key, value in tensors.items()}, metadata)
