"""The generated part of docs/study.md: every number in it comes from a file in results/, or is the paper's and cited.

`docs/study-reading.md` is written by hand once results exist. What it quotes it names instead: {blocks SPEC LENGTH},
{last SPEC LENGTH}, {growth SPEC LENGTH} (`blocks`, against the training length), {spread SPEC LENGTH} (`blocks`,
standard deviation over seeds, at the largest budget that has enough of them), {dense SPEC LENGTH} (`blocks`, the small
budget), {passkey SPEC LENGTH}, {speed SPEC}, {speed SPEC SEED}, {memory SPEC}, {loss SPEC} (at the end), {loss SPEC
STEP}, and {record NAME KEY KEY ...}, what those keys and indices lead to in results/NAME.json. A name without a result
is an error. HTML comments in it are left out.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from relpos import capture, encodings, figures, study
from relpos.errors import UserError
from relpos.evaluation import compare
from relpos.figures import curves

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "study"
READING = ROOT / "docs" / "study-reading.md"
IMAGES = ROOT / "docs" / "images"
NOTHING = "There are no results in `results/study` yet."

# "Context-aware Biases for Length Extrapolation" (arXiv 2503.08067), perplexity of GPT-2 Small on FineWeb-Edu-10B after
# 19k steps of 524,288 tokens at length 1024, and, with DAPE v2, at length 512.
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
PAPER: dict[str, tuple[float | None, ...]] = {
    "cable": (21.19, 20.63, 20.02, 19.24, 19.31, 19.28),
    "cable:form=unweighted": (21.42, 20.89, 20.34, 19.67, 19.81, 19.82),
    "alibi:slopes=geometric": (21.55, 20.99, 20.67, 21.23, 22.42, 22.89),
    "fire": (21.84, 21.26, 22.48, 53.25, 155.32, 333.91),
    "t5:form=clipped": (22.17, 21.57, 29.37, 131.36, 405.94, 757.36),
    "kerple:share=false": (21.46, 20.86, 20.38, 21.11, 26.59, 34.91),
    "rope": (21.43, 20.87, 58.59, 225.78, 554.12, 957.87),
    "learned": (22.16, 21.56, None, None, None, None),
    "sinusoidal:scale=0.1": (22.38, 21.83, 207.53, 956.41, 2376.51, 3589.97),
}
PAPER_TRAINED = 1024
PAPER_DENSE_LENGTHS = (512, 1024, 2048, 4096, 8192)
PAPER_DENSE: dict[str, tuple[float, ...]] = {
    "cable": (21.17, 20.72, 20.23, 19.60, 19.87),
    "kerple:share=false": (21.41, 21.12, 22.58, 28.04, 39.38),
    "dape:version=2,base=cable": (20.41, 19.91, 19.30, 18.55, 18.63),
    "dape:version=2,base=kerple": (20.56, 20.07, 19.51, 18.79, 18.92),
}
ENOUGH = 3  # seeds that a standard deviation is taken of
Result = dict[str, Any]


class Results:
    """The results of a folder, sorted: `main` (the largest budget, one seed), `dense` (what needs dense attention, and
    what it is built around at the same budget and seed), `noise` (encodings and budgets with several seeds), the rest.
    The two tables show one seed each, and what other budgets and seeds lie beside it changes neither."""

    def __init__(self, folder: Path):
        self.folder = folder
        order = {spec: number for number, spec in enumerate(study.ENCODINGS)}
        self.all = sorted(
            study.load(folder), key=lambda v: (order.get(v["encoding"], len(order)), v["encoding"], v["seed"])
        )
        self.main = self._table([v for v in self.all if v["group"] == "main"])
        rescoring = self._table([v for v in self.all if v["run"]["implementation"] == "dense"])
        wanted = {spec for v in rescoring for spec in (v["encoding"], study.base_of(v["encoding"]))}
        places = {(v["budget"], v["seed"], tested(v)) for v in rescoring}
        self.dense = [v for v in self.all if v["encoding"] in wanted and (v["budget"], v["seed"], tested(v)) in places]
        groups: dict[tuple[str, int, str], list[Result]] = {}
        for v in self.all:
            groups.setdefault((v["encoding"], v["budget"], tested(v)), []).append(v)
        self.noise = [group for group in groups.values() if len(group) >= ENOUGH]
        # What a reader takes for the same setting must be the same.
        for group in (self.main, self.dense, *self.noise):
            for key in ("size", "length", "steps", "tokens_per_step", "learning_rate"):
                if len({v["recipe"][key] for v in group}) > 1:
                    raise UserError(f"{folder}: the results of one table differ in {key}")
            if len({v["data"]["fingerprint"] for v in group}) > 1:
                raise UserError(f"{folder}: the results of one table were trained on different data")
            if len({tested(v) for v in group}) > 1:
                raise UserError(f"{folder}: the results of one table were tested on different text or lengths")

    def _table(self, found: list[Result]) -> list[Result]:
        """Those with the largest budget, and of them those with the most usual seed."""
        found = [v for v in found if v["budget"] == max(x["budget"] for x in found)]
        count = Counter(v["seed"] for v in found)
        return [v for v in found if v["seed"] == max(count, key=lambda seed: (count[seed], -seed))]

    def rest(self) -> list[Result]:
        shown = {id(v) for group in (self.main, self.dense, *self.noise) for v in group}
        return [v for v in self.all if id(v) not in shown]

    def over_seeds(self, spec: str) -> list[Result]:
        """All seeds of an encoding, at the largest budget that has enough of them."""
        found = [group for group in self.noise if group[0]["encoding"] == spec]
        return max(found, key=lambda group: group[0]["budget"], default=[])

    def one(self, spec: str, group: list[Result] | None = None) -> Result:
        for v in self.main if group is None else group:
            if v["encoding"] == spec:
                return v
        raise UserError(f"the reading of the study names {spec}, and {self.folder} has no such result")


def tested(v: Result) -> str:
    """The main text and the lengths of a result's tests: perplexities on anything else are not comparable with it."""
    return f"{v['asked']['texts'][:1]} {v['asked']['lengths']}"


