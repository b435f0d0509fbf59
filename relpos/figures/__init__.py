"""All drawing: encodings, captures and models in; PNG, PDF, SVG and the numbers behind them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from relpos import capture as captures
from relpos import encodings
from relpos.capture import Capture
from relpos.errors import UserError, nearest
from relpos.figures import maps as _maps
from relpos.figures import sheet as _sheet
from relpos.figures.style import Figure

FORMATS = ("png", "pdf", "svg")


def source(what: str | Path | Capture, *, length: int = 512) -> Capture:
    """A capture from whatever the user named."""
    if isinstance(what, Capture):
        return what
    path = Path(what)
    if path.is_file() and path.suffix == ".safetensors":
        return captures.load(path)
    return captures.from_spec(str(what), length=length)


def defaults() -> list[str]:
    """What `relpos figure` draws when nothing is named: every encoding that adds a bias, at its initial parameters."""
    return [name for name in encodings.names() if encodings.get(name).additive]


def collect(
    held: Capture, *, layer: int = -1, heads: Sequence[int] | None = None, kind: str | None = None, length: int = 512
) -> _maps.Maps:
    kind = kind or held.default_kind(layer)
    chosen = list(range(held.heads)) if heads is None else list(heads)
    block = max(1, -(-length // _maps.PIXELS))
    step = max(block, captures.CELLS // (len(chosen) * length) // block * block)
    maps = _maps.collect(held.rows(kind, layer, chosen, length, step), chosen, length, kind)
    number = held.index(layer)
    where = "" if held.num_layers == 1 else f", layer {number} of {held.num_layers}"
    maps.title = f"{held.title}: {kind}{where}"
    maps.caption = ". ".join(f"{key}: {value}" for key, value in held.provenance.items() if value not in (None, ""))
    if maps.block > 1:
        maps.caption += f". Each pixel is the mean of {maps.block} x {maps.block} cells; the colours span the full map"
    return maps


def parse_formats(text: str | Iterable[str]) -> list[str]:
    wanted = [part.strip().lower() for part in (text.split(",") if isinstance(text, str) else text)]
    for one in wanted:
        if one not in FORMATS:
            raise UserError(f"there is no picture format {one!r}.{nearest(one, FORMATS)}")
    return wanted


def write(
    sources: Sequence[str | Path | Capture] = (),
    *,
    out: str | Path = "figures",
    layer: int = -1,
    heads: Sequence[int] | None = None,
    kind: str | None = None,
    length: int = 512,
    format: str | Iterable[str] = "png,pdf",
) -> list[Path]:
    """Draw every source into a folder. Returns the files."""
    wanted = parse_formats(format)
    folder = Path(out)
    written: list[Path] = []
    drawn: list[tuple[_maps.Maps, Capture]] = []
    for what in sources or defaults():
        held = source(what, length=length)
        maps = collect(held, layer=layer, heads=heads, kind=kind, length=length)
        fig = _maps.draw(maps)
        written += save(fig, folder, held.name, wanted)
        written.append(sidecar(maps, held, folder))
        drawn.append((maps, held))
    if len(drawn) > 1:
        fig = _sheet.draw([maps for maps, _ in drawn], [held.title for _, held in drawn])
        written = save(fig, folder, "contact-sheet", wanted) + written
    return written


def figure(
    *sources: str | Path | Capture,
    out: str | Path | None = None,
    layer: int = -1,
    heads: Sequence[int] | None = None,
    kind: str | None = None,
    length: int = 512,
    format: str | Iterable[str] = "png,pdf",
) -> Figure:
    """The picture of one source as a matplotlib Figure, or the contact sheet of several (of the defaults for none)."""
    if out is not None:
        write(sources, out=out, layer=layer, heads=heads, kind=kind, length=length, format=format)
    held = [source(what, length=length) for what in sources or defaults()]
    drawn = [collect(one, layer=layer, heads=heads, kind=kind, length=length) for one in held]
    return _maps.draw(drawn[0]) if len(drawn) == 1 else _sheet.draw(drawn, [one.title for one in held])


def save(fig: Figure, folder: Path, name: str, formats: Iterable[str]) -> list[Path]:
    """Write a picture in each format; a file appears only when it is whole."""
    paths = []
    for one in formats:
        path = folder / f"{name}.{one}"
        temporary = folder / f".{name}.part.{one}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            metadata = {"CreationDate": None} if one == "pdf" else {"Date": None} if one == "svg" else None
            fig.savefig(temporary, format=one, dpi=150, metadata=metadata)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
        paths.append(path)
    return paths


def sidecar(maps: _maps.Maps, held: Capture, folder: Path) -> Path:
    """The numbers behind a picture."""
    path = folder / f"{held.name}.npz"
    tokens = held.tokens.numpy() if held.tokens is not None else np.zeros(0, np.int32)
    np.savez_compressed(
        path,
        **{maps.kind: maps.array()},
        heads=np.array(maps.heads) + 1,
        tokens=tokens[: maps.length],
        provenance=np.array(json.dumps(held.provenance)),
    )
    return path
