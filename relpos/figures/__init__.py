"""All drawing: encodings, captures and models in; PNG, PDF, SVG and the numbers behind them out.

`figure` returns a matplotlib Figure, `write` writes files; both take the arguments of `relpos figure`. The views:

- `maps`: one map per head (bias, scores or weights), the layout of the CABLE paper's figures 8 to 15;
- `profile`: the map against distance, one line per head; `window`: effective window and entropy per head;
- `difference`: the second source minus the first; `training`: the same heads at every checkpoint of a run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from relpos import capture as captures
from relpos.capture import Capture
from relpos.data.progress import Progress
from relpos.errors import UserError, nearest, several
from relpos.figures import maps as _maps
from relpos.figures import profile as _profile
from relpos.figures import sheet as _sheet
from relpos.figures import training as _training
from relpos.figures import window as _window
from relpos.figures.maps import Maps
from relpos.figures.sources import Source, check_source, parse_heads, reads_text, resolve, shipped
from relpos.figures.style import DPI, Figure
from relpos.files import checkpoints, complete, whole

__all__ = ["FORMATS", "VIEWS", "Figure", "Options", "figure", "write"]

FORMATS = ("png", "pdf", "svg")
VIEWS = ("maps", "profile", "window", "difference", "training")
MAX_CHECKPOINTS = 6

_EXPLAINED = {
    "bias": "The bias position adds to the scaled scores",
    "scores": "Scores {product} after rotation, before bias and mask",
    "weights": "Attention weights{alone}",
}


@dataclass(frozen=True)
class Options:
    """What can be asked of a picture, checked once."""

    layer: int = -1
    heads: str | Sequence[int] = "all"  # from 1, as pictures number them
    kind: str | None = None  # None: bias where there is one, else scores
    text: str | Path | None = None
    tokens: Any = None
    length: int | None = None
    view: str = "maps"
    shared: bool = False  # one colour range for all heads
    formats: tuple[str, ...] = ("png", "pdf")
    report: Callable[[float], None] | None = None  # is told which part of a source's rows is computed

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in captures.KINDS:
            raise UserError(f"there is no kind of map {self.kind!r}.{nearest(str(self.kind), captures.KINDS)}")
        if self.view not in VIEWS:
            raise UserError(f"there is no view {self.view!r}.{nearest(str(self.view), VIEWS)}")
        if self.kind not in (None, "weights") and self.view == "window":
            raise UserError(f"windows and entropies are those of the weights, not of {self.kind}")
        if self.shared and self.view not in ("maps", "difference"):
            raise UserError(f"one colour range for all heads is for maps and differences, not for view {self.view!r}")
        for one in self.formats:
            if one not in FORMATS:
                raise UserError(f"there is no picture format {one!r}.{nearest(one, FORMATS)}")
        if self.text is not None and not isinstance(self.text, (str, Path)):
            raise UserError(f"text must be the name of a text file, not {self.text!r}; ids of tokens go to tokens=")
        if self.text is not None and not Path(self.text).is_file():
            raise UserError(f"there is no text file {str(self.text)!r}")
        for key in ("layer", "length"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{key} must be a whole number, not {value!r}")
        if self.length is not None and not 1 <= self.length <= captures.MAX_LENGTH:
            raise UserError(f"length must be between 1 and {captures.MAX_LENGTH}, not {self.length}")


@dataclass
class Drawn:
    """A picture, its file name, and the numbers that go beside it."""

    fig: Figure
    name: str
    numbers: dict[str, np.ndarray]
    capture: Capture
    maps: Maps | None = field(default=None)


# Sources and what is said about them.


def _open(what: Source, options: Options) -> Capture:
    return resolve(what, text=options.text, tokens=options.tokens, length=options.length, layers=[options.layer])


def _length(held: Capture, options: Options) -> int:
    return options.length or held.length


def _name(held: Capture, options: Options, kind: str, suffix: str = "") -> str:
    number = held.index(options.layer)
    name = held.name + ("" if number == held.num_layers - 1 else f"-layer-{number}")
    return name + ("" if kind == held.default_kind(options.layer) else f"-{kind}") + suffix


def _title(held: Capture, options: Options, what: str) -> str:
    number = held.index(options.layer)
    where = "" if held.num_layers == 1 else f", layer {number + 1} of {held.num_layers}"
    return f"{held.title}: {what}{where}"


def provenance(held: Capture) -> str:
    """Where a capture comes from, for a caption."""
    return "; ".join(f"{key}: {value}" for key, value in held.provenance.items() if value not in (None, "", {}, []))


def _explained(held: Capture, options: Options, kind: str) -> str:
    """What a kind of map shows. Weights without q and k must not be taken for a model's attention."""
    alone = "" if held.has_content(options.layer, _length(held, options)) else " of the bias alone, without content"
    layer = held.layers.get(held.index(options.layer))
    product = "q.k/sqrt(D)"
    if layer is not None and layer.q is not None and abs(layer.scale * layer.q.shape[-1] ** 0.5 - 1) > 1e-3:
        product = f"{layer.scale:g} q.k"
    return _EXPLAINED[kind].format(alone=alone, product=product)


