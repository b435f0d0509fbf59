"""The playground: any registered encoding with its options and its parameters moved, as bytes of maps.

Options come from the constructor, parameters from the module. A parameter's slider multiplies its initial values
(KERPLE's rate `a` differs from head to head, and all move together), or is added where they are all zero.
"""

from __future__ import annotations

import math
import typing
from typing import Any

import torch

from relpos import capture as captures
from relpos import encodings
from relpos.capture import Capture
from relpos.encodings import Encoding
from relpos.errors import UserError, nearest
from relpos.explorer import wire

HEADS, HEAD_DIM, LENGTH = 12, 64, 256
MAX_LENGTH = 512
MAX_SPEC = 300  # characters
LARGEST = 4096  # of a whole-number option: a width of a billion would fill the memory
FACTORS: list[float] = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16]


def listing() -> list[dict[str, Any]]:
    """Every registered encoding with its options, for the sliders."""
    made = []
    for name in encodings.names():
        cls = encodings.get(name)
        made.append(
            {
                "name": name,
                "title": cls.title or name,
                "formula": cls.formula,
                "paper": cls.paper,
                # share says which layers have parameters of their own: nothing to see in one layer
                "options": [
                    _option(key, kind, default)
                    for key, (kind, default) in encodings.options(cls).items()
                    if key != "share"
                ],
            }
        )
    return made


def _option(key: str, kind: Any, default: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": key, "takes": encodings.describe_type(kind), "default": _spelled(default)}
    plain = next((one for one in typing.get_args(kind) if one is not type(None)), kind) if default is None else kind
    if typing.get_origin(kind) is typing.Literal:
        entry["choices"] = [str(choice) for choice in typing.get_args(kind)]
    elif plain is bool:
        entry["choices"] = ["true", "false"]
    elif plain in (int, float) and default:
        steps = [default * factor for factor in FACTORS]
        if plain is int:
            steps = [min(max(1, round(step)), LARGEST) for step in steps]
        entry["values"] = [_spelled(step) for step in dict.fromkeys(steps)]
    return entry


def _spelled(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check(spec: Any) -> str:
    if not isinstance(spec, str) or len(spec) > MAX_SPEC:
        raise UserError(f"an encoding is a text of at most {MAX_SPEC} characters such as 'kerple:form=power'")
    # Found in the text, so that a base inside a base is covered: digits that make a number too large.
    _, raw = encodings.parse(spec)
    while raw:
        for key, text in raw.items():
            try:
                number = abs(float(text))
            except ValueError:
                continue
            if number > 1e9 or (number > LARGEST and text.strip("-").isdigit() and key != "base"):
                raise UserError(f"{key}={text} is out of the playground's range: at most {LARGEST}")
        base = raw.get("base", "")
        raw = encodings.parse(base)[1] if base and not base[:1].isdigit() else {}
    return spec


def make(
    spec: Any, parameters: Any = None, *, length: Any = LENGTH, heads: Any = HEADS, seed: Any = 0
) -> tuple[Capture, list[dict[str, Any]]]:
    """The capture, and what its parameters are: name, shape, range, and whether a slider multiplies or adds."""
    spec = _check(spec)
    for what, value, least, most in (
        ("length", length, 1, MAX_LENGTH),
        ("heads", heads, 1, 32),
        ("seed", seed, 0, 1 << 31),
    ):
        if type(value) is not int or not least <= value <= most:
            raise UserError(f"{what} must be a whole number from {least} to {most}, not {value!r}")
    moved = {} if parameters is None else parameters
    if not isinstance(moved, dict):
        raise UserError("parameters must be an object: name -> number")
    encodings.build(spec, heads=heads, head_dim=HEAD_DIM, reset=False, allow_file=False)  # refuses files
    told: list[dict[str, Any]] = []

    def adjust(encoding: Encoding) -> None:
        own = dict(encoding.named_parameters())
        for name, by in moved.items():
            if name not in own:
                raise UserError(f"{spec} has no parameter {name!r}.{nearest(name, own)}")
            if isinstance(by, bool) or not isinstance(by, (int, float)) or not math.isfinite(by) or abs(by) > 1e6:
                raise UserError(f"parameter {name}: {by!r} is not a number")
        with torch.no_grad():
            for name, parameter in own.items():
                times = bool(parameter.abs().max() > 0)
                by = moved.get(name)
                if by is not None:
                    parameter.mul_(by) if times else parameter.add_(by)
                told.append(
                    {
                        "name": name,
                        "shape": list(parameter.shape),
                        "times": times,
                        "low": float(parameter.min()),
                        "high": float(parameter.max()),
                    }
                )

    made = captures.from_spec(spec, length=length, heads=heads, head_dim=HEAD_DIM, seed=seed, adjust=adjust)
    if moved:
        made.provenance["note"] = made.provenance["note"].replace("its initial", "moved")
    return made, told


def answer(request: dict[str, Any]) -> bytes:
    """Maps and profile of one setting in one file."""
    unknown = set(request) - {"spec", "parameters", "length", "heads", "seed", "kind"}
    if unknown:
        raise UserError(f"the playground knows no {', '.join(sorted(map(str, unknown)))}")
    kind = request.pop("kind", None)
    made, told = make(request.pop("spec", None), request.pop("parameters", None), **request)
    kind = kind or made.default_kind()
    if kind not in captures.KINDS:
        raise UserError(f"there is no kind of map {kind!r}.{nearest(str(kind), captures.KINDS)}")
    (tensors, facts), (more, about) = wire.map_parts(made, kind, 0), wire.profile_parts(made, kind, 0)
    facts |= {"parameters": told, "note": made.provenance.get("note", ""), "spec": made.specs[0]}
    facts["alone"] = about["alone"]  # of what the window is
    return wire.pack(made, 0, tensors | more, facts)


def variants(name: str) -> list[dict[str, Any]]:
    """What an exported page holds of an encoding: its defaults, and every slider moved by itself."""
    entry = next(one for one in listing() if one["name"] == name)
    found: list[dict[str, Any]] = [{"spec": name, "parameters": {}}]
    for option in entry["options"]:
        for value in option.get("choices") or option.get("values") or []:
            if value != option["default"]:
                found.append({"spec": f"{name}:{option['name']}={value}", "parameters": {}})
    try:
        _, told = make(name, length=2)
    except UserError:
        return found
    for parameter in told:
        for factor in FACTORS[::2]:
            if factor != 1:
                found.append({"spec": name, "parameters": {parameter["name"]: factor}})
    return found
