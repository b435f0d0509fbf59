"""Bias against distance, one line per head: the mean over all pairs of tokens at that distance, and where the text
matters a band of one standard deviation to either side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from relpos.figures.style import SEQUENTIAL, Figure, style


@dataclass
class Profile:
    distances: np.ndarray  # [n], the past positive
    mean: np.ndarray  # [heads, n]
    spread: np.ndarray  # [heads, n], standard deviation over the pairs of tokens
    heads: list[int]
    kind: str


def collect(rows: Iterable[tuple[int, Tensor]], heads: list[int], length: int, kind: str) -> Profile:
    total, square = np.zeros((2, len(heads), 2 * length - 1))
    count = np.zeros(2 * length - 1, np.int64)
    for start, cells in rows:
        part = cells.double().numpy()
        for row in range(part.shape[1]):
            values = part[:, row, ::-1]  # distances i - (T-1) .. i, ascending
            seen = ~np.isneginf(values[0])
            at = slice(start + row, start + row + length)  # column of distance d is d + T - 1
            values = np.where(seen, values, 0)
            total[:, at] += values
            square[:, at] += values**2
            count[at] += seen
    kept = count > 0
    mean = total[:, kept] / count[kept]
    variance = square[:, kept] / count[kept] - mean**2
    # The difference of two nearly equal sums: what lies below the rounding of float32 maps is none.
    variance[variance < 1e-10 * np.maximum(1, mean**2)] = 0
    return Profile((np.arange(2 * length - 1) - length + 1)[kept], mean, np.sqrt(variance), heads, kind)


def draw(profile: Profile, title: str, caption: str) -> Figure:
    """All heads in one plot; where the text spreads them, a plot per head with its band, and the others in grey."""
    if (profile.spread > 0).any():
        return _draw_each(profile, title, caption)
    lines = textwrap.wrap(caption, 110)
    height = 5.4 + 0.17 * len(lines)
    with style():
        fig = Figure(figsize=(8.2, height), facecolor="white")
        bottom = (0.75 + 0.17 * len(lines)) / height
        ax = fig.add_axes((0.085, bottom, 0.73, 1 - bottom - 0.55 / height))
        colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0, 0.92, len(profile.heads)))
        for index, head in enumerate(profile.heads):
            dashes = ("-", (0, (5, 1.5)), (0, (1, 1)))[index % 3]  # neighbours stay apart without colour
            ax.plot(
                profile.distances,
                profile.mean[index],
                color=colours[index],
                lw=1.4,
                ls=dashes,
                label=f"Head {head + 1}",
            )
        ax.set_xlabel("distance i - j in tokens")
        ax.set_ylabel(profile.kind)
        ax.margins(x=0.01)
        _grid(ax)
        fig.legend(loc="center left", bbox_to_anchor=(0.825, 0.5 + bottom / 2), frameon=False, fontsize=8)
        fig.text(0.085, 1 - 0.28 / height, title, size=12, weight="bold", va="center")
        fig.text(
            0.085,
            (0.1 + 0.17 * len(lines)) / height,
            "\n".join(lines),
            size=8,
            va="top",
            color="0.25",
            linespacing=1.35,
        )
    return fig


def _draw_each(profile: Profile, title: str, caption: str) -> Figure:
    count = len(profile.heads)
    columns = min(4, count)
    rows = math.ceil(count / columns)
    wide, tall, gap_x, gap_y, left, top = 2.6, 1.9, 0.25, 0.4, 0.8, 0.8
    width = left + columns * (wide + gap_x) + 0.1
    lines = textwrap.wrap(caption, max(40, int(width * 13)))
    bottom = 0.65 + 0.17 * len(lines)
    height = top + rows * (tall + gap_y) - gap_y + bottom
    low, high = float((profile.mean - profile.spread).min()), float((profile.mean + profile.spread).max())
    with style():
        fig = Figure(figsize=(width, height), facecolor="white")
        for index, head in enumerate(profile.heads):
            row, column = divmod(index, columns)
            x, y = left + column * (wide + gap_x), height - top - tall - row * (tall + gap_y)
            ax = fig.add_axes((x / width, y / height, wide / width, tall / height))
            ax.plot(profile.distances, profile.mean.T, color="0.82", lw=0.7)
            mean, spread = profile.mean[index], profile.spread[index]
            ax.fill_between(profile.distances, mean - spread, mean + spread, color="#2a6f97", alpha=0.25, lw=0)
            ax.plot(profile.distances, mean, color="#12405c", lw=1.5)
            ax.set_title(f"Head {head + 1}", size=9, pad=3)
            ax.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
            ax.margins(x=0.01)
            _grid(ax)
            if column:
                ax.tick_params(labelleft=False)
            else:
                ax.set_ylabel(profile.kind)
            if index + columns < count:
                ax.tick_params(labelbottom=False)
            else:
                ax.set_xlabel("distance i - j in tokens")
        fig.text(left / width, 1 - 0.28 / height, title, size=12, weight="bold", va="center")
        fig.text(
            left / width, (bottom - 0.6) / height, "\n".join(lines), size=8, va="top", color="0.25", linespacing=1.35
        )
    return fig


def _grid(ax: Axes) -> None:
    ax.grid(color="0.9", lw=0.6)
    ax.set_axisbelow(True)
