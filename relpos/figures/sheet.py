"""The contact sheet: one row per encoding, one small map per head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from relpos.figures.maps import Maps, panel
from relpos.figures.style import Figure, style


def draw(rows: Sequence[Maps], names: Sequence[tuple[str, str]], caption: str = "", title: str = "") -> Figure:
    """Every map with its own colour range; an encoding's own figure has the numbers. A row has a name and a remark."""
    columns = max(len(maps.heads) for maps in rows)
    side, gap, left, right, top = 1.0, 0.08, 1.75, 0.15, 0.55 if title else 0.3
    width = max(left + columns * side + (columns - 1) * gap + right, 4.5)
    start = left if columns > 7 else right  # where text begins: beside few maps it would not have room
    lines = textwrap.wrap(caption, int((width - start - right) * 15))
    bottom = 0.2 + 0.17 * len(lines)
    height = top + len(rows) * side + (len(rows) - 1) * gap + bottom
    with style():
        fig = Figure(figsize=(width, height), facecolor="white")
        for row, (maps, (name, remark)) in enumerate(zip(rows, names)):
            y = height - top - side - row * (side + gap)
            middle = (y + side / 2 + (0.09 if remark else 0)) / height
            fig.text((left - 0.12) / width, middle, name, ha="right", va="center", size=10, weight="bold")
            below = (y + side / 2 - 0.09 - 0.08 * name.count("\n")) / height
            fig.text((left - 0.12) / width, below, remark, ha="right", va="center", size=8, color="0.25")
            for index in range(len(maps.heads)):
                x = left + index * (side + gap)
                ax = fig.add_axes((x / width, y / height, side / width, side / height))
                panel(ax, None, maps, index, float(maps.low[index]), float(maps.high[index]))
                ax.set_xticks([])
                ax.set_yticks([])
                for spine in ax.spines.values():
                    spine.set_color("0.8")
                if row == 0:
                    ax.set_title(f"Head {maps.heads[index] + 1}", size=8, pad=3)
        if title:
            fig.text(start / width, 1 - 0.18 / height, title, size=12, weight="bold", va="center")
        fig.text(
            start / width, (bottom - 0.15) / height, "\n".join(lines), size=8, va="top", color="0.25", linespacing=1.35
        )
    return fig
