"""What the registry knows about an encoding, in plain values: for `relpos encodings`, `relpos info` and the docs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relpos import encodings
from relpos.attention import fused, prepare
from relpos.encodings import Encoding
from relpos.errors import UserError
from relpos.files import final, settings_of
from relpos.terms import Layout

GPT2_SMALL = {"heads": 12, "head_dim": 64, "hidden_size": 768}
GPT2_SMALL_LAYERS = 12


@dataclass(frozen=True)
class Description:
    spec: str
    name: str
    title: str
    formula: str
    paper: str
    enters: str  # where position enters: "bias", "rotation", "embedding", "rescored scores" or "mask only"
    directions: str
    parameters: int  # trained positional parameters of a whole GPT-2 Small
    per_layer: int
    shared: bool
    implementations: tuple[str, ...]
    decode_state: str
    options: dict[str, tuple[str, Any]]  # name -> (what it takes, default)


def enters(encoding: Encoding) -> str:
    """Where position enters, read from the hooks the encoding overrides."""

    def overrides(hook: str) -> bool:
        return getattr(type(encoding), hook) is not getattr(Encoding, hook)

    if encoding.rescores:
        return "rescored scores"
    ways = [
        word for hook, word in (("terms", "bias"), ("rotate", "rotation"), ("embed", "embedding")) if overrides(hook)
    ]
    return " and ".join(ways) or "mask only"


def fusable(encoding: Encoding) -> bool:
    """Whether the fused kernels can run what the encoding adds to the scores of a plain causal text."""
    layout = Layout(Tq=2, Tk=2, device=torch.device("cpu"))
    hidden = torch.zeros(1, 2, encoding.hidden_size) if encoding.content else None
    _, terms = prepare(encoding, layout, hidden)
    return fused.unsupported(terms, layout, rescores=encoding.rescores) is None


def describe(
    spec: str, *, layers: int = GPT2_SMALL_LAYERS, allow_file: bool = True, **geometry: int
) -> Description:
    """Describe a spec for a model's geometry, by default that of GPT-2 Small."""
    shape: Any = {**GPT2_SMALL, **geometry}
    encoding = encodings.build(spec, allow_file=allow_file, **shape)
    per_layer = encoding.parameter_count()
    way = enters(encoding)
    shared = encoding.share or "embedding" in way
    return Description(
        spec=spec,
        name=encoding.name,
        title=encoding.title or encoding.name,
        formula=encoding.formula,
        paper=encoding.paper,
        enters=way,
        directions="causal, bidirectional" if encoding.bidirectional else "causal",
        parameters=per_layer * (1 if shared else layers),
        per_layer=per_layer,
        shared=shared,
        implementations=("reference", "blockwise", "fused") if fusable(encoding) else ("reference", "blockwise"),
        decode_state=encoding.decode_state,
        options={
            key: (encodings.describe_type(kind), default)
            for key, (kind, default) in encodings.options(type(encoding)).items()
        },
    )


def table() -> list[Description]:
    """One row per encoding, at its default options."""
    return [describe(name) for name in encodings.names()]


def markdown_table() -> str:
    """The README's table of encodings."""
    lines = [
        "| name | encoding | adds to score (i, j) or does | enters as | parameters, GPT-2 Small | directions | fused |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table():
        formula = row.formula.replace("|", "\\|")
        title = f"[{row.title}]({row.paper})" if row.paper else row.title
        count = f"{row.parameters:,}" + (
            " (shared)" if row.shared and row.parameters and row.enters != "embedding" else ""
        )
        fused = "yes" if "fused" in row.implementations else "no"
        lines.append(f"| `{row.name}` | {title} | `{formula}` | {row.enters} | {count} | {row.directions} | {fused} |")
    return "\n".join(lines)


def info(what: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Headings with rows of (what, value) for a spec or for a folder with a trained model."""
    folder = Path(what)
    # os.path's knows no name that is too long. A folder may have an encoding's name by chance.
    if what and os.path.isdir(folder) and (what not in encodings.names() or (final(folder) / "config.json").is_file()):
        return _info_run(folder)
    # No encoding's name has a slash, so this was meant as a folder, unless it is an encoding's file.
    if "/" in what.partition(":")[0] and ".py" not in what:
        raise UserError(f"there is no folder {what!r}; `relpos encodings` lists the encodings")
    return [_rows(describe(what))]


def _rows(d: Description, used_by: str = "") -> tuple[str, list[tuple[str, str]]]:
    rows = [
        ("formula", d.formula),
        ("enters as", d.enters),
        ("directions", d.directions),
        ("parameters", _count(d)),
        ("implementations", ", ".join(d.implementations)),
        ("decode state", d.decode_state),
        ("paper", d.paper or "none"),
    ]
    rows += [(f"option {key}", f"{kind}; default {_spelled(default)}") for key, (kind, default) in d.options.items()]
    return f"{d.title}  ({d.spec})" + (f"  {used_by}" if used_by else ""), rows


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _count(d: Description) -> str:
    if d.shared or not d.per_layer:
        return f"{d.parameters:,}" + (" for all layers together" if d.per_layer else "")
    return f"{d.parameters:,} in all layers, {d.per_layer:,} in each"


def _info_run(folder: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """The model's configuration, or its last checkpoint's while the run lasts, then every distinct encoding in it."""
    run, folder = folder, final(folder)
    config = settings_of(folder)
    rows = [(key, str(value)) for key, value in sorted(config.items()) if not isinstance(value, (dict, list))]
    if folder != run:
        rows.insert(0, ("run", "has not ended; this is its last checkpoint"))
    result = [(str(folder), rows)]
    specs = config.get("encoding")
    if not specs:
        return result
    keys = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes: dict[str, Any] = {key: config.get(key) for key in keys}
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"in {str(folder / 'config.json')!r}, {key} must be a number from 1 on, not {value!r}")
    depth, heads, width = sizes.values()
    per_layer = [specs] * depth if isinstance(specs, str) else specs
    if not isinstance(per_layer, list) or not all(isinstance(spec, str) for spec in per_layer):
        raise UserError(f"in {str(folder / 'config.json')!r}, encoding must be a name or a list of them, not {specs!r}")
    if width % heads:
        raise UserError(f"in {str(folder / 'config.json')!r}, {heads} heads do not divide a width of {width}")
    for spec in dict.fromkeys(per_layer):
        layers = [number for number, own in enumerate(per_layer) if own == spec]
        described = describe(
            spec, layers=len(layers), allow_file=False, heads=heads, head_dim=width // heads, hidden_size=width
        )
        used_by = "all layers" if len(layers) == len(per_layer) else "layers " + ", ".join(map(str, layers))
        result.append(_rows(described, used_by))
    return result
