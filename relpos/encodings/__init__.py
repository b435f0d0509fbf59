"""The registry: encodings by name, options from a string.

A spec is `name:option=value,option=value`. Every file of this folder is an encoding and its stem is the name. Others
come from `register(cls)`, from the entry point group `relpos.encodings`, or from a file: `build("./mine.py:opt=1")`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from relpos.encodings.base import DistanceEncoding, Encoding, running_sum, wide
from relpos.errors import UserError, nearest, too_large

__all__ = [
    "DistanceEncoding",
    "Encoding",
    "build",
    "by_name",
    "describe_type",
    "get",
    "names",
    "options",
    "parse",
    "register",
    "running_sum",
    "slug",
    "split_list",
    "wide",
]

_registered: dict[str, type[Encoding]] = {}
_GEOMETRY = ("heads", "head_dim", "hidden_size")
LONGEST_NAME = 120  # of a file, without what is added to it


def register(cls: type[Encoding], name: str | None = None) -> type[Encoding]:
    """Add an encoding of your own; usable as a decorator. The name is the file's stem unless given."""
    if not (inspect.isclass(cls) and issubclass(cls, Encoding)):
        raise UserError(f"register() takes a subclass of relpos.encodings.Encoding, not {cls!r}")
    name = name or cls.__dict__.get("name") or cls.__module__.rpartition(".")[2]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"an encoding's name is a lower-case word, not {name!r}")
    if name in _builtin_names() and cls.__module__ != f"{__name__}.{name}":
        raise UserError(f"the name {name!r} is already taken by an encoding of relpos")
    known = _registered.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(f"the name {name!r} is already taken by {known.__module__}.{known.__qualname__}")
    cls.name = name
    _registered[name] = cls
    return cls


def _in_module(module: types.ModuleType, origin: str) -> type[Encoding]:
    """The one encoding a module defines."""
    found = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Encoding) and cls.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise UserError(f"{origin} must define exactly one subclass of Encoding; it defines {len(found)}")
    return found[0]


def _builtin_names() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"]


def _entry_point_names() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group="relpos.encodings")}


def names() -> list[str]:
    """Every encoding that can be built by name, in alphabetical order."""
    return sorted({*_builtin_names(), *_entry_point_names(), *_registered})


def get(name: str) -> type[Encoding]:
    """The class of a name."""
    if name in _registered:
        return _registered[name]
    if name in _builtin_names():
        module = importlib.import_module(f"{__name__}.{name}")
        return register(_in_module(module, f"relpos/encodings/{name}.py"), name)
    point = _entry_point_names().get(name)
    if point is not None:
        try:
            found = point.load()
        except Exception as error:
            raise UserError(
                f"the encoding {name!r} of an installed package could not be imported from {point.value!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return register(found, name)
    raise UserError(f"there is no encoding {name!r}.{nearest(name, names())}")


def load_file(path: str | Path) -> type[Encoding]:
    """Import a file that defines one encoding and register it under the file's stem."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r} with an encoding in it")
    name = path.stem
    module_name = f"relpos_encoding_{name}"
    if name in _registered and _registered[name].__module__ == module_name:
        if Path(inspect.getfile(_registered[name])).resolve() == path.resolve():
            return _registered[name]
        del _registered[name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{str(path)!r} is no Python file: its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    return register(_in_module(module, str(path)), name)


# The grammar.


def split_list(text: str | Iterable[str]) -> list[str]:
    """Split `"alibi,t5:form=clipped,buckets=16,rope"` into specs. A part with no `=`, or with a `:` before its first
    `=`, starts a new encoding; the others are options of the one before."""
    if not isinstance(text, str):
        return [item for part in text for item in split_list(part)]
    items: list[str] = []
    for part in text.split(","):
        head = part.split("=", 1)[0]
        if "=" not in part or ":" in head or not items:
            items.append(part.strip())
        else:
            items[-1] += "," + part.strip()
    if any(not item for item in items):
        raise UserError(f"an empty item in the list of encodings {text!r}")
    return items


def _split_name(spec: str) -> tuple[str, str]:
    """Name (or path of a file) and the text of the options."""
    match = re.match(r"^([^=]*?\.py)(?::(.*))?$", spec)
    if match:
        return match.group(1), match.group(2) or ""
    name, _, rest = spec.partition(":")
    return name.strip(), rest


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Name and raw options. Everything after `base=` belongs to the base, unless it is a number (RoPE's): no encoding's
    name begins with a digit."""
    if not isinstance(spec, str) or not spec.strip():
        raise UserError(f"an encoding is a string such as 'alibi:slopes=geometric', not {spec!r}")
    name, rest = _split_name(spec.strip())
    if "," in name and not name.endswith(".py"):
        raise UserError(
            f"{spec!r} is not one encoding: options follow a colon, as in 'kerple:form=power'; everything after base= "
            "belongs to the base"
        )
    raw: dict[str, str] = {}
    while rest:
        key, equals, rest = rest.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"in {spec!r}, {key + equals!r} is not of the form option=value")
        if key == "base" and not rest.lstrip()[:1].isdigit():
            value, rest = rest, ""
        else:
            value, _, rest = rest.partition(",")
        if key in raw:
            raise UserError(f"in {spec!r}, the option {key!r} is given twice")
        raw[key] = value.strip()
    return name, raw


