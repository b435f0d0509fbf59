"""Result files in, the paper's table out: one row per length, one column per model; Markdown, CSV and LaTeX.

Perplexities are compared only where they can be: files that differ in text, counted tokens or protocol get a warning in
the table itself. In each row the best value is bold, and with it every value that cannot be told apart from it: the 95%
interval of the paired difference in loss, cluster by cluster, holds zero. A dash is a length that was not measured; why
stands below.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relpos.errors import UserError, several
from relpos.evaluation import result
from relpos.evaluation.statistics import clustered_mean
from relpos.files import write_text


@dataclass
class Comparison:
    """Result files with a label each. `perplexity` and `passkey` hold (label, value) pairs in the order given."""

    perplexity: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    passkey: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # messages of files that could not be read


def load(files: list[str | Path], labels: list[str] | None = None) -> Comparison:
    """Read result files, and folders of them. A file that cannot be read is reported and left out."""
    paths: list[Path] = []
    for file in map(Path, several("files", files)):
        if file.is_dir():
            found = sorted(p for p in file.glob("*.json") if _ours(p))
            if not found:
                raise UserError(f"{file} holds no result file of `relpos evaluate` or `relpos passkey`")
            paths += found
        else:
            paths.append(file)
    comparison = Comparison()
    values: list[dict[str, Any]] = []
    read: list[Path] = []
    for path in dict.fromkeys(paths):
        try:
            values.append(result.read_json(path))
            read.append(path)
        except UserError as error:
            comparison.unread.append(str(error))
    if not values:
        raise UserError(comparison.unread[0] if comparison.unread else "name at least one result file")
    names = _labels(values, read, labels)
    for name, value in zip(names, values, strict=True):
        (comparison.perplexity if value["format"] == result.PERPLEXITY else comparison.passkey).append((name, value))
    comparison.warnings = _warnings(comparison)
    return comparison


def _ours(path: Path) -> bool:
    try:
        result.read_json(path)
    except UserError as error:
        return "format version" in str(error)
    return True


def _labels(values: list[dict[str, Any]], paths: list[Path], labels: list[str] | None) -> list[str]:
    """Given labels, else the encoding of our models where it tells them apart, else the model's name; of results of one
    model with its file. No two results of a kind have the same."""
    if labels:
        if len(labels) != len(values):
            raise UserError(f"{len(labels)} labels for {len(values)} result files")
        pairs = [(label, value["format"]) for label, value in zip(labels, values, strict=True)]
        for label, form in pairs:
            if pairs.count((label, form)) > 1:
                raise UserError(f"the label {label!r} is given twice: nobody could tell the columns apart")
        return labels
    names: list[str] = [""] * len(values)
    for form in {v["format"] for v in values}:
        at = [i for i, v in enumerate(values) if v["format"] == form]
        specs = [values[i]["model"].get("encoding") for i in at]
        chosen = [
            spec if isinstance(spec, str) and specs.count(spec) == 1 else values[i]["model"]["name"]
            for i, spec in zip(at, specs, strict=True)
        ]
        for i, name in zip(at, chosen, strict=True):
            double = chosen.count(name) > 1
            names[i] = f"{name} ({values[i]['model']['fingerprint'][7:13]})" if double else name
        alike = [names[i] for i in at]
        for i in at:
            if alike.count(names[i]) > 1:
                names[i] += f", {paths[i]}"
    return names


def _warnings(comparison: Comparison) -> list[str]:
    """What keeps the columns from being compared, in words."""
    found = []
    values = comparison.perplexity
    if len({v["data"]["fingerprint"] for _, v in values}) > 1:
        same = {v["data"].get("file_sha256") for _, v in values}
        if len(same) == 1 and None not in same:
            found.append(
                "The models cut the same text into different tokens: perplexities per token cannot be compared between "
                "columns; bits per byte, in comparison.csv, can."
            )
        else:
            found.append("The columns were scored on different texts: they cannot be compared.")
    one_text = not found
    for protocol in protocols(comparison):
        scored = {v["protocols"][protocol]["scored"]["fingerprint"] for _, v in values if protocol in v["protocols"]}
        if len(scored) > 1 and one_text:  # else that is reason enough
            found.append(
                f"`{protocol}`: the columns count different tokens (other lengths or settings were asked for)."
            )
        stated = {v["protocols"][protocol]["statement"] for _, v in values if protocol in v["protocols"]}
        if len(stated) > 1:
            found.append(f"`{protocol}`: the columns used different settings; each file states its own.")
    dtypes = {v["model"]["dtype"] for _, v in values}
    if len(dtypes) > 1:
        found.append(f"The columns were computed in different number formats: {', '.join(sorted(dtypes))}.")
    return found


def protocols(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(p for _, value in comparison.perplexity for p in value["protocols"]))


def lengths(comparison: Comparison, protocol: str) -> list[int]:
    return sorted(
        {r["length"] for _, v in comparison.perplexity for r in v["protocols"].get(protocol, {}).get("results", [])}
    )


def row_of(value: dict[str, Any], protocol: str, length: int) -> dict[str, Any] | None:
    """The line of one model at one length; None where it was never asked for."""
    rows = value["protocols"].get(protocol, {}).get("results", [])
    return next((r for r in rows if r["length"] == length), None)


def best_of(comparison: Comparison, protocol: str, length: int) -> set[str]:
    """Labels of the lowest perplexity and of all that cannot be told apart from it."""
    rows = {}
    for label, value in comparison.perplexity:
        row = row_of(value, protocol, length)
        if row is not None and row["status"] == "ok":
            rows[label] = (row, value["protocols"][protocol], value["data"]["fingerprint"])
    if len(rows) < 2:
        return set()
    first = min(rows, key=lambda label: rows[label][0]["loss"])
    best, entry, text = rows[first]
    found = {first}
    for label, (row, other, other_text) in rows.items():
        paired = other_text == text and other["scored"]["fingerprint"] == entry["scored"]["fingerprint"]
        if label == first or not paired or other["clusters"]["tokens"] != entry["clusters"]["tokens"]:
            continue
        difference = clustered_mean(
            np.asarray(row["cluster_loss"]) - np.asarray(best["cluster_loss"]), np.asarray(entry["clusters"]["tokens"])
        )
        if difference.low is not None and difference.low <= 0:
            found.add(label)
    return found


def shown(perplexity: float | None) -> str:
    if perplexity is None:
        return "> 1e300"
    return f"{perplexity:.2f}" if perplexity < 1e5 else f"{perplexity:.2e}"


def _cells(comparison: Comparison, protocol: str, length: int, intervals: bool = False) -> list[tuple[str, bool]]:
    """(text, bold) of each column; an empty text where the length was never asked for."""
    best = best_of(comparison, protocol, length)
    cells = []
    for label, value in comparison.perplexity:
        row = row_of(value, protocol, length)
        if row is None:
            cells.append(("", False))
        elif row["status"] != "ok":
            cells.append(("-", False))
        else:
            text = shown(row["perplexity"])
            low, high = row["ci95"]
            if intervals and low is not None and high is not None:
                text += f" ({shown(low)} to {shown(high)})"
            cells.append((text, label in best))
    return cells


def reasons(comparison: Comparison) -> list[str]:
    """Why there are dashes, each reason once."""
    found: dict[tuple[str, str], set[int]] = {}
    for label, value in comparison.perplexity:
        for entry in value["protocols"].values():
            for row in entry["results"]:
                if row["status"] != "ok":
                    found.setdefault((label, row["reason"]), set()).add(row["length"])
    return [f"{label} at {', '.join(map(str, sorted(at)))}: {why}" for (label, why), at in found.items()]


def _cell(text: str) -> str:
    """Text for a table, in which a bar would begin another cell."""
    return text.replace("|", "\\|")


def markdown(comparison: Comparison) -> str:
    """The whole comparison as a page."""
    lines: list[str] = []
    labels = [label for label, _ in comparison.perplexity]
    escaped = [_cell(label) for label in labels]
    lines += [f"**Warning.** {warning}\n" for warning in comparison.warnings]
    for protocol in protocols(comparison):
        entry = next(v["protocols"][protocol] for _, v in comparison.perplexity if protocol in v["protocols"])
        lines += [
            f"## Perplexity by length: `{protocol}`\n",
            f"{entry['statement']} {entry['scored']['tokens']:,} tokens count.\n",
        ]
        for intervals in (False, True):
            lines.append("With 95% intervals:\n" if intervals else "")
            lines.append("| T | " + " | ".join(escaped) + " |")
            lines.append("|---|" + "---|" * len(labels))
            for T in lengths(comparison, protocol):
                cells = [f"**{text}**" if bold else text for text, bold in _cells(comparison, protocol, T, intervals)]
                lines.append(f"| {T} | " + " | ".join(cells) + " |")
            lines.append("")
    if comparison.perplexity:
        if len(labels) > 1:
            lines.append(
                "Bold: the best of a row and all that cannot be told apart from it (95% interval of the paired "
                "difference).\n"
            )
        why = reasons(comparison)
        if why:
            lines += ["Dashes:\n", *[f"- {one}" for one in why], ""]
        method = comparison.perplexity[0][1]["interval"]["method"]
        clusters = {
            p: comparison.perplexity[0][1]["protocols"][p]["clusters"]["what"]
            for p in comparison.perplexity[0][1]["protocols"]
        }
        lines.append(f"Intervals: {method}. Clusters: {'; '.join(f'`{p}`: {what}' for p, what in clusters.items())}.\n")
        lines += _effective(comparison)
        lines += _models(comparison)
    if comparison.passkey:
        lines += _passkey(comparison)
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip() + "\n"


def _effective(comparison: Comparison) -> list[str]:
    found = [(label, value["effective_context"]) for label, value in comparison.perplexity]
    if all(e["length"] is None for _, e in found):
        return []
    lines = [
        "## Effective context\n",
        found[0][1]["rule"] + "\n",
        "| model | helps up to | first that hurts | longest measured |",
        "|---|---|---|---|",
    ]
    for label, e in ((_cell(label), e) for label, e in found):
        if e["length"] is None:
            lines.append(f"| {label} | - ({e['reason']}) | | |")
        else:
            lines.append(f"| {label} | {e['length']} | {e['first_that_hurts'] or 'none'} | {e['longest_measured']} |")
    return [*lines, ""]


def _models(comparison: Comparison) -> list[str]:
    lines = [
        "## Models and data\n",
        "| label | model | parameters | trained at | number format | text | tokens in it |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, v in comparison.perplexity:
        m, d, label = v["model"], v["data"], _cell(label)
        name = f"{d['source']} ({d['split']})" if d.get("split") else d["source"]
        lines.append(
            f"| {label} | {_cell(m['name'])} ({m['class']}) | {m['parameters']:,} "
            f"| {m['train_length'] or 'not stated'} | {m['dtype']} | {name} | {d['tokens']:,} |"
        )
    return [*lines, ""]


def _passkey(comparison: Comparison) -> list[str]:
    lines = ["## Passkey\n", comparison.passkey[0][1]["protocol"]["statement"] + "\n"]
    at = sorted({r["length"] for _, v in comparison.passkey for r in v["results"]})
    for measure, title in (
        ("digits_first_of_ten", "Digits more likely than the nine others (chance 10%)"),
        ("greedy_key", "Keys found by greedy decoding"),
    ):
        lines += [
            f"{title}:\n",
            "| T | " + " | ".join(_cell(label) for label, _ in comparison.passkey) + " |",
            "|---|" + "---|" * len(comparison.passkey),
        ]
        for T in at:
            cells = []
            for _, v in comparison.passkey:
                row = next((r for r in v["results"] if r["length"] == T), None)
                cells.append("" if row is None else f"{100 * row[measure]:.0f}%" if row["status"] == "ok" else "-")
            lines.append(f"| {T} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


COLUMNS = (
    "label", "model", "encoding", "train_length", "protocol", "length", "status", "perplexity", "low", "high", "loss",
    "loss_stderr", "bits_per_byte", "tokens", "windows", "reason", "text", "text_fingerprint",
)  # fmt: skip


def csv_table(comparison: Comparison) -> str:
    """One line per model, protocol and length."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for label, v in comparison.perplexity:
        for protocol, entry in v["protocols"].items():
            for r in entry["results"]:
                low, high = r.get("ci95", (None, None))
                values = {
                    "label": label,
                    "model": v["model"]["name"],
                    "encoding": v["model"]["encoding"],
                    "train_length": v["model"]["train_length"],
                    "protocol": protocol,
                    "low": low,
                    "high": high,
                    "text": v["data"]["source"],
                    "text_fingerprint": v["data"]["fingerprint"],
                    **{
                        k: r.get(k)
                        for k in (
                            "length",
                            "status",
                            "perplexity",
                            "loss",
                            "loss_stderr",
                            "bits_per_byte",
                            "tokens",
                            "windows",
                            "reason",
                        )
                    },
                }
                writer.writerow(["" if values[c] is None else values[c] for c in COLUMNS])
    return out.getvalue()


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
        c: "\\" + c for c in "&%$#_{}"
    }
    return "".join(special.get(c, c) for c in text)


