"""One map per head, three to a row, each with its colour bar: the layout of the CABLE paper's figures 8 to 15."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, MultipleLocator
from torch import Tensor

from relpos.figures.style import DPI, Figure, colours, signs_matter, style

PIXELS = 1024  # longer maps are drawn as block means of at most so many pixels a side


@dataclass
class Maps:
    """The maps of some heads, ready to draw: `values` [heads, n, n] with NaN where nothing is seen, and the range of
    the full map of each head, which block means would narrow."""

    kind: str
    heads: list[int]  # numbers from 0
    length: int
    values: np.ndarray
    low: np.ndarray  # [heads]
    high: np.ndarray
    block: int = 1  # cells to a pixel
    causal: bool = True
    title: str = ""
    caption: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def signed(self) -> bool:
        return self.kind == "difference" or signs_matter(self.low, self.high)

    def array(self) -> np.ndarray:
        """As a sidecar has it: float32 with -inf where nothing is seen."""
        return np.where(np.isnan(self.values), -np.inf, self.values).astype(np.float32)


def collect(rows: Iterable[tuple[int, Tensor]], heads: list[int], length: int, kind: str, pixels: int = PIXELS) -> Maps:
    """Maps from blocks of rows [heads, r, length] that follow each other; -inf cells are those nobody sees."""
    block = max(1, math.ceil(length / pixels))
    n = math.ceil(length / block)
    total = np.zeros((len(heads), n, n), np.float64 if block > 1 else np.float32)
    count = np.zeros((n, n), np.int64)
    low, high = np.full(len(heads), np.inf), np.full(len(heads), -np.inf)
    edges = np.arange(0, length, block)
    for start, cells in rows:
        part = cells.numpy()
        seen = ~np.isneginf(part[0])
        low = np.minimum(low, np.where(seen, part, np.inf).min((1, 2)))
        high = np.maximum(high, np.where(seen, part, -np.inf).max((1, 2)))
        index = (start + np.arange(part.shape[1])) // block
        if block == 1:
            total[:, index] = np.where(seen, part, 0)
            count[index] = seen
        else:
            summed = np.add.reduceat(np.where(seen, part, 0).astype(np.float64), edges, axis=2)
            counted = np.add.reduceat(seen.astype(np.int64), edges, axis=1)
            for row, at in enumerate(index):
                total[:, at] += summed[:, row]
                count[at] += counted[row]
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return Maps(kind, heads, length, values, low, high, block)


def panel(ax: Axes, bar: Axes | None, maps: Maps, index: int, low: float, high: float) -> None:
    """One head's map, and its colour bar in `bar`."""
    norm, cmap = colours(low, high, maps.kind, maps.signed)
    values = np.ma.masked_invalid(maps.values[index])
    extent = (-0.5, maps.length - 0.5, maps.length - 0.5, -0.5)
    image = ax.imshow(values, cmap=cmap, norm=norm, extent=extent, aspect="equal", interpolation="auto")
    step = 100 if 150 < maps.length <= 600 else 2 ** round(math.log2(maps.length / 4)) if maps.length > 600 else None
    for axis in (ax.xaxis, ax.yaxis):  # the same on both, though labels on one need more room
        whole = MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True)  # matplotlib's own may be halves
        axis.set_major_locator(whole if step is None else MultipleLocator(step))
    if bar is None:
        return
    ax.figure.colorbar(image, cax=bar)
    if low == high:
        bar.set_yticks([low])  # one value: no range to show
    elif maps.kind != "weights":
        bar.set_ylim(low, high)  # colours may be centred on zero; the bar ends where the map does


def draw(maps: Maps, *, shared: bool = False, columns: int = 3) -> Figure:
    """The picture. Colour bars are at least 2.7 inches tall: then matplotlib labels them as in the paper."""
    count = len(maps.heads)
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    digits = 0.08 * max(0, len(str(maps.length - 1)) - 3)  # longer tick labels want more room
    side, gap_x, gap_y, left, right = 512 / DPI, 1.45 + digits, 0.62, 0.6 + digits, 1.05
    lines = textwrap.wrap(maps.caption, max(40, int(columns * 56)))
    title = textwrap.wrap(maps.title, max(30, int(columns * 36)), break_on_hyphens=True)
    top, bottom = 0.75 + 0.2 * (len(title) - 1), 0.45 + 0.17 * len(lines)
    width = left + columns * side + (columns - 1) * gap_x + right
    height = top + rows * side + (rows - 1) * gap_y + bottom
    with style():
        fig = Figure(figsize=(width, height), facecolor="white")
        low_all, high_all = float(maps.low.min()), float(maps.high.max())
        for index, head in enumerate(maps.heads):
            row, column = divmod(index, columns)
            x = left + column * (side + gap_x)
            y = height - top - side - row * (side + gap_y)
            ax = fig.add_axes((x / width, y / height, side / width, side / height))
            bar = fig.add_axes(((x + side + 0.12) / width, y / height, 0.14 / width, side / height))
            ax.set_title(f"Head {head + 1}")
            low, high = (low_all, high_all) if shared else (float(maps.low[index]), float(maps.high[index]))
            panel(ax, bar, maps, index, low, high)
        middle = 0.3 + 0.1 * (len(title) - 1)
        fig.text(left / width, 1 - middle / height, "\n".join(title), size=12, weight="bold", va="center")
        fig.text(
            left / width, (bottom - 0.4) / height, "\n".join(lines), size=8, va="top", color="0.25", linespacing=1.35
        )
    return fig
