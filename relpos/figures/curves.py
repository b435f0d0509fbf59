"""Curves and heat maps of results: perplexity by length, loss by position, passkey retrieval, loss in training.

Each function takes (label, result) pairs as `relpos.evaluation.compare` loads them and returns a Figure.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from relpos.errors import UserError, nearest
from relpos.evaluation import result
from relpos.figures.style import Figure, style

# Okabe and Ito (https://jfly.uni-koeln.de/color/): told apart in every common form of colour blindness. Markers and
# dashes repeat the message, for print without colour and for more models than colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")

Results = list[tuple[str, dict[str, Any]]]


def _look(number: int) -> dict[str, Any]:
    turn, place = divmod(number, len(COLOURS))
    return {"color": COLOURS[place], "linestyle": DASHES[turn % len(DASHES)], "linewidth": 1.6}


def _lengths_axis(ax: Axes, ticks: list[int]) -> None:
    ax.set_xscale("log", base=2)
    while len(ticks) > 9:
        ticks = ticks[::2]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{int(x)}" if x < 10000 else f"{x / 1024:g}k"))


def _train_length(ax: Axes, results: Results) -> None:
    """A line at the training length where all models that state one state the same."""
    stated = {v["model"].get("train_length") for _, v in results} - {None}
    if len(stated) == 1:
        length = stated.pop()
        ax.axvline(length, color="0.6", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        low, high = ax.get_xlim()
        late = math.log(length / low) > 0.75 * math.log(high / low)  # no room to its right
        ax.annotate(
            f"trained at {length}", (length, 1), xycoords=("data", "axes fraction"), xytext=(-3 if late else 3, -4),
            textcoords="offset points", fontsize=8, color="0.35", va="top", ha="right" if late else "left",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip


def _loss_axis(ax: Axes, low: float, high: float, logarithmic: bool) -> None:
    """A log axis where values span more than a factor of three, with plain numbers on it."""
    if not logarithmic:
        return
    ax.set_yscale("log")
    steps = (1, 2, 5) if high / low < 300 else (1,)
    ticks = [m * 10.0**e for e in range(-2, 13) for m in steps if low / 1.3 <= m * 10.0**e <= high * 1.3]
    if len(ticks) >= 2:
        ax.yaxis.set_major_locator(FixedLocator(ticks))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if 1 <= y < 1e6 else f"{y:g}"))


def _legend(fig: Figure, ax: Axes, count: int) -> None:
    if count > 1:
        fig.legend(*ax.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)


def perplexity(results: Results, intervals: bool = True, places: list[int] | None = None) -> Figure:
    """Perplexity against length with 95% intervals, one panel per protocol; a log axis where values spread. Intervals
    of many models hide each other, and on the same tokens they are far wider than differences are uncertain. `places`
    of the models in a larger picture give them its colours."""
    protocols = list(dict.fromkeys(p for _, v in results for p in v["protocols"] if _measured(v, p)))
    if not protocols:
        raise UserError("no length was measured: there is nothing to plot")
    with style():
        fig = Figure(figsize=(4.3 * len(protocols) + (1.6 if len(results) > 1 else 0.2), 3.5), layout="constrained")
        panels = fig.subplots(1, len(protocols), squeeze=False)[0]
        for ax, protocol in zip(panels, protocols, strict=True):
            values: list[float] = []
            ticks: set[int] = set()
            for number, (label, v) in zip(places or range(len(results)), results, strict=True):
                rows = _measured(v, protocol)
                x, y = [r["length"] for r in rows], np.array([r["perplexity"] for r in rows], float)
                ends = np.array(
                    [[r["perplexity"] if e is None else e for e in r["ci95"]] for r in rows], float
                ).reshape(-1, 2)
                reach = np.clip([y - ends[:, 0], ends[:, 1] - y], 0, None) if intervals else None
                ax.errorbar(
                    x, y, yerr=reach, label=label,
                    marker=MARKERS[number % len(MARKERS)], markersize=4, capsize=2, elinewidth=0.8, **_look(number),
                )  # fmt: skip
                values += list(y)
                ticks |= {
                    r["length"]
                    for r in v["protocols"].get(protocol, {}).get("results", [])
                    if r["status"] != "too short"
                }
            _lengths_axis(ax, sorted(ticks))
            _loss_axis(ax, min(values), max(values), max(values) > 3 * min(values))
            _train_length(ax, results)
            ax.set_xlabel("window length T (tokens)")
            ax.set_ylabel("perplexity" if ax is panels[0] else "")
            ax.set_title(f"{protocol}: {_short(protocol, results)}")
            ax.grid(True, color="0.9", linewidth=0.6)
        _legend(fig, panels[0], len(results))
    return fig


def _measured(value: dict[str, Any], protocol: str) -> list[dict[str, Any]]:
    rows = value["protocols"].get(protocol, {}).get("results", [])
    return [r for r in rows if r["status"] == "ok" and r["perplexity"] is not None]


def _short(protocol: str, results: Results) -> str:
    settings = next(v["settings"] for _, v in results if protocol in v["protocols"])
    return {
        "blocks": "every token of each window",
        "sliding": f"stride {settings['stride']}",
        "last": f"last {settings['last']} tokens of each window",
    }.get(protocol, "")


LEAST = 128  # tokens behind a point of the line: the first positions have only one per window


def _merged(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Centres and mean losses of bins, each from the shortest windows that reach it, of which there are most. Bins are
    put together until a point stands for LEAST tokens."""
    points: list[list[float]] = []  # from, to, tokens, summed loss
    done = 0  # positions up to here are taken
    for row in rows:
        bins = row["positions"]["bins"]
        for low, high, tokens, loss in zip(bins["from"], bins["to"], bins["tokens"], bins["loss"], strict=True):
            if not tokens or low < done:
                continue
            if points and points[-1][2] < LEAST:
                last = points[-1]
                points[-1] = [last[0], high, last[2] + tokens, last[3] + tokens * loss]
            else:
                points.append([low, high, tokens, tokens * loss])
        done = row["length"]
    low, high, tokens, total = np.array(points, float).T
    return np.sqrt(low * high), total / tokens


