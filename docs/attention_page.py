"""The generated part of docs/attention.md: every number comes from a file in results/, or is a target and said to be.

What has not been measured is a dash; other rows, lengths and encodings in the files appear without a change here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator
from study_page import table

from relpos.figures import curves
from relpos.figures.style import Figure, style

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PICTURE = ROOT / "docs" / "images" / "attention-speed.png"
FLASH = "flash (FA2), no bias"
OURS = "relpos "
# Forward + backward over flash's, 12 heads of 64. A target is for all forms of an encoding, but where it names some.
TARGETS: dict[str, float | None] = {
    "alibi": 0.95, "fox": 0.95, "rope": 0.95, "t5": 1.25, "kerple": 1.25, "sandwich": 1.25, "fire": 1.6, "inkling": 2.5,
    "cable": 0.95, "cable:form=unweighted": 0.95, "cable:form=kernel": None, "cable:form=softplus": None,
}  # fmt: skip
TARGET_LENGTHS = (1024, 4096, 16384)
MEMORY = 1.2  # of flash's
TRAIN = 0.97  # of the bare step's speed
BUSY = 0.9  # of a step; less is worth a word
# Of the encodings, one for each way that a bias reaches the kernels; and what the peers, in grey, leave of the colours.
DRAWN = ("rope", "alibi", "cable", "t5", "kerple", "fire", "inkling")
COLOURS = tuple(colour for colour in curves.COLOURS if colour != "#000000")
Row = dict[str, Any]


class Measured:
    """results/attention-h200.json by name, length and head size; peers first."""

    def __init__(self, folder: Path):
        self.path = folder / "attention-h200.json"
        self.file: Row = json.loads(self.path.read_text(encoding="utf-8"))
        self.rows = {(r["name"], r["length"], r["head_dim"]): r for r in self.file["rows"]}
        self.names = sorted(dict.fromkeys(r["name"] for r in self.file["rows"]), key=lambda n: n.startswith(OURS))
        self.floors = {
            (f["length"], f["head_dim"]): max(f["arithmetic_ms"], f["memory_ms"]) for f in self.file["floors"]
        }

    def lengths(self, head_dim: int = 64) -> list[int]:
        return sorted({n for _, n, d in self.rows if d == head_dim})

    def memory(self, name: str, length: int) -> float | None:
        """Times flash's."""
        row, flash = self.rows.get((name, length, 64)), self.rows.get((FLASH, length, 64))
        return None if row is None or flash is None else row["extra_mib"] / flash["extra_mib"]


def page(folder: Path = RESULTS) -> str:
    """The Markdown."""
    m = Measured(folder)
    speed = [how(m), verdict(m), both(m), plot(), memory(m), forward(m), floor(m), eager(m)]
    return "\n\n".join([*speed, wide(m), decode(m), training(folder)])


README = ("rope", "alibi", "fox", "cable", "t5", "kerple", "sandwich", "fire", "inkling")


def summary(folder: Path = RESULTS) -> str:
    """For the README: ours beside flash, and what the same biases cost elsewhere."""
    m = Measured(folder)
    names = [FLASH, *[OURS + spec for spec in README], *[n for n in m.names if not n.startswith(OURS) and n != FLASH]]
    rows = []
    for name in names:
        found = [m.rows.get((name, n, 64)) for n in TARGET_LENGTHS]
        if any(found):
            rows.append([shown(name), *["-" if r is None else digits(r["ratio"]) for r in found]])
    return (
        f"Forward + backward on one {m.file['machine']}, times flash attention's without any bias, by length (causal, "
        "bfloat16, 12 heads of 64, 32,768 tokens a call, every gradient):\n\n"
        + table(["", *[f"{n:,}" for n in TARGET_LENGTHS]], rows)
    )


def digits(x: float) -> str:
    """Three of them, or all before the point."""
    return f"{x:,.0f}" if x >= 99.95 else f"{x:#.3g}"


def shown(name: str) -> str:
    return f"`{name.removeprefix(OURS)}`" if name.startswith(OURS) else name


def target(name: str) -> float | None:
    spec = name.removeprefix(OURS)
    return TARGETS.get(spec, TARGETS.get(spec.partition(":")[0])) if name.startswith(OURS) else None