def latex(comparison: Comparison) -> str:
    """One table per protocol, as in the paper; needs the package booktabs."""
    tables = []
    for protocol in protocols(comparison):
        columns = len(comparison.perplexity)
        entry = next(v["protocols"][protocol] for _, v in comparison.perplexity if protocol in v["protocols"])
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{r{'r' * columns}}}", r"\toprule"]
        lines += [" & ".join(["$T$", *[_tex(label) for label, _ in comparison.perplexity]]) + r" \\", r"\midrule"]
        for T in lengths(comparison, protocol):
            cells = [
                "--" if text == "-" else rf"\textbf{{{text}}}" if bold else text
                for text, bold in _cells(comparison, protocol, T)
            ]
            lines.append(" & ".join([str(T), *cells]) + r" \\")
        missing = reasons(comparison)
        note = "".join(f" {warning}" for warning in comparison.warnings)
        note += f" Not measured: {'; '.join(missing)}." if missing else ""
        lines += [
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{Perplexity by evaluation length, protocol {protocol}. "
            rf"{_tex(entry['statement'])}{_tex(note)}}}",
            r"\end{table}",
        ]
        tables.append("\n".join(lines))
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(tables) + "\n"


def write(comparison: Comparison, out: str | Path) -> list[Path]:
    """The tables into a folder: comparison.md, .csv, .tex."""
    folder = Path(out)
    texts = {"md": markdown(comparison)}
    if comparison.perplexity:
        texts |= {"csv": csv_table(comparison), "tex": latex(comparison)}
    paths = []
    for suffix, text in texts.items():
        paths.append(write_text(folder / f"comparison.{suffix}", text))
    return paths
