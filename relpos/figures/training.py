"""The same heads through training: one row per head, one map per checkpoint, one colour range per head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from relpos.figures.maps import Maps, panel
from relpos.figures.style import Figure, style


def draw(steps: Sequence[int], maps: Sequence[Maps], title: str, caption: str) -> Figure:
    heads = maps[0].heads
    side, gap_x, gap_y, left, right, top = 1.7, 0.12, 0.16, 0.75, 0.85, 0.8
    width = max(left + len(steps) * (side + gap_x) - gap_x + right, 5.5)
    lines = textwrap.wrap(caption, int((width - left) * 14.5))
    bottom = 0.25 + 0.17 * len(lines)
    height = top + len(heads) * (side + gap_y) - gap_y + bottom
    with style():
        fig = Figure(figsize=(width, height), facecolor="white")
        for row, head in enumerate(heads):
            low = min(float(one.low[row]) for one in maps)
            high = max(float(one.high[row]) for one in maps)
            y = height - top - side - row * (side + gap_y)
            fig.text(
                (left - 0.12) / width, (y + side / 2) / height, f"Head {head + 1}", ha="right", va="center", size=9
            )
            for column, one in enumerate(maps):
                x = left + column * (side + gap_x)
                ax = fig.add_axes((x / width, y / height, side / width, side / height))
                last = column == len(maps) - 1
                bar = fig.add_axes(((x + side + 0.1) / width, y / height, 0.1 / width, side / height)) if last else None
                panel(ax, bar, one, row, low, high)
                ax.set_xticks([])
                ax.set_yticks([])
                if row == 0:
                    ax.set_title(f"step {steps[column]:,}", size=9, pad=4)
        fig.text(left / width, 1 - 0.25 / height, title, size=12, weight="bold", va="center")
        fig.text(
            left / width, (bottom - 0.15) / height, "\n".join(lines), size=8, va="top", color="0.25", linespacing=1.35
        )
    return fig