def page(folder: Path = RESULTS, reading: Path = READING) -> str:
    """The Markdown."""
    r = Results(folder)
    if not r.main:
        return NOTHING
    parts = [setting(r), perplexities(r), growth(r), pictures_text(r), other_texts(r), context(r), keys(r)]
    parts += [cost(r), seeds(r), dense(r), rest(r), heads_text(r), read(r, reading)]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def pictures(folder: Path = RESULTS, out: Path = IMAGES) -> list[Path]:
    """The plots, small enough to commit. None where there are no results."""
    r = Results(folder)
    if not r.main:
        return []
    out.mkdir(parents=True, exist_ok=True)
    made = {
        "study-perplexity": curves.perplexity(labelled(r.main), intervals=False),
        "study-loss-by-position": curves.loss_by_position(labelled(r.main)),
        "study-training-loss": curves.training_loss(
            [(v["encoding"], v["loss"], v["recipe"]["tokens_per_step"]) for v in r.main],
            r.main[0]["data"]["unigram_entropy"],
        ),
    }
    if near(r):
        places = [r.main.index(v) for v in near(r)]
        made["study-perplexity-near"] = curves.perplexity(labelled(near(r)), intervals=False, places=places)
    if captured(r):
        held = [capture.load(path) for path in captured(r)]
        alike = Counter(one.title for one in held)
        for one in held:  # two forms of one encoding need more than its title
            if alike[one.title] > 1:
                one.title = one.specs[0].replace(":", "\n", 1)
        made["study-heads"] = figures.figure(*held)
    written = []
    for name, fig in made.items():
        path = out / f"{name}.png"
        fig.savefig(path, dpi=75 if name == "study-heads" else 110)
        written.append(path)
    return written


# Parts of the page ----------------------------------------------------------------------------------------------------