def options(cls: type[Encoding]) -> dict[str, tuple[Any, Any]]:
    """Option name -> (type, default), read from the constructor."""
    hints = typing.get_type_hints(cls.__init__)
    return {
        key: (hints.get(key, str), parameter.default)
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in _GEOMETRY
    }


def describe_type(kind: Any) -> str:
    """What an option of this type takes, in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(k) for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return "numbers with ; between them"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(kind, str(kind))


def _convert(text: str, kind: Any) -> Any:
    """The value of an option, or ValueError."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        for choice in typing.get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError
    if origin in (typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            if one is type(None):
                continue
            try:
                return _convert(text, one)
            except ValueError:
                pass
        raise ValueError
    if origin is tuple:
        return tuple(_convert(part, typing.get_args(kind)[0]) for part in text.split(";"))
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]
    if kind is float:
        value = float(text)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError
        return value
    return kind(text)


def _refuse_files(spec: str) -> None:
    """Error where the spec, or a base inside it, names a file."""
    name, raw = parse(spec)
    if name.endswith(".py"):
        raise UserError(
            f"this config or checkpoint names the file {name!r}, and loading one never imports code. Register the "
            f"encoding first, relpos.encodings.build({spec!r}), and use its name, {Path(name).stem!r}"
        )
    if "base" in raw and not raw["base"][:1].isdigit():
        _refuse_files(raw["base"])


def build(
    spec: str,
    *,
    heads: int = 12,
    head_dim: int = 64,
    hidden_size: int | None = None,
    reset: bool = True,
    allow_file: bool = True,
) -> Encoding:
    """Build an encoding from its spec, with its initial parameters drawn.

    `reset=False` leaves the drawing to a model's weight initialisation; `allow_file=False` refuses a path, as for a
    spec that comes from a checkpoint.
    """
    hidden_size = heads * head_dim if hidden_size is None else hidden_size
    for what, value in (("heads", heads), ("head_dim", head_dim), ("hidden_size", hidden_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{what} must be a positive whole number, not {value!r}")
    name, raw = parse(spec)
    if not allow_file:
        _refuse_files(spec)
    cls = load_file(name) if name.endswith(".py") else get(name)
    known = options(cls)
    values: dict[str, Any] = {}
    for key, text in raw.items():
        if key not in known:
            raise UserError(f"{cls.name} has no option {key!r}.{nearest(key, known)}")
        try:
            values[key] = _convert(text, known[key][0])
        except ValueError:
            raise UserError(f"{cls.name}: {key}={text!r} is not {describe_type(known[key][0])}") from None
    needed = [key for key, (_, default) in known.items() if default is inspect.Parameter.empty and key not in values]
    if needed:
        raise UserError(f"{cls.name}: its option {needed[0]!r} has no default; every option of an encoding needs one")
    try:
        encoding = cls(heads=heads, head_dim=head_dim, hidden_size=hidden_size, **values)
        if reset:
            encoding.reset_parameters()
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:  # the last where a size is above 63 bits
        if values and too_large(error):
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{spec} is too large for this machine, or for a number: {first[:200]}") from error
        raise
    return encoding


def slug(spec: str) -> str:
    """A file name for a spec: `t5:form=clipped` -> `t5-form-clipped`."""
    name, _ = _split_name(spec.strip())
    rest = spec.strip()[len(name) :]
    stem = Path(name).stem if name.endswith(".py") else name
    rest = rest.replace("=-", "=minus ")
    made = re.sub(r"[^A-Za-z0-9.]+", "-", stem + rest).strip("-.")
    if len(made) <= LONGEST_NAME:
        return made
    mark = hashlib.sha256(made.encode()).hexdigest()[:8]  # no file name holds more than 255 characters
    return made[: LONGEST_NAME - 9].rstrip("-.") + "-" + mark


def by_name(spec: str) -> str:
    """A spec with registered names in place of files, which are imported: what is saved never names a path."""
    if ".py" not in spec:
        return spec
    name, options = parse(spec)
    options = {key: by_name(value) if key == "base" else value for key, value in options.items()}
    name = load_file(name).name if name.endswith(".py") else name
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")