def met(values: dict[int, float | None], limit: float) -> str:
    """Whether a target is met at every length, and where not."""
    over = [f"{n:,}" for n, x in values.items() if x is not None and x > limit]
    missing = [f"{n:,}" for n, x in values.items() if x is None]
    if over:
        return f"no, at {', '.join(over)}"
    return f"not measured at {', '.join(missing)}" if missing else "yes"


def outcome(m: Measured, name: str) -> str:
    limit = target(name)
    found = {n: row["ratio"] if (row := m.rows.get((name, n, 64))) else None for n in TARGET_LENGTHS}
    return "" if limit is None else met(found, limit)


def per_second(tokens: float) -> str:
    return f"{tokens / 1000:,.0f}k"


def grid(m: Measured, cell: Callable[[Row], str], head_dim: int = 64) -> list[list[str]]:
    rows = []
    for name in m.names:
        found = [m.rows.get((name, n, head_dim)) for n in m.lengths(head_dim)]
        if any(found):
            rows.append([shown(name), *["-" if r is None else cell(r) for r in found]])
    return rows


def heads(m: Measured, *more: str) -> list[str]:
    return ["", *[f"{n:,}" for n in m.lengths()], *more]


# Parts of the page ----------------------------------------------------------------------------------------------------


def how(m: Measured) -> str:
    f, top = m.file, m.file["ceilings"]
    return (
        f"`benchmarks/attention.py` on one {f['machine']}, PyTorch {f['versions']['torch']}, the kernels of commit "
        f"{f['commit'][:7]}: {f['what']}; 12 heads of "
        "64 where nothing else is said, random data, every gradient. A call always holds the same number of tokens: "
        "twice the length is half the batch, so memory linear in the length is the same number in every column.\n\n"
        "- **Times** are GPU time from the first kernel of a call to its last, with the launches queued ahead as in a "
        "training step, cold caches, medians. *Eager* times are those of calls one after the other from Python, host "
        "time included.\n"
        "- **Peers** ran in the same run. `none` is our kernel without a bias. Content-aware encodings start from "
        "their potentials and gates, as all start from q, k and v: the projections are in the training step below.\n"
        f"- **The floor** is the larger of two: the matrix products at the {top['bf16_tflops']:.0f} TFLOP/s that a "
        f"large product in bfloat16 reaches here, and every operand moved once at the {top['copy_tb_s']:.2f} TB/s of a "
        "copy.\n"
        "- A dash: not measured. Peers that take seconds to compile or to run were measured at a few lengths."
        + "".join(_earlier(f["rows"]))
        + (f"\n- {f['history']}." if "history" in f else "")
    )


def _earlier(rows: list[Row]) -> list[str]:
    """Which lengths a file kept of another run, and of which rows where others of that length are new."""
    kept: dict[str, dict[str, None]] = {}
    for r in rows:
        if "commit" in r:
            column = [x for x in rows if (x["length"], x["head_dim"]) == (r["length"], r["head_dim"])]
            size = "" if r["head_dim"] == 64 else f" and heads of {r['head_dim']}"
            old = [shown(x["name"]) for x in column if x.get("commit") == r["commit"]]
            which = "" if len(old) == len(column) else f" ({'; '.join(old)})"
            kept.setdefault(r["commit"], {})[f"{r['length']:,} tokens{size}{which}"] = None
    return [f"\n- **Of an earlier run**, the kernels of commit {c[:7]}: {', '.join(w)}." for c, w in kept.items()]


def verdict(m: Measured) -> str:
    """The targets, said plainly."""
    said = {shown(name): outcome(m, name) for name in m.names if target(name) is not None}
    good = [name for name, how in said.items() if how == "yes"]
    bad = [f"{name} ({how.removeprefix('no, ')})" for name, how in said.items() if how != "yes"]
    heavy = [
        shown(name)
        for name in m.names
        if name.startswith(OURS) and any((m.memory(name, n) or 0) > MEMORY for n in m.lengths())
    ]
    return (
        f"**The targets**, set beforehand, for {', '.join(f'{n:,}' for n in TARGET_LENGTHS)} "
        f"tokens, forward + backward. Met: {', '.join(good) or 'none'}. Not met: {', '.join(bad) or 'none'}. Memory, "
        f"at most {MEMORY} times flash's: {'not met by ' + ', '.join(heavy) if heavy else 'met by all'}."
    )