def labelled(group: list[Result], text: int = 0) -> curves.Results:
    return [(v["encoding"], v["evaluation"][text]) for v in group]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def names(values: list[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def setting(r: Results) -> str:
    v = r.main[0]
    fixed, run, data = v["recipe"], v["run"], v["data"]
    commits = [x["git"]["commit"][:10] + (" with changes" if x["git"]["changed"] else "") for x in r.all if x["git"]]
    shapes = names(
        [f"{x['run']['rows']} x {x['recipe']['length']} x {x['run']['accumulation']}" for x in (*r.main, *r.dense)]
    )
    lines = [
        f"- Model: `{fixed['size']}`, {v['model']['parameters'] - v['model']['encoding_parameters']:,} parameters "
        f"without the encoding's; {run['dtype']}, {'compiled' if run['compiled'] else 'not compiled'}.",
        f"- Training: {fixed['steps']:,} steps of {fixed['tokens_per_step']:,} tokens at length {fixed['length']} "
        f"({fixed['tokens']:,} tokens, {data['epochs']:.2f} passes over `{data['name']}`), seed {fixed['seed']}, the "
        f"same text in the same order for all; learning rate {fixed['learning_rate']:g}, warm-up of "
        f"{fixed['warmup_steps']} steps, then {fixed['schedule'].split(', ')[-1]}. {fixed['optimizer']}.",
        f"- Test texts: {names([told(e) for e in v['evaluation']])}.",
        f"- Machine: {names([x['device'] for x in r.all])}; PyTorch {names([x['versions']['torch'] for x in r.all])}; "
        f"windows x tokens x passes in a step: {shapes}; commit {names(commits) or 'unknown'}.",
        f"- {len(r.all)} models in all, {sum(x['recipe']['tokens'] for x in r.all) / 1e6:,.0f}M tokens of training.",
    ]
    return "## What was run\n\n" + "\n".join(lines)


def told(e: Result) -> str:
    whole = e["data"].get("whole_text", e["data"])
    of = f" of {whole['tokens']:,}" if whole["tokens"] != e["data"]["tokens"] else ""
    return f"`{e['data']['source']}` ({e['data']['tokens']:,}{of} tokens)"


def lengths_of(group: list[Result], protocol: str, text: int = 0) -> list[int]:
    return sorted({row["length"] for _, e in labelled(group, text) for row in e["protocols"][protocol]["results"]})


def rows_of(group: list[Result], protocol: str, text: int, lengths: list[int]) -> dict[str, list[str]]:
    """The cells of each encoding; bold: the best at that length and all that cannot be told apart from it."""
    both = compare.Comparison(perplexity=labelled(group, text))
    best = {n: compare.best_of(both, protocol, n) for n in lengths}
    found = {}
    for label, e in both.perplexity:
        cells = []
        for n in lengths:
            row = compare.row_of(e, protocol, n)
            if row is None or row["status"] != "ok":
                cells.append("-")
            else:
                shown = compare.shown(row["perplexity"])
                cells.append(f"**{shown}**" if label in best[n] else shown)
        found[label] = cells
    return found


def perplexities(r: Results) -> str:
    lengths = lengths_of(r.main, "blocks")
    cells = rows_of(r.main, "blocks", 0, lengths)
    # The paper's last length is 15,360; ours, the next power of two, stands above it.
    paper_at = {n: i for n in lengths for i, p in enumerate(PAPER_LENGTHS) if p == n or (n == 16384 and p == 15360)}
    rows = []
    for v in r.main:
        spec = v["encoding"]
        rows.append([f"{v['title']} `{spec}`", "ours", *cells[spec]])
        if spec in PAPER:
            printed = [PAPER[spec][paper_at[n]] if n in paper_at else None for n in lengths]
            rows.append(["", "paper", *["-" if x is None else f"{x:.2f}" for x in printed]])
    last = lengths_of(r.main, "last")
    also = rows_of(r.main, "last", 0, last)
    entry, other = (r.main[0]["evaluation"][0]["protocols"][p] for p in ("blocks", "last"))
    head = ["encoding", "", *[f"{n} (paper: 15360)" if n == 16384 else str(n) for n in lengths]]
    why = compare.reasons(compare.Comparison(perplexity=labelled(r.main)))
    return (
        f"## Perplexity by length\n\n{told(r.main[0]['evaluation'][0])}. Bold: the best of our column and all that "
        "cannot be told apart from it (95% interval of the paired difference over the tokens of the text; how much "
        "another seed would change is not in it). The paper's numbers are those of GPT-2 "
        "Small on FineWeb-Edu ([arXiv 2503.08067](https://arxiv.org/abs/2503.08067)): other text, about 10 billion "
        "tokens, trained at 1024. Compare orders and growth, not values.\n\n"
        f"### `blocks`\n\n{entry['statement']} {entry['scored']['tokens']:,} tokens count.\n\n{table(head, rows)}\n\n"
        f"### `last`\n\n{other['statement']} {other['scored']['tokens']:,} tokens count.\n\n"
        + table(["encoding", *map(str, last)], [[f"`{label}`", *row] for label, row in also.items()])
        + ("\n\nDashes:\n\n" + "\n".join(f"- {line}" for line in why) if why else "")
    )


def grown(v: Result, length: int) -> float | None:
    """Perplexity (`blocks`) at a length over that at the training length."""
    a, b = study.at(v, "blocks", length), study.at(v, "blocks", v["recipe"]["length"])
    return None if a is None or b is None else math.exp(min(a["loss"] - b["loss"], 500))


def growth(r: Results) -> str:
    trained = r.main[0]["recipe"]["length"]
    times = [n // trained for n in lengths_of(r.main, "blocks") if n > trained and n % trained == 0]
    rows = []
    for v in r.main:
        spec = v["encoding"]
        ratios = [grown(v, m * trained) for m in times]
        rows.append([f"`{spec}`", "ours", *["-" if x is None else ratio(x) for x in ratios]])
        if spec in PAPER:
            base = PAPER[spec][PAPER_LENGTHS.index(PAPER_TRAINED)]
            at = {n // PAPER_TRAINED: x for n, x in zip(PAPER_LENGTHS, PAPER[spec], strict=True)}
            found = [at.get(m, at.get(15) if m == 16 else None) for m in times]
            rows.append(["", "paper", *["-" if x is None or base is None else ratio(x / base) for x in found]])
        if spec in PAPER_DENSE and trained == PAPER_DENSE_LENGTHS[0]:
            at = dict(zip(PAPER_DENSE_LENGTHS, PAPER_DENSE[spec], strict=True))
            found = [at.get(m * trained) for m in times]
            rows.append(["", "paper, trained at 512", *["-" if x is None else ratio(x / at[trained]) for x in found]])
    return (
        "### Beyond the training length\n\nPerplexity (`blocks`) at so many times the training length, divided by that "
        f"at the training length: {trained} here, {PAPER_TRAINED} in the paper (whose 16 is 15). It also has "
        f"two models that were trained at {PAPER_DENSE_LENGTHS[0]}.\n\n"
        + table(["encoding", "", *[f"x {m}" for m in times]], rows)
    )


def ratio(x: float) -> str:
    return f"{x:.3f}" if x < 10 else f"{x:.1f}" if x < 1000 else f"{x:.3g}"


def near(r: Results) -> list[Result]:
    """The encodings that stay within half again the best at every length, where some do not: on a scale for all their
    differences would not be seen."""

    def loss(v: Result, n: int) -> float:
        row = study.at(v, "blocks", n)
        return math.inf if row is None else row["loss"]

    lengths = lengths_of(r.main, "blocks")
    best = {n: min(loss(v, n) for v in r.main) for n in lengths}
    found = [v for v in r.main if all(loss(v, n) <= best[n] + math.log(1.5) for n in lengths)]
    return found if 1 < len(found) < len(r.main) else []


def pictures_text(r: Results) -> str:
    close = "![Those that stay near the best](images/study-perplexity-near.png)\n\n" if near(r) else ""
    return (
        f"![Perplexity by window length](images/study-perplexity.png)\n\n{close}"
        "![Loss by position in the window](images/study-loss-by-position.png)\n\n"
        "![Training loss of every step](images/study-training-loss.png)"
    )


def other_texts(r: Results) -> str:
    parts = []
    for number in range(1, min(len(v["evaluation"]) for v in r.main)):
        e = r.main[0]["evaluation"][number]
        parts.append(f"## The same on another text\n\n{told(e)}, with the same protocols.")
        for protocol in ("blocks", "last"):
            lengths = lengths_of(r.main, protocol, number)
            cells = rows_of(r.main, protocol, number, lengths)
            scored = e["protocols"][protocol]["scored"]["tokens"]
            parts.append(f"`{protocol}`, {scored:,} tokens:")
            parts.append(
                table(["encoding", *map(str, lengths)], [[f"`{label}`", *row] for label, row in cells.items()])
            )
    return "\n\n".join(parts)


def context(r: Results) -> str:
    many = range(min(len(v["evaluation"]) for v in r.main))
    rows = []
    for v in r.main:
        row = [f"`{v['encoding']}`"]
        for number in many:
            e = v["evaluation"][number]["effective_context"]
            if e["length"] is None:
                row += ["-", "-"]
            else:
                row += [str(e["length"]), str(e["first_that_hurts"] or "none")]
        rows.append(row)
    head = ["encoding"]
    for number in many:
        source = r.main[0]["evaluation"][number]["data"]["source"]
        head += [f"helps up to, {source}", "first that hurts"]
    rule = r.main[0]["evaluation"][0]["effective_context"]["rule"]
    return f"## Effective context\n\n{rule}\n\n{table(head, rows)}"


def keys(r: Results) -> str:
    first = r.main[0]["passkey"]
    lengths = [row["length"] for row in first["results"] if any(_ok(v, row["length"]) for v in r.main)]
    if not lengths:
        return ""
    rows = []
    for v in r.main:
        cells = []
        for n in lengths:
            row = _ok(v, n)
            cells.append(
                "-" if row is None else f"{100 * row['digits_first_of_ten']:.0f}% / {100 * row['greedy_key']:.0f}%"
            )
        rows.append([f"`{v['encoding']}`", *cells])
    s = first["settings"]
    prompts = len(s["depths"]) * s["keys"]
    return (
        "## Passkey\n\nDigits of the key more likely than the nine others (chance: 10%) / whole keys that greedy "
        f"decoding would find. {prompts} prompts at each length, {s['keys']} at each of the depths "
        f"{', '.join(f'{100 * d:g}%' for d in s['depths'])}.\n\n" + table(["encoding", *map(str, lengths)], rows)
    )


def _ok(v: Result, length: int) -> Result | None:
    return next((row for row in v["passkey"]["results"] if row["length"] == length and row["status"] == "ok"), None)


def elsewhere(v: Result) -> tuple[float | None, str]:
    """nanoGPT's speed where it is known in the same setting, and a sentence about it."""
    known = json.loads((ROOT / "results" / "nanogpt-h200.json").read_text(encoding="utf-8"))
    length = str(v["recipe"]["length"])
    speed = known["tokens_per_second"].get(length)
    if speed is None or (known["machine"], known["size"]) != (v["device"], v["recipe"]["size"]):
        return None, ""
    authors = known["others"]["the CABLE authors' code"][length]
    return speed, (
        f" nanoGPT, which has no bias, trains this model at {thousands(speed)} tokens/s in {known['peak_gib']} GiB "
        f"with half as many tokens in a pass, the CABLE authors' code at {thousands(authors)}: figures given to us for "
        "such a GPU, not measured here."
    )


def cost(r: Results) -> str:
    against, about = elsewhere(r.main[0])
    rows = []
    for v in (*r.main, *[x for x in r.dense if x["run"]["implementation"] == "dense"]):
        speed, whole, memory = v["tokens_per_second"], v["tokens_per_second_whole_run"], v["peak_memory_bytes"]
        row = [f"`{v['encoding']}`", v["run"]["implementation"], f"{v['model']['encoding_parameters']:,}"]
        row += ["-" if speed is None else thousands(speed), "-" if whole is None else thousands(whole)]
        if against is not None:
            row.append("-" if speed is None else f"{100 * speed / against:.0f}%")
        row += ["-" if memory is None else f"{memory / 2**30:.1f}", f"{v['recipe']['tokens'] / 1e6:.1f}M"]
        row += [f"{v['seconds'][key]:.0f}" for key in ("prepare", "train", "test")]
        rows.append(row)
    head = ["encoding", "attention", "its parameters", "tokens/s", "whole run"]
    head += ["of nanoGPT"] if against is not None else []
    head += ["peak memory, GiB", "tokens", "ready after, s", "training, s", "tests, s"]
    note = ""
    if any(v["run"]["ahead"] for v in r.main):
        note = " While a model trained, the next one compiled on the same machine."
    note += about
    return (
        "## Speed and memory\n\nTokens per second are the median over the run, and the mean over it from its second "
        f"step to its last.{note} Peak memory is what PyTorch's allocator held for one process.\n\n" + table(head, rows)
    )


def thousands(speed: float) -> str:
    return f"{speed / 1000:,.0f}k" if speed >= 10_000 else f"{speed:,.0f}"


def seeds(r: Results) -> str:
    if not r.noise:
        return ""
    every = [v for group in r.noise for v in group]
    lengths = lengths_of(every, "blocks")

    def values(group: list[Result]) -> list[list[float]]:
        """By column, of every seed; empty where one has none."""
        columns = []
        for n in lengths:
            found = [row["perplexity"] for v in group if (row := study.at(v, "blocks", n)) and row["perplexity"]]
            columns.append(found if len(found) == len(group) else [])
        return [*columns, [v["train_loss"] for v in group]]

    def lines(name: str, group: list[Result], columns: list[list[float]]) -> list[list[str]]:
        cells = [
            spread(found, 2 if n < len(lengths) else 4) if found else ("-", "-") for n, found in enumerate(columns)
        ]
        about = [name, study.short(group[0]["budget"]), names([str(v["seed"]) for v in group])]
        middle, ends = [x for x, _ in cells], [x for _, x in cells]
        return [[*about, "mean ± sd", *middle], ["", "", "", "range", *ends]]

    rows = []
    for group in r.noise:
        rows += lines(f"`{group[0]['encoding']}`", group, values(group))
    for n, one in enumerate(r.noise):
        for other in r.noise[n + 1 :]:
            if [(v["budget"], v["seed"]) for v in one] == [(v["budget"], v["seed"]) for v in other]:
                less = [
                    [x - y for x, y in zip(*pair, strict=False)]
                    for pair in zip(values(one), values(other), strict=True)
                ]
                rows += lines(f"`{one[0]['encoding']}` less `{other[0]['encoding']}`", one, less)
    texts = names([told(v["evaluation"][0]) for v in every])
    return (
        "## Noise between seeds\n\nA seed draws the initial weights and the order of the text. Mean and standard "
        "deviation over the seeds, and smallest to largest, of the perplexity (`blocks`) and of the final training "
        "loss; and of the difference between two encodings, seed by seed. One that is not clearly larger than this is "
        f"none; the noise of one budget need not be that of another. {texts}.\n\n"
        + table(["encoding", "tokens", "seeds", "", *map(str, lengths), "training loss"], rows)
    )


def spread(found: list[float], digits: int) -> tuple[str, str]:
    """Mean and standard deviation, and the range."""
    return (
        f"{statistics.mean(found):.{digits}f} ± {statistics.stdev(found):.{digits}f}",
        f"{min(found):.{digits}f} to {max(found):.{digits}f}",
    )


def dense(r: Results) -> str:
    if not r.dense:
        return ""
    v = r.dense[0]
    fixed = v["recipe"]
    lengths = lengths_of(r.dense, "blocks")
    cells = rows_of(r.dense, "blocks", 0, lengths)
    rows = []
    for x in r.dense:
        spec = x["encoding"]
        rows.append([f"{x['title']} `{spec}`", "ours", *cells[spec]])
        if spec in PAPER_DENSE:
            at = dict(zip(PAPER_DENSE_LENGTHS, PAPER_DENSE[spec], strict=True))
            rows.append(["", "paper", *[f"{at[n]:.2f}" if n in at else "-" for n in lengths]])
    based = any(x["run"]["implementation"] != "dense" for x in r.dense)
    bases = "; so did, to compare with, the encodings they are built around" if based else ""
    return (
        "## Encodings that need dense attention\n\nThey rescore whole rows of scores, so no fused kernel runs them, "
        f"and they got {fixed['tokens'] / 1e6:.1f}M tokens ({fixed['steps']} steps){bases}. "
        "Do not compare this table with the ones above: dense attention is slow, so "
        f"the test is shorter as well: {told(v['evaluation'][0])}, `blocks`, up to {lengths[-1]}. The paper's numbers: "
        "FineWeb-Edu, trained at 512.\n\n" + table(["encoding", "", *map(str, lengths)], rows)
    )


def rest(r: Results) -> str:
    """Results with other budgets, seeds or tests, none of which is left unsaid."""
    found = r.rest()
    if not found:
        return ""
    rows = []
    for v in found:
        row = study.at(v, "blocks", v["recipe"]["length"])
        shown = "-" if row is None else compare.shown(row["perplexity"])
        rows.append([f"`{v['encoding']}`", f"{v['recipe']['tokens'] / 1e6:.1f}M", str(v["seed"]), shown])
    return "## Other budgets and seeds\n\n" + table(
        ["encoding", "tokens", "seed", "perplexity at the training length"], rows
    )


def captured(r: Results) -> list[Path]:
    """The captures of the main group and of what is dense, where they lie beside the results."""
    group = [*r.main, *[x for x in r.dense if x["run"]["implementation"] == "dense"]]
    paths = [r.folder / f"{study.Job(v['encoding'], v['seed'], v['budget'], False).name}.safetensors" for v in group]
    return [path for path in paths if path.is_file()]


def heads_text(r: Results) -> str:
    link = "What each head of the last layer does with position is drawn in [figures.md](figures.md), head by head."
    if not captured(r):
        return f"## The figures\n\n{link}"
    picture = "![One row per encoding, one map per head](images/study-heads.png)"
    but = ", those that need dense attention after their smaller budget" if r.dense else ""
    return f"## The figures\n\n{link} All of them at a glance{but}:\n\n{picture}"


# The reading ----------------------------------------------------------------------------------------------------------


def read(r: Results, path: Path) -> str:
    if not path.is_file():
        return ""
    text = re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).strip()
    return re.sub(r"\{(\w+) ([^{}]+)\}", lambda m: quoted(r, m[1], m[2].split()), text)


def quoted(r: Results, what: str, words: list[str]) -> str:
    """A number that the reading names."""
    if what == "record":
        return recorded(*words)
    spec, length = words[0], int(words[1]) if len(words) > 1 else 0
    wrong = UserError(f"the reading of the study quotes {{{what} {' '.join(words)}}}, and there is no such result")
    if what in ("blocks", "last", "dense"):
        row = study.at(
            r.one(spec, r.dense if what == "dense" else None), "last" if what == "last" else "blocks", length
        )
        if row is None:
            raise wrong
        return compare.shown(row["perplexity"])
    if what == "spread":
        rows = [study.at(x, "blocks", length) for x in r.over_seeds(spec)]
        values = [row["perplexity"] for row in rows if row is not None]
        if len(values) < ENOUGH:
            raise wrong
        return f"{statistics.stdev(values):.2f}"
    v = r.one(spec)
    if what == "growth":
        found = grown(v, length)
        if found is None:
            raise wrong
        return ratio(found)
    if what == "passkey":
        row = _ok(v, length)
        if row is None:
            raise wrong
        return f"{100 * row['digits_first_of_ten']:.0f}%"
    if what == "speed" and len(words) > 1:
        v = next((x for x in r.over_seeds(spec) if x["seed"] == length), {"tokens_per_second": None})
    if what == "speed" and v["tokens_per_second"]:
        return thousands(v["tokens_per_second"])
    if what == "memory" and v["peak_memory_bytes"]:
        return f"{v['peak_memory_bytes'] / 2**30:.1f} GiB"
    if what == "loss" and length <= len(v["loss"]):
        return f"{v['loss'][length - 1]:.2f}" if length else f"{v['train_loss']:.3f}"
    raise wrong


def recorded(name: str, *keys: str) -> str:
    """A value of results/NAME.json."""
    try:
        value: Any = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for key in keys:
            value = value[int(key) if isinstance(value, list) else key]
    except (OSError, LookupError, ValueError, TypeError):
        quote = f"{{record {' '.join([name, *keys])}}}"
        raise UserError(f"the reading of the study quotes {quote}, and there is no such result") from None
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def bare_numbers(text: str) -> list[str]:
    """Measured-looking numbers (with a decimal point) that a reading has typed out instead of naming."""
    text = re.sub(r"<!--.*?-->|\{\w+ [^{}]+\}", "", text, flags=re.DOTALL)
    text = re.sub(r"https?://\S+|arXiv \d+\.\d+", "", text)
    return re.findall(r"\d+\.\d+", text)


def ship(folder: Path, shipped: Path, specs: tuple[str, ...]) -> list[Path]:
    """Copy the captures of a study to where the package keeps them: for each spec that of the largest budget, lowest
    seed. Where the study has none the one that is there stays; without one the package would be incomplete."""
    chosen: dict[str, Path] = {}
    for spec in specs:
        found = [v for v in study.load(folder) if v["encoding"] == spec]
        found.sort(key=lambda v: (-v["budget"], v["seed"]))
        paths = [folder / f"{study.Job(spec, v['seed'], v['budget'], False).name}.safetensors" for v in found]
        path = next((p for p in paths if p.is_file()), None)
        if path is not None:
            chosen[spec] = path
        elif not (shipped / f"{encodings.slug(spec)}.safetensors").is_file():
            raise UserError(f"neither {folder} nor {shipped} holds a capture of {spec}")
    written = []
    for spec, path in chosen.items():
        held = capture.load(path)
        held.name = encodings.slug(spec)
        written.append(held.save(shipped / f"{held.name}.safetensors"))
    return written
