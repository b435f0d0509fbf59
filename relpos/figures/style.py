"""Colours, colour ranges and the Figure that all drawing starts from. No pyplot: no global state, no display."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as _Figure
from matplotlib.text import Text

RC: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a picture is the same everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "relpos",
    "pdf.fonttype": 42,
}


DPI = 176  # of written pictures: 512 cells in a panel of 2.91 inches, a pixel each


class Figure(_Figure):
    """A matplotlib Figure that a notebook shows whether or not pyplot was ever imported, and in which a dollar sign, of
    a folder's name or a note, is a dollar sign."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            if "$" in text.get_text() and not text.get_text().startswith(r"$\mathdefault"):  # as formatters of ticks do
                text.set_parse_math(False)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def style() -> AbstractContextManager[None]:
    """Our settings, for the time of one drawing."""
    return matplotlib.rc_context(RC)


def _oklab_to_srgb(lab: np.ndarray) -> np.ndarray:
    """Oklab (https://bottosson.github.io/posts/oklab/), a space in which equal steps look equal, to sRGB."""
    l, m, s = (
        (lab @ np.array(row)) ** 3
        for row in (
            [1, 0.3963377774, 0.2158037573],
            [1, -0.1055613458, -0.0638541728],
            [1, -0.0894841775, -1.2914855480],
        )
    )
    linear = np.stack(
        [
            4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
            -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
            -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
        ],
        -1,
    ).clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def _diverging() -> ListedColormap:
    """Blue for negative, near white at zero, orange-brown for positive: straight lines in Oklab, so steps look equal on
    both sides; blue against orange stays apart in every common form of colour blindness."""
    low, middle, high = np.array([[0.36, -0.035, -0.135], [0.925, 0.0, 0.0], [0.47, 0.085, 0.085]])
    t = np.linspace(0, 1, 129)[:, None]
    return ListedColormap(
        _oklab_to_srgb(np.concatenate([low + (middle - low) * t, (middle + (high - middle) * t)[1:]])),
        "relpos_diverging",
    )


SEQUENTIAL = "viridis"
DIVERGING = _diverging()


def signs_matter(low: np.ndarray, high: np.ndarray) -> bool:
    """Whether maps with these ranges hold both signs, in one head or between heads, by more than a trace."""
    size = np.maximum(np.maximum(np.abs(low), np.abs(high)), 1e-30)
    return bool((high > 0.05 * size).any() and (low < -0.05 * size).any())


def colours(low: float, high: float, kind: str, signed: bool) -> tuple[Normalize, Colormap]:
    """How a map with values from low to high is coloured: around zero where signs matter, else from end to end."""
    blank = (1, 1, 1, 0)  # masked cells
    sequential, diverging = (map.with_extremes(bad=blank) for map in (matplotlib.colormaps[SEQUENTIAL], DIVERGING))
    if kind == "weights":
        return LogNorm(max(low, 1e-6), max(high, 1e-5), clip=True), sequential
    size = max(abs(low), abs(high))
    if low == high:  # one value: one colour, on the bar too
        colour = diverging(0.5 + 0.5 * (low > 0) - 0.5 * (low < 0)) if signed else sequential(1.0)
        return Normalize(low - 0.5, low + 0.5), ListedColormap([colour]).with_extremes(bad=blank)
    if signed:
        return Normalize(-size, size), diverging
    return Normalize(low, high), sequential