def both(m: Measured) -> str:
    def cell(r: Row) -> str:
        limit = target(r["name"])
        missed = limit is not None and r["length"] in TARGET_LENGTHS and r["ratio"] > limit
        ratio = f"**{digits(r['ratio'])}**" if missed else digits(r["ratio"])
        return f"{ratio} ({digits(r['both_ms'])})"

    rows = grid(m, cell)
    for name, row in zip(m.names, rows, strict=True):
        limit = target(name)
        row += ["" if limit is None else f"<= {limit}", outcome(m, name)]
    return (
        "### Forward and backward\n\nTimes flash's time (milliseconds), by length. Bold: over the target.\n\n"
        + table(heads(m, "target", "met"), rows)
    )


def plot() -> str:
    return f"![Time and memory against length](images/{PICTURE.name})"


def memory(m: Measured) -> str:
    rows = grid(m, lambda r: f"{r['extra_mib']:,.0f}")
    for name, row in zip(m.names, rows, strict=True):
        found = {n: m.memory(name, n) for n in m.lengths() if (name, n, 64) in m.rows}
        most = max((x for x in found.values() if x is not None), default=None)
        row += ["-" if most is None else digits(most), met(found, MEMORY) if name.startswith(OURS) else ""]
    return (
        "### Peak memory\n\nMiB at the peak of forward + backward beyond q, k, v, the output's gradient and the "
        f"parameters; the output and the gradients are in it. Target: at most {MEMORY} times flash's.\n\n"
        + table(heads(m, "times flash's, at most", "met"), rows)
    )


def forward(m: Measured) -> str:
    rows = grid(m, lambda r: f"{digits(r['forward_ratio'])} ({digits(r['forward_ms'])})")
    return "### Forward alone\n\nTimes flash's time (milliseconds).\n\n" + table(heads(m), rows)


def floor(m: Measured) -> str:
    def cell(r: Row) -> str:
        least = m.floors.get((r["length"], 64))
        return "-" if least is None else digits(r["both_ms"] / least)

    known = [m.floors.get((n, 64)) for n in m.lengths()]
    first = ["the floor, milliseconds", *["-" if x is None else digits(x) for x in known]]
    return "### Against the floor\n\nForward + backward, times the floor.\n\n" + table(
        heads(m), [first, *grid(m, cell)]
    )


def eager(m: Measured) -> str:
    rows = grid(m, lambda r: digits(r["eager_ms"]))
    return (
        "### Eager calls\n\nMilliseconds of forward + backward, one call after the other from Python, host time "
        "included. At short lengths launching takes longer than the kernels run; inside a compiled model it overlaps."
        "\n\n" + table(heads(m), rows)
    )


def wide(m: Measured) -> str:
    lengths = m.lengths(128)
    if not lengths:
        return ""
    rows = []
    for name in m.names:
        found = [m.rows.get((name, n, 128)) for n in lengths]
        if any(found) or name.startswith(OURS):
            cells = [shown(name)]
            for time, ratio in (("both_ms", "ratio"), ("forward_ms", "forward_ratio")):
                cells += ["-" if r is None else f"{digits(r[ratio])} ({digits(r[time])})" for r in found]
            rows.append([*cells, *["-" if r is None else f"{r['extra_mib']:,.0f}" for r in found]])
    head = [f"{what}, {n:,}" for what in ("both", "forward", "MiB") for n in lengths]
    return "### Heads of 128\n\n6 heads; times flash's time (milliseconds), and peak memory.\n\n" + table(
        ["", *head], rows
    )


def decode(m: Measured) -> str:
    found = m.file.get("decode", [])
    if not found:
        return ""
    at = {(r["name"], r["batch"], r["cached"]): r for r in found}
    cases = sorted({(r["batch"], r["cached"]) for r in found})
    least = {(r["batch"], r["cached"]): r["floor_us"] for r in found}
    names = sorted(dict.fromkeys(r["name"] for r in found), key=lambda n: n.startswith(OURS))
    rows = [["K and V at the speed of a copy", *[digits(least[c]) for c in cases]]]
    for name in names:
        cells = []
        for c in cases:
            row, sdpa = at.get((name, *c)), at.get((names[0], *c))
            ratio = f" ({digits(row['us'] / sdpa['us'])})" if row and sdpa and name != names[0] else ""
            cells.append("-" if row is None else digits(row["us"]) + ratio)
        rows.append([shown(name), *cells])
    return (
        "### Decoding\n\nOne query against a cache, microseconds (times SDPA's), by batch x cached tokens. Terms "
        "were made beforehand: T5's table and FIRE's network are not in these times.\n\n"
        + table(["", *[f"{b} x {n:,}" for b, n in cases]], rows)
    )


