"""Files that are written whole or not at all, and what a model's folder holds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relpos.errors import UserError

MANIFEST = "checkpoint.json"  # in a checkpoint: its files and their sizes


def whole(path: Path, put: Callable[[Path], Any]) -> Path:
    """What `put` writes appears under its name when it is whole; folders are made. UserError where that cannot be."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(temporary)
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # where a file stands in place of the folder
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
        raise
    return path


def check_place(path: Path) -> None:
    """UserError where a file in place of a folder keeps `path` from being written: known before the work is done."""
    there = next((parent for parent in path.parents if parent.exists()), None)
    if there is not None and not there.is_dir():
        raise UserError(f"cannot write {str(path)!r}: {str(there)!r} is no folder")


def write_text(path: Path, text: str) -> Path:
    return whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, no UTF-8
        raise UserError(f"{str(path)!r} is not valid JSON ({error}): it was cut off or edited") from None


def settings_in(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{str(path)!r} holds no settings, but {type(found).__name__}")
    return found


def settings_of(folder: Path) -> dict[str, Any]:
    """What `config.json` of a model that save_pretrained wrote says."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{str(folder)!r} holds no config.json: it is no model that save_pretrained wrote")
    return settings_in(path)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint in a run, whole or not, in the order of training."""
    named = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return sorted((int(step), path) for step, path in named if step.isdecimal())


def complete(checkpoint: Path) -> bool:
    """Whether this is a whole checkpoint: the files its list names, with their sizes. Where no run of ours left it, and
    so no list, a model must do."""
    if not (checkpoint / MANIFEST).exists() and not (checkpoint.parent / "run.json").exists():
        return (checkpoint / "config.json").is_file()
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def final(folder: Path) -> Path:
    """The model of a run folder: its own, or its last whole checkpoint where the run has not ended yet."""
    if (folder / "config.json").is_file():
        return folder
    return next((path for _, path in reversed(checkpoints(folder)) if complete(path)), folder)
