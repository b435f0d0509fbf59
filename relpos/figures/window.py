"""Effective window and entropy of each head, from the attention weights of the second half of the text.

The window of a query is the smallest w such that the keys with |i - j| < w hold 90% of its weight; the entropy is that
of its weights, in nats. Both are means over the queries, with a line of one standard deviation.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from relpos.figures.style import Figure, style

SHARE = 0.9


@dataclass
class Windows:
    heads: list[int]
    window: np.ndarray  # [heads, queries]
    entropy: np.ndarray  # [heads, queries], nats
    length: int


def collect(rows: Iterable[tuple[int, Tensor]], heads: list[int], length: int) -> Windows:
    """From blocks of weights [heads, rows, T]."""
    windows, entropies = [], []
    j = np.arange(length)
    for start, cells in rows:
        weights = cells.double().numpy()
        weights = np.where(np.isneginf(weights), 0, weights)
        for row in range(weights.shape[1]):
            i = start + row
            if i < length // 2:
                continue
            own = weights[:, row]  # [heads, T]
            order = np.argsort(np.abs(i - j), kind="stable")
            reached = np.cumsum(own[:, order], 1) >= SHARE * own.sum(1, keepdims=True)
            windows.append(np.abs(i - j)[order][reached.argmax(1)] + 1)
            with np.errstate(divide="ignore", invalid="ignore"):
                entropies.append(-np.where(own > 0, own * np.log(own), 0).sum(1))
    return Windows(heads, np.stack(windows, 1), np.stack(entropies, 1), length)


def draw(windows: Windows, title: str, caption: str) -> Figure:
    lines = textwrap.wrap(caption, 125)
    height = 4.4 + 0.17 * len(lines)
    with style():
        fig = Figure(figsize=(9.4, height), facecolor="white")
        bottom = (0.75 + 0.17 * len(lines)) / height
        names = [str(head + 1) for head in windows.heads]
        parts = (
            (windows.window, f"effective window ({SHARE:.0%} of the weight), tokens", 0.075, "#2a6f97"),
            (windows.entropy, "entropy of the weights, nats", 0.575, "#b5651d"),
        )
        for values, label, x, colour in parts:
            ax = fig.add_axes((x, bottom, 0.405, 1 - bottom - 0.7 / height))
            ax.bar(names, values.mean(1), color=colour, width=0.7)
            ax.errorbar(range(len(names)), values.mean(1), values.std(1), fmt="none", ecolor="0.25", elinewidth=1)
            ax.set_xlabel("head")
            ax.set_title(label, loc="left", size=9)
            ax.set_ylim(bottom=0)
            ax.grid(axis="y", color="0.9", lw=0.6)
            ax.set_axisbelow(True)
            if len(names) > 24:
                ax.set_xticks(range(0, len(names), 4))
        fig.text(0.075, 1 - 0.24 / height, title, size=12, weight="bold", va="center")
        fig.text(
            0.075,
            (0.1 + 0.17 * len(lines)) / height,
            "\n".join(lines),
            size=8,
            va="top",
            color="0.25",
            linespacing=1.35,
        )
    return fig