def training(folder: Path) -> str:
    """Tolerates rows that are not there, and says which failed."""
    f = json.loads((folder / "training-step-h200.json").read_text(encoding="utf-8"))
    given = json.loads((folder / "nanogpt-h200.json").read_text(encoding="utf-8"))
    speeds = given["tokens_per_second"]
    lengths = sorted({*map(int, speeds), *[r["length"] for r in f["rows"]]})

    def quoted(name: str, found: dict[str, float]) -> list[str]:
        return [f"{name} (given)", *[per_second(found[str(n)]) if str(n) in found else "-" for n in lengths]]

    rows = [[*quoted("nanoGPT, no bias", speeds), *[f"{given['peak_gib']}" for _ in lengths], ""]]
    rows += [[*quoted(name, found), *["-" for _ in lengths], ""] for name, found in given["others"].items()]
    beside = {r["length"]: r for r in f["rows"] if r.get("peer") and "error" not in r}
    for spec in dict.fromkeys(r["encoding"] for r in sorted(f["rows"], key=lambda r: not r.get("peer"))):
        at = {r["length"]: r for r in f["rows"] if r["encoding"] == spec}
        peer = any(r.get("peer") for r in at.values())
        row = [f"{spec}, no bias" if peer else f"`{spec}`"]
        slow: dict[int, float | None] = {}  # times nanoGPT's time a token; infinite where memory is over
        for n in lengths:
            r, against = at.get(n), speeds.get(str(n))
            if r is None or "error" in r:
                row.append("-" if r is None else "failed")
                slow[n] = None
                continue
            of = r["tokens_per_s"] / against if against else 0.0
            shares = [of] if of else []
            if n in beside and not peer and r.get("commit") == beside[n].get("commit"):
                shares.append(r["tokens_per_s"] / beside[n]["tokens_per_s"])
            said = ", ".join(f"{x:.0%}" for x in shares)
            row.append(per_second(r["tokens_per_s"]) + (f" ({said})" if said else ""))
            if of:
                slow[n] = 1 / of if r["peak_gib"] < given["peak_gib"] else float("inf")
        row += [f"{at[n]['peak_gib']:.1f}" if n in at and "error" not in at[n] else "-" for n in lengths]
        rows.append([*row, "" if peer else met(slow, 1.0)])
    notes = [f"- {note}: {names}" for note, names in _notes(f["rows"]).items()]
    if "history" in f:
        notes.append(f"- {f['history']}.")
    head = ["", *[f"{n:,}" for n in lengths], *[f"GiB, {n:,}" for n in lengths], "met"]
    made = made_by([row.get("commit") for row in f["rows"]])
    same = "; and of those of `benchmarks/plain_gpt2.py` in the same run" if beside else ""
    graphs = sorted(f"`{r['encoding']}` at {r['length']:,}" for r in f["rows"] if r.get("graphs"))
    if graphs and len(graphs) < len(f["rows"]):
        notes.append(f"- Launched as CUDA graphs, as `relpos train` does by now: {', '.join(graphs)}")
    return (
        f"### A training step\n\n`benchmarks/training_step.py` on one {f['machine']}, PyTorch "
        f"{f['versions']['torch']}{made}: {f['what']}. Tokens per second by length (of nanoGPT's{same}), and peak "
        f"memory. The rows marked as given were not measured here: they are figures given to us for the same kind of "
        f"GPU, an {given['machine']} (`results/nanogpt-h200.json`). Target: nanoGPT's speed, in less memory than its "
        f"{given['peak_gib']} GiB.\n\n"
        + table(head, rows)
        + ("\n\n" + "\n".join(notes) if notes else "")
        + through_train(f["rows"])
    )


def made_by(commits: list[str | None]) -> str:
    names = sorted({name[:7] for name in commits if name})
    return f", the code of {'commit' if len(names) == 1 else 'commits'} {', '.join(names)}" if names else ""