def _every(rows: list[dict[str, Any]]) -> np.ndarray | None:
    """The loss at every position, each from the shortest windows that reach it; None where a result lacks it."""
    if not all("loss_f32_base64" in row["positions"] for row in rows):
        return None
    parts, done = [], 0
    for row in rows:
        parts.append(result.unpack(row["positions"]["loss_f32_base64"])[done:])
        done = row["length"]
    return np.concatenate(parts)


def loss_by_position(results: Results) -> Figure:
    """Mean loss against the number of tokens before, each position in the shortest windows that reach it: a text has
    more of them, and what a causal model says does not depend on what follows. The line is the mean over bins (four
    per doubling, wider at the start), the faint dots the mean over 1/64 of the longest window, where the result holds
    every position."""
    chosen = []
    for label, v in results:
        rows = [r for r in _measured(v, "blocks") if "positions" in r]
        if rows:
            chosen.append((label, sorted(rows, key=lambda r: r["length"])))
    if not chosen:
        raise UserError("loss by position needs the protocol `blocks`: no file holds it")
    longest = max(rows[-1]["length"] for _, rows in chosen)
    with style():
        fig = Figure(figsize=(5.4 + (1.6 if len(chosen) > 1 else 0), 3.5), layout="constrained")
        ax = fig.subplots()
        lows, highs = [], []
        for number, (label, rows) in enumerate(chosen):
            x, y = _merged(rows)
            own, every = rows[-1]["length"], _every(rows)
            ax.plot(x, y, label=label if own == longest else f"{label} (to {own})", **_look(number))
            if every is not None:
                _dots(ax, every, _look(number)["color"])
            late = y[x >= min(8, longest / 4)]
            lows.append(np.nanmin(y))
            highs.append(np.nanmax(late))
        ax.set_ylim(
            min(lows) - 0.1 * (max(highs) - min(lows)) - 0.02, max(highs) + 0.1 * (max(highs) - min(lows)) + 0.02
        )
        _lengths_axis(ax, [2**i for i in range(0, longest.bit_length(), 2 if longest > 600 else 1)])
        _train_length(ax, results)
        ax.set_xlabel("tokens before, in the same window")
        ax.set_ylabel("mean loss (nats per token)")
        ax.set_title("Loss by position, protocol blocks, the shortest windows that reach it")
        ax.grid(True, color="0.9", linewidth=0.6)
        _legend(fig, ax, len(chosen))
    return fig


