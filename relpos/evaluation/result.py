"""The result file: one JSON per model that states how its numbers came about, written whole or not at all.

`docs/evaluation.md` describes the fields. `FORMAT_VERSION` changes when a reader of the old format would misread the
new one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relpos
from relpos.errors import UserError

PERPLEXITY = "relpos-evaluation"
PASSKEY = "relpos-passkey"
FORMAT_VERSION = 1


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Beside the target, then renamed: a reader sees the old file or the new one. Not a number is an error here."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staged.write_text(text + "\n", encoding="utf-8")
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def read_json(path: str | Path, formats: tuple[str, ...] = (PERPLEXITY, PASSKEY)) -> dict[str, Any]:
    """A result file, checked to be one of ours and not newer than this version understands."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(value, dict) or value.get("format") not in formats:
        wanted = " or ".join(repr(f) for f in formats)
        raise UserError(f"{path} is not a result of `relpos evaluate`: its format should be {wanted}")
    if not isinstance(value.get("format_version"), int) or value["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {value.get('format_version')}; this relpos reads up to {FORMAT_VERSION}. "
            "Read it with the relpos that wrote it, or a newer one"
        )
    lost = _lacking(value, _PARTS[value["format"]])
    if value["format"] == PERPLEXITY and not lost:
        if not isinstance(value["protocols"], dict):
            raise UserError(f"{path} is no whole result: protocols should be an object")
        for name, protocol in value["protocols"].items():
            lost = lost or _lacking({name: protocol}, {name: _PROTOCOL})
    if lost:
        raise UserError(f"{path} is no whole result: {lost} is not there")
    return value


def measured(value: dict[str, Any]) -> tuple[dict[tuple[str, int], dict[str, Any]], bool]:
    """The good lines of a result by protocol and length, and whether the others are for good: a failure may have been
    the machine's and is tried again, while what a model or a text has no room for stays so."""
    entries = value["protocols"] if "protocols" in value else {"passkey": value}
    rows = {(name, row["length"]): row for name, entry in entries.items() for row in entry["results"]}
    good = {place: row for place, row in rows.items() if row["status"] == "ok"}
    return good, all(row["status"] != "failed" for row in rows.values())


# Of rows that are "ok", what else they must have.
_PROTOCOL: dict[str, Any] = {
    "statement": {},
    "scored": {"fingerprint": {}, "tokens": {}},
    "clusters": {"what": {}, "tokens": {}},
    "results": ["perplexity", "ci95", "loss", "cluster_loss"],
}
_MODEL: dict[str, Any] = dict.fromkeys(
    ("name", "class", "encoding", "parameters", "train_length", "dtype", "fingerprint"), {}
)
_PARTS: dict[str, dict[str, Any]] = {
    PERPLEXITY: {
        "model": _MODEL,
        "data": {"source": {}, "fingerprint": {}, "tokens": {}},
        "settings": {},
        "interval": {"method": {}},
        "protocols": {},
        "effective_context": {"rule": {}, "length": {}},
    },
    PASSKEY: {"model": _MODEL, "settings": {}, "protocol": {"statement": {}}, "results": []},
}


def _lacking(value: Any, parts: dict[str, Any], where: str = "") -> str:
    """The first of these parts that a result lacks, "" if it has all. A part with parts of its own is an object, one
    with a list has rows with a length and a status."""
    for name, inner in parts.items():
        if not isinstance(value, dict) or name not in value:
            return f"{where}{name}"
        if isinstance(inner, list):
            rows: list[Any] = value[name] if isinstance(value[name], list) else [None]
            if not all(isinstance(row, dict) and {"length", "status"} <= set(row) for row in rows):
                return f"{where}{name}: rows with length and status"
            for key in inner:
                if any(row["status"] == "ok" and key not in row for row in rows):
                    return f"{where}{name}: {key} of each row"
        elif inner:
            lost = _lacking(value[name], inner, f"{where}{name}.")
            if lost:
                return lost
    return ""


def pack(values: np.ndarray) -> str:
    """An array as base64 of little-endian float32."""
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode("ascii")


def unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def versions(device: torch.device | str = "cpu") -> dict[str, str]:
    found = {"python": platform.python_version(), "relpos": relpos.__version__}
    for name in ("torch", "transformers", "tokenizers", "numpy", "triton", "lm_eval"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    device = torch.device(device)
    found["machine"] = f"{platform.system()} {platform.machine()}"
    found["device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    )
    return found


def command() -> str:
    """The command line as typed, without the folder the program lies in."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv and sys.argv[0] else ""


def digest(value: Any) -> str:
    """A short name of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def finite(value: float) -> float | None:
    """JSON has no infinity: a loss over 700 has a perplexity that no float holds."""
    return float(value) if np.isfinite(value) else None
