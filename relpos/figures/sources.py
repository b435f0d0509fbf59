"""From what a user names to a capture: an encoding, a capture file, a folder with a model, the captures that ship."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from relpos import capture as captures
from relpos import encodings
from relpos.capture import Capture
from relpos.errors import UserError
from relpos.files import final

SHIPPED = Path(captures.__file__).with_name("shipped")
# What `relpos figure` draws when nothing is named, in the order of the CABLE paper's figures 8 to 15.
PAPER = (
    "cable",
    "dape:version=2,base=cable",
    "kerple:share=false",
    "dape:version=2,base=kerple",
    "alibi:slopes=geometric",
    "fire",
    "t5:form=clipped",
    "rope",
)
Source = Any  # a spec, a path, a Capture, or a model in memory


def shipped() -> list[Path]:
    """The captures that come with the package, in the paper's order."""
    files = [SHIPPED / f"{encodings.slug(spec)}.safetensors" for spec in PAPER]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"this installation of relpos lacks its captures {', '.join(missing)}: install it again")
    return files


def reads_text(what: Source) -> bool:
    """A model does; a capture holds the text it was made with, and an encoding by itself has none."""
    return isinstance(what, nn.Module) or (isinstance(what, (str, Path)) and os.path.isdir(what))


def check_source(what: Source) -> None:
    """UserError for what is of no kind that can be shown, before any of the others is."""
    model = isinstance(what, nn.Module) and hasattr(what, "config")  # an encoding by itself is a module too
    if not model and not isinstance(what, (str, os.PathLike, Capture)):
        raise UserError(
            f"{type(what).__name__} is nothing that can be shown: give an encoding such as 'alibi:slopes=geometric', a "
            "capture file, a folder with a model, a Capture, or a model of relpos or transformers"
        )


def resolve(
    what: Source,
    *,
    text: str | Path | None = None,
    tokens: Any = None,
    length: int | None = None,
    layers: str | Sequence[int] = "last",
    name: str | None = None,
) -> Capture:
    """The capture of one source. A length that is not given is 512, or a capture file's own."""
    if isinstance(what, Capture):
        return what
    if isinstance(what, nn.Module):
        return captures.from_model(what, text=text, tokens=tokens, length=length or 512, layers=layers, name=name)
    path = Path(what)
    is_dir, is_file = os.path.isdir(path), os.path.isfile(path)  # unlike Path's, they know no name that is too long
    if is_dir and (final(path) / "config.json").is_file():
        return captures.from_model(
            final(path), text=text, tokens=tokens, length=length or 512, layers=layers, name=name or path.resolve().name
        )
    if is_file and path.suffix != ".py" and str(what) not in encodings.names():
        held = captures.load(path)
        held.name = path.name.removesuffix(".safetensors")
        return held
    spec = str(what)
    plain = encodings.parse(spec)[0]
    if not plain.endswith(".py") and (os.sep in plain or is_dir or path.suffix == ".safetensors"):
        if is_dir and plain not in encodings.names():
            raise UserError(f"the folder {spec!r} holds no model: there is no config.json in it")
        if not is_dir:
            raise UserError(f"there is no file or folder {spec!r}")
    return captures.from_spec(spec, length=length or 512)


def parse_heads(text: str | Sequence[int] | None, count: int) -> list[int]:
    """Heads as pictures number them, from 1 ("all", "1,3,5-8" or numbers), as numbers from 0."""
    if text is None or text == "all":
        return list(range(count))
    wanted: list[int] = []
    mistake = UserError(f"heads are 'all' or numbers such as 1,3,5-8, not {text!r}")
    if isinstance(text, str):
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
            if not match:
                raise mistake
            first, last = int(match.group(1)), int(match.group(2) or match.group(1))
            wanted += range(first, min(last, max(first, count + 1)) + 1)  # one too many is enough to be refused
    else:
        try:
            wanted = [int(head) for head in ([text] if isinstance(text, int) else text)]
        except (TypeError, ValueError):
            raise mistake from None
    for head in wanted:
        if not 1 <= head <= count:
            raise UserError(f"there is no head {head}: this layer has {count}, numbered from 1")
    if not wanted:
        raise UserError("no heads to draw")
    return [head - 1 for head in dict.fromkeys(wanted)]