def _finite(rows: Iterable[tuple[int, Any]], held: Capture, options: Options, kind: str) -> Iterable[tuple[int, Any]]:
    """The rows, each looked at, with word of how far they are."""
    for start, cells in rows:
        if options.report is not None:
            options.report(start / cells.shape[-1])
        if not bool((cells < math.inf).all()):  # nor is NaN
            raise UserError(
                f"the {kind} of {held.name} hold NaN or infinity, which no picture can show: the training has "
                "diverged, or an option is too large for float32"
            )
        yield start, cells


def collect(held: Capture, options: Options, kind: str | None = None, pixels: int = _maps.PIXELS) -> Maps:
    """The maps of a capture, ready to draw."""
    kind = kind or options.kind or held.default_kind(options.layer)
    length = _length(held, options)
    held.check(kind, held.index(options.layer), length)
    heads = parse_heads(options.heads, held.heads_of(options.layer))
    block = max(1, -(-length // pixels))
    step = max(block, captures.CELLS // (len(heads) * length) // block * block)
    rows = _finite(held.rows(kind, options.layer, heads, length, step), held, options, kind)
    made = _maps.collect(rows, heads, length, kind, pixels)
    made.title = _title(held, options, kind)
    colours = ", logarithmic colours down to 1e-6" if kind == "weights" else ""
    made.caption = f"{_explained(held, options, kind)}{colours}. {provenance(held)}."
    if made.block > 1:
        made.caption += (
            f" {length} tokens: each pixel is the mean of {made.block} x {made.block} cells, the colours span the "
            "range of the full map."
        )
    return made


def _numbers(held: Capture, count: int, **values: Any) -> dict[str, np.ndarray]:
    """A sidecar: the numbers, the tokens, the provenance."""
    tokens = np.zeros(0, np.int32) if held.tokens is None else held.tokens.numpy()[:count]
    facts = json.dumps({"title": held.title, **held.provenance}, default=str)
    return {key: np.asarray(value) for key, value in values.items()} | {"tokens": tokens, "provenance": np.array(facts)}


# Views.


def _draw_maps(held: Capture, options: Options) -> Drawn:
    made = collect(held, options)
    numbers = _numbers(
        held, made.length, **{made.kind: made.array()}, heads=np.array(made.heads) + 1, low=made.low, high=made.high,
        block=made.block, length=made.length,
    )  # fmt: skip
    fig = _maps.draw(made, shared=options.shared)
    return Drawn(fig, _name(held, options, made.kind), numbers, held, made)


def _rows(held: Capture, options: Options, kind: str) -> tuple[list[int], int, Any]:
    length = _length(held, options)
    heads = parse_heads(options.heads, held.heads_of(options.layer))
    return heads, length, _finite(held.rows(kind, options.layer, heads, length), held, options, kind)


def _draw_profile(held: Capture, options: Options) -> Drawn:
    kind = options.kind or held.default_kind(options.layer)
    heads, length, rows = _rows(held, options, kind)
    made = _profile.collect(rows, heads, length, kind)
    band = " Bands: one standard deviation over the pairs of tokens at that distance." if made.spread.any() else ""
    what = _explained(held, options, kind).removesuffix(", before bias and mask")
    over = ", mean over the text" if held.tokens is not None else ""
    caption = f"{what}{over}.{band} {provenance(held)}."
    fig = _profile.draw(made, _title(held, options, f"{kind} against distance"), caption)
    numbers = _numbers(
        held, length, distances=made.distances, mean=made.mean, spread=made.spread, heads=np.array(heads) + 1
    )
    return Drawn(fig, _name(held, options, kind, "-profile"), numbers, held)


def _draw_window(held: Capture, options: Options) -> Drawn:
    heads, length, rows = _rows(held, options, "weights")
    made = _window.collect(rows, heads, length)
    caption = (
        f"Means over the queries of the second half of {length} tokens; lines: one standard deviation. "
        f"{_explained(held, options, 'weights')}. {provenance(held)}."
    )
    fig = _window.draw(made, _title(held, options, "window and entropy"), caption)
    numbers = _numbers(held, length, window=made.window, entropy=made.entropy, heads=np.array(heads) + 1)
    return Drawn(fig, _name(held, options, held.default_kind(options.layer), "-window"), numbers, held)


def _draw_difference(first: Capture, second: Capture, options: Options) -> Drawn:
    kind = options.kind or second.default_kind(options.layer)
    if options.length is None:
        length = min(first.length, second.length)
        options = Options(**{**vars(options), "length": length})
    a, b = collect(first, options, kind), collect(second, options, kind)
    if a.heads != b.heads:
        raise UserError(f"{first.name} has {len(a.heads)} heads and {second.name} {len(b.heads)}: nothing to compare")
    values = b.values - a.values
    size = np.nanmax(np.abs(values), axis=(1, 2))
    made = Maps("difference", a.heads, a.length, values, -size, size, a.block)
    made.title = _title(second, options, f"{kind}, {second.name} minus {first.name}")
    if first.title != second.title:  # then neither stands for both
        made.title = made.title.removeprefix(f"{second.title}: ")
        made.title = made.title[0].upper() + made.title[1:]
    what = [_explained(held, options, kind) + ". " for held in (first, second)]
    if what[0] == what[1]:  # once is enough
        made.caption, what = what[0], ["", ""]
    made.caption += f"First: {what[0]}{provenance(first)}. Second: {what[1]}{provenance(second)}."
    if made.block > 1:
        made.caption += f" Each pixel is the mean of {made.block} x {made.block} cells."
    numbers = _numbers(second, a.length, difference=made.array(), heads=np.array(a.heads) + 1)
    name = _name(second, options, kind).replace(second.name, f"{second.name}-minus-{first.name}", 1)
    return Drawn(_maps.draw(made, shared=options.shared), name, numbers, second, made)


def _draw_training(folder: Path, options: Options) -> Drawn:
    found = [(step, path) for step, path in checkpoints(folder) if complete(path)]
    if not found:
        raise UserError(
            f"{str(folder)!r} holds no checkpoints: expected folders checkpoint-100, checkpoint-200, ..., with all the "
            "files that their checkpoint.json lists"
        )
    if len(found) > MAX_CHECKPOINTS:  # evenly spaced, first and last among them
        picks = np.linspace(0, len(found) - 1, MAX_CHECKPOINTS).round().astype(int)
        found = [found[pick] for pick in picks]
    held = [_open(path, options) for _, path in found]
    drawn = [collect(one, options) for one in held]
    steps = [step for step, _ in found]
    last = held[-1]
    last.name = folder.resolve().name
    title = _title(last, options, f"{drawn[0].kind} through training")
    caption = f"One colour range for each head. {provenance(last)}."
    numbers = _numbers(
        last, drawn[0].length, **{drawn[0].kind: np.stack([one.array() for one in drawn])}, steps=steps,
        heads=np.array(drawn[0].heads) + 1,
    )  # fmt: skip
    fig = _training.draw(steps, drawn, title, caption)
    return Drawn(fig, _name(last, options, drawn[0].kind, "-training"), numbers, last)


def _draw(sources: Sequence[Source], options: Options) -> Iterable[Drawn]:
    """One picture per source; the difference takes two, the default is what ships."""
    for what in sources:
        check_source(what)
    if (options.text is not None or options.tokens is not None) and not any(map(reads_text, sources)):
        raise UserError("no source reads a text: captures hold theirs, encodings by themselves have none; name a model")
    if options.view == "difference":
        if len(sources) != 2:
            raise UserError(f"the difference view takes two sources, first and second, not {len(sources)}")
        yield _draw_difference(_open(sources[0], options), _open(sources[1], options), options)
        return
    for what in sources:
        if options.view == "training":
            if not isinstance(what, (str, Path)) or not Path(what).is_dir():
                raise UserError(f"the training view takes a run folder with checkpoints, not {what!s}")
            yield _draw_training(Path(what), options)
            continue
        view = {"maps": _draw_maps, "profile": _draw_profile, "window": _draw_window}[options.view]
        yield view(_open(what, options), options)


def _sheet_of(drawn: Sequence[Drawn]) -> Figure:
    caption = "One row per encoding, one map per head, each with its own colours. " + _common(
        [d.capture for d in drawn]
    )
    maps = [d.maps for d in drawn if d.maps is not None]
    titles = [d.capture.title for d in drawn if d.maps is not None]
    sizes = [d.capture.provenance.get("recipe", "").split(" at ")[0] for d in drawn if d.maps is not None]
    # What not all rows share stands beside each, and where titles repeat, the names.
    names = [d.name for d in drawn if d.maps is not None] if len(set(titles)) < len(titles) else []
    facts = [column for column in (names, sizes, [one.kind for one in maps]) if len(set(column)) > 1]
    remarks = [", ".join(filter(None, row)) for row in zip(*facts)] if facts else [""] * len(maps)
    return _sheet.draw(maps, list(zip(titles, remarks, strict=True)), caption.strip())


def _common(held: Sequence[Capture]) -> str:
    """What all captures of a sheet have in common."""
    first = held[0].provenance
    same = {k: v for k, v in first.items() if v and all(one.provenance.get(k) == v for one in held)}
    return "; ".join(f"{key}: {value}" for key, value in same.items())


# What users call.


def _options(given: dict[str, Any], out: str | Path | None) -> Options:
    if out is not None and not isinstance(out, (str, Path)):
        raise UserError(f"out must be the name of a folder, not {out!r}")
    text = given.pop("format", None) or ("png", "pdf")
    parts = text.split(",") if isinstance(text, str) else text
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise UserError(f"format must be names such as 'png,pdf', not {text!r}")
    formats = tuple(part.strip().lower() for part in parts if part.strip())
    if given.pop("checkpoints", False):
        if given.get("view", "maps") not in ("maps", "training"):
            raise UserError(f"checkpoints are drawn as maps, not as view {given['view']!r}")
        given["view"] = "training"
    known = [item.name for item in fields(Options)]
    for key in given:
        if key not in known:
            raise UserError(f"relpos.figure has no option {key!r}.{nearest(key, known)}")
    return Options(**given, formats=formats or ("png", "pdf"))


def figure(*sources: Source, out: str | Path | None = None, **given: Any) -> Figure:
    """Draw one source and return the matplotlib Figure; several, or none for what ships, give a contact sheet.

    A source is an encoding ("alibi:slopes=geometric"), a capture file, a folder with a model, a `Capture` or a model in
    memory. Keywords: layer, heads (from 1), kind (bias, scores, weights), text, tokens (ids instead of a text), length,
    view (maps, profile, window, difference, training), shared, checkpoints, and with `out`, a folder to write to as
    `relpos figure` does, format.
    """
    options = _options(given, out)
    drawn = []
    for one in _draw(sources or shipped(), options):
        if out is not None:
            _write_one(one, Path(out), options)
        drawn.append(one)
    if len(drawn) == 1:
        return drawn[0].fig
    if any(one.maps is None for one in drawn):
        raise UserError("several sources at once make a contact sheet of maps; draw other views one by one")
    sheet = _sheet_of(drawn)
    if out is not None:
        save(sheet, Path(out), "contact-sheet", options.formats)
    return sheet


def write(
    sources: Sequence[Source] = (), *, out: str | Path = "figures", progress: bool = False, **given: Any
) -> list[Path]:
    """Draw every source into a folder, then a contact sheet of all. Returns the files, the sheet first."""
    options = _options(given, out)
    folder = Path(out)
    written: list[Path] = []
    drawn: list[Drawn] = []
    used: set[str] = set()
    chosen = several("sources", sources or ()) or shipped()
    names = [Path(what).name.removesuffix(".safetensors") if isinstance(what, (str, Path)) else "" for what in chosen]
    coming = [*names, *(["contact sheet"] if len(names) > 1 else [])]
    with Progress("drawing", progress) as bar:

        def report(part: float) -> None:
            number = len(drawn)
            bar((number + part) / len(coming), coming[min(number, len(coming) - 1)])

        options = replace(options, report=report)
        report(0.0)
        for one in _draw(chosen, options):
            own = itertools.chain([one.name], (f"{one.name}-{n}" for n in itertools.count(2)))
            one.name = next(name for name in own if name not in used)  # of one name, none overwrites another
            used.add(one.name)
            written += _write_one(one, folder, options)
            one.fig.clear()  # a dozen large pictures need not stay in memory
            drawn.append(one)
            report(0.0)
        if len(drawn) > 1 and all(one.maps is not None for one in drawn):
            written = save(_sheet_of(drawn), folder, "contact-sheet", options.formats) + written
    return written


def _write_one(drawn: Drawn, folder: Path, options: Options) -> list[Path]:
    paths = save(drawn.fig, folder, drawn.name, options.formats)
    path = folder / f"{drawn.name}.npz"

    def put(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **drawn.numbers)  # type: ignore[arg-type]

    return [*paths, whole(path, put)]


def save(fig: Figure, folder: Path, name: str, formats: Iterable[str]) -> list[Path]:
    """Write a picture in each format."""
    paths = []
    for one in formats:
        # Without dates, the same numbers give the same bytes.
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(one)

        def put(temporary: Path, one: str = one, metadata: Any = metadata) -> None:
            fig.savefig(temporary, format=one, dpi=DPI, metadata=metadata)

        paths.append(whole(folder / f"{name}.{one}", put))
    return paths