def through_train(found: list[Row]) -> str:
    """The same through the command; nothing where it was not timed."""
    at = {(r["encoding"], r["length"]): r for r in found if "train_ratio" in r}
    lengths = sorted({n for _, n in at})
    rows = []
    for spec in dict.fromkeys(spec for spec, _ in at):
        timed = [at.get((spec, n)) for n in lengths]
        cells = ["-" if r is None else f"{per_second(r['train_tokens_per_s'])} ({r['train_ratio']:.1%})" for r in timed]
        every = ["-" if r is None else f"{r['train_mean_ratio']:.1%}" for r in timed]
        over = {n: 1 / r["train_ratio"] for n, r in zip(lengths, timed, strict=True) if r is not None}
        rows.append([f"`{spec}`", *cells, *every, met(dict(over), 1 / TRAIN)])
    if not rows:
        return ""
    head = ["", *[f"{n:,}" for n in lengths], *[f"all steps, {n:,}" for n in lengths], "met"]
    return (
        "\n\n### Through `relpos train`\n\nThe same model and batch through the library's training: the Trainer, the "
        "loader over a prepared folder, `metrics.jsonl`; no checkpoint, no evaluation. Tokens per second from the "
        "median step (of the bare step's, in the same run), and of all steps, with the pauses in which every tenth "
        f"reads the losses back{made_by([r.get('train_commit') for r in at.values()])}. Target: {TRAIN:.0%} of the "
        "bare step.\n\n" + table(head, rows)
    )


def _notes(rows: list[Row]) -> dict[str, str]:
    """What the file says of some of its rows, and of which."""
    found: dict[str, list[str]] = {}
    for r in rows:
        waited = None
        if r.get("kernels_ms") and r["kernels_ms"] < BUSY * r["ms"]:
            waited = f"The GPU waited for the host: its kernels take {r['kernels_ms']:.1f} of {r['ms']:.1f} ms"
        for note in (r.get("note"), waited, r.get("error") and f"Failed: {' '.join(r['error'].split())[:120]}"):
            if note:
                found.setdefault(note[0].upper() + note[1:], []).append(f"`{r['encoding']}` at {r['length']:,}")
    return {note: ", ".join(names) for note, names in found.items()}


# The picture ----------------------------------------------------------------------------------------------------------


def digest(folder: Path = RESULTS) -> str:
    """Which results a picture shows: it is written into the picture."""
    return hashlib.sha256(Measured(folder).path.read_bytes()).hexdigest()


def picture(folder: Path = RESULTS, out: Path = PICTURE) -> Path:
    """Time and memory against length. Peers are black or grey and dashed, ours coloured; markers repeat it."""
    m = Measured(folder)
    looks: dict[str, Row] = {}
    for number, name in enumerate(n for n in m.names if not n.startswith(OURS)):
        grey, dashes = ("#000000", "#707070")[number % 2], ("--", ":", "-.")[number % 3]
        looks[name] = {"color": grey, "linestyle": dashes, "marker": "xd+<>ph8"[number % 8], "linewidth": 1.1}
    for number, name in enumerate(f"{OURS}{spec}" for spec in DRAWN):
        if name in m.names:
            looks[name] = {"color": COLOURS[number], "marker": curves.MARKERS[number], "linewidth": 1.5}
    with style():
        fig = Figure(figsize=(9.6, 6.2), layout="constrained")
        panels = {"both_ms": "forward + backward, ms", "extra_mib": "peak memory beyond the inputs, MiB"}
        for ax, (key, title) in zip(fig.subplots(1, 2), panels.items(), strict=True):
            for name, look in looks.items():
                found = [(n, m.rows[name, n, 64][key]) for n in m.lengths() if (name, n, 64) in m.rows]
                if found:
                    ax.plot(*zip(*found, strict=True), label=name, markersize=5, **look)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set_xticks(m.lengths(), [f"{n}" if n < 1024 else f"{n / 1024:g}k" for n in m.lengths()])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
            ax.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:,g}" if f"{y:e}"[0] in "25" else ""))
            ax.tick_params(axis="y", which="minor", labelsize=8)
            ax.set_xlabel("length N (tokens), 32k tokens a call")
            ax.set_title(title)
            ax.grid(True, color="0.9", linewidth=0.6)
        handles, labels = fig.axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8, handlelength=3)
        out.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(out, dpi=110, metadata={"Source": digest(folder)})
    return out