def _dots(ax: Axes, full: np.ndarray, colour: str) -> None:
    size = max(1, len(full) // 64)
    pieces = full[: len(full) // size * size].reshape(-1, size)
    seen = np.isfinite(pieces)
    means = np.where(seen, pieces, 0).sum(1) / np.where(seen.any(1), seen.sum(1), np.nan)
    centres = np.arange(len(means)) * size + (size + 1) / 2
    ax.plot(centres, means, ".", color=colour, markersize=2.5, alpha=0.35)


def training_loss(runs: list[tuple[str, list[float], int]], entropy: float | None = None) -> Figure:
    """Loss of every step against the tokens read, from (label, losses, tokens per step): on the left the whole run, on
    the right its second half from close by, where encodings part. Thick: the mean over a fiftieth of the run."""
    with style():
        fig = Figure(figsize=(10.2, 3.8), layout="constrained")
        panels = fig.subplots(1, 2)
        late: list[float] = []
        for number, (label, losses, per_step) in enumerate(runs):
            tokens = np.arange(1, len(losses) + 1) * per_step / 1e6
            reach = max(1, len(losses) // 100)
            even = np.array([np.mean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))])
            look = _look(number)
            for ax in panels:
                ax.plot(tokens, losses, color=look["color"], linewidth=0.5, alpha=0.15)
                ax.plot(tokens, even, label=label, **{**look, "linewidth": 1.2})
            late += list(even[len(even) // 2 :])
        if entropy is not None:
            panels[0].axhline(entropy, color="0.4", linestyle=(0, (4, 3)), linewidth=0.9)
            panels[0].annotate(
                "unigram entropy", (1, entropy), xycoords=("axes fraction", "data"), xytext=(-3, 3),
                textcoords="offset points", fontsize=8, color="0.35", ha="right",
            )  # fmt: skip
        end = max(len(losses) * per_step for _, losses, per_step in runs) / 1e6
        room = 0.05 * (max(late) - min(late)) + 0.005
        panels[1].set_xlim(end / 2, end)
        panels[1].set_ylim(min(late) - room, max(late) + room)
        for ax, title in zip(panels, ("Training loss", "The second half"), strict=True):
            ax.set_title(title)
            ax.set_xlabel("tokens read, millions")
            ax.grid(True, color="0.9", linewidth=0.6)
        panels[0].set_ylabel("loss (nats per token)")
        _legend(fig, panels[0], len(runs))
    return fig


def formats_of(text: str) -> list[str]:
    """`png,pdf` as a list, checked."""
    from relpos.figures import FORMATS

    wanted = [part.strip().lower() for part in text.split(",") if part.strip()]
    for one in wanted:
        if one not in FORMATS:
            raise UserError(f"there is no picture format {one!r}.{nearest(one, FORMATS)}")
    return wanted


def write(evaluations: Results, passkeys: Results, out: str | Path, formats: list[str]) -> list[Path]:
    """Every plot these results allow, into a folder."""
    from relpos.figures import save

    written: list[Path] = []
    if any(_measured(v, p) for _, v in evaluations for p in v["protocols"]):
        written += save(perplexity(evaluations), Path(out), "perplexity", formats)
    if any("positions" in row for _, v in evaluations for row in _measured(v, "blocks")):
        written += save(loss_by_position(evaluations), Path(out), "loss-by-position", formats)
    if passkeys:
        written += save(passkey(passkeys), Path(out), "passkey", formats)
    return written


MEASURES = {
    "digits_first_of_ten": ("digits more likely than the nine others", "chance 10%"),
    "greedy_key": ("keys found by greedy decoding", ""),
}


def passkey(results: Results) -> Figure:
    """Heat maps length x depth, one row per model: right digits against the other digits, and keys found greedily."""
    with style():
        lengths = max(len(v["results"]) for _, v in results)
        fig = Figure(figsize=(2 * max(3.6, 0.62 * lengths + 1.6) + 0.8, 3.1 * len(results) + 0.2), layout="constrained")
        panels = fig.subplots(len(results), 2, squeeze=False)
        for (label, v), row in zip(results, panels, strict=True):
            for ax, (measure, (title, chance)) in zip(row, MEASURES.items(), strict=True):
                image = _heat(ax, v, measure)
                note = f" ({chance})" if chance else ""
                ax.set_title("\n".join(textwrap.wrap(f"{label}: {title}{note}", 44)), fontsize=9)
                fig.colorbar(image, ax=ax, format=FuncFormatter(lambda x, _: f"{100 * x:.0f}%"))
    return fig


def _heat(ax: Axes, value: dict[str, Any], measure: str) -> Any:
    depths = value["settings"]["depths"]
    grid = np.full((len(depths), len(value["results"])), np.nan)
    for column, row in enumerate(value["results"]):
        if row["status"] == "ok":
            grid[:, column] = [cell[measure] for cell in row["cells"]]
    image = ax.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="upper")
    for (i, j), share in np.ndenumerate(grid):
        text = "-" if np.isnan(share) else f"{100 * share:.0f}"
        ax.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=6,
            color="0.4" if np.isnan(share) else "w" if share < 0.55 else "k",
        )
    ax.set_xticks(
        range(grid.shape[1]), [str(r["length"]) for r in value["results"]], rotation=0 if grid.shape[1] < 7 else 45
    )
    step = 1 if len(depths) <= 11 else 2
    ax.set_yticks(range(0, len(depths), step), [f"{100 * d:g}%" for d in depths[::step]])
    ax.set_xlabel("length (tokens)")
    ax.set_ylabel("depth of the key")
    return image
