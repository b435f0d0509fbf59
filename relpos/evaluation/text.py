"""The text a model is judged on: token ids, where its documents begin, and a fingerprint.

Sources: a folder made by `relpos data prepare`; a token stream (`.bin` or `.bin.xz`, little-endian uint16); or a plain
text file, which the model's own tokenizer cuts into tokens (a NUL ends a document, and every document is followed by
the tokenizer's end-of-text token where it has one). The fingerprint is the SHA-256 of the ids as little-endian uint32,
so two files that hold the same tokens have the same one, whatever their storage.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relpos.errors import UserError, nearest

SPLITS = ("train", "validation", "all")
_PIECE = 1 << 24  # tokens read at once
TEXT_BYTES = 1 << 30  # a text file is read whole; a larger one should be prepared


@dataclass(frozen=True)
class Text:
    tokens: np.ndarray  # [N], any unsigned integer type
    documents: np.ndarray  # int64, the start of every document; the first is 0
    about: dict[str, Any] = field(default_factory=dict)  # what the result file says about the data

    def segments(self) -> list[tuple[int, int]]:
        """First token and end of every document."""
        ends = np.append(self.documents[1:], len(self.tokens))
        return [(int(a), int(b)) for a, b in zip(self.documents, ends, strict=True)]


def make_text(tokens: Any, documents: Any = (0,), **about: Any) -> Text:
    """A text from token ids in memory."""
    tokens = np.asarray(tokens)
    if tokens.dtype.kind not in "ui":
        tokens = tokens.astype(np.int64)
    starts = np.unique(np.concatenate([[0], np.asarray(documents, dtype=np.int64)]))
    starts = starts[starts < max(1, len(tokens))]
    about = {
        "source": "memory",
        **about,
        "tokens": int(len(tokens)),
        "documents": int(len(starts)),
        "fingerprint": fingerprint(tokens),
    }
    return Text(tokens, starts, about)


def fingerprint(tokens: np.ndarray) -> str:
    sha = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 22):
        sha.update(np.asarray(tokens[start : start + (1 << 22)]).astype("<u4").tobytes())
    return f"sha256:{sha.hexdigest()}"


def open_text(
    source: str | Path,
    tokenizer: Any = None,
    *,
    split: str = "validation",
    eot: int | None = None,
    max_tokens: int | None = None,
    model_folder: str | Path | None = None,
) -> Text:
    """The text behind `source`, or its first `max_tokens`. `tokenizer` is the model's, needed for plain text only; the
    one in `model_folder` must be that of a prepared folder. `eot` is the id that ends a document in a token stream, by
    default the tokenizer's."""
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"at least 2 tokens are needed to predict one, not {max_tokens}")
    path = Path(source)
    if not path.exists():
        raise UserError(f"there is no text {str(path)!r}: give a prepared folder, a .bin or .bin.xz, or a text file")
    if path.is_dir():
        tokens, documents, about = _prepared(
            path, split, max_tokens, None if model_folder is None else Path(model_folder)
        )
    elif path.name.endswith((".bin", ".bin.xz")):
        tokens, documents, about = _stream(path, eot if eot is not None else getattr(tokenizer, "eos_token_id", None))
    else:
        tokens, documents, about = _plain(path, tokenizer)
    if len(tokens) == 0:
        raise UserError(f"{path} is empty: there is nothing to evaluate on")
    if max_tokens is not None and max_tokens < len(tokens):  # a prepared folder has done it
        about["whole_text"] = {"tokens": int(len(tokens)), "documents": int(len(documents))}
        tokens = tokens[:max_tokens]
    return make_text(tokens, documents, source=path.name, **about)


def _stream(path: Path, eot: int | None) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    if path.name.endswith(".xz"):
        try:
            raw = lzma.decompress(path.read_bytes())
        except (lzma.LZMAError, EOFError) as error:
            raise UserError(f"{path} is not a whole xz file: {error}") from None
        size = len(raw)
    else:
        size = path.stat().st_size
    if size % 2:
        raise UserError(f"{path} holds {size} bytes: not a stream of 16-bit token ids; is it cut off?")
    if size == 0:
        return np.empty(0, "<u2"), np.zeros(0, np.int64), {}
    tokens = np.frombuffer(raw, "<u2") if path.name.endswith(".xz") else np.memmap(path, "<u2", "r")
    documents = np.zeros(1, np.int64) if eot is None else np.append(0, np.flatnonzero(tokens == eot) + 1)
    return tokens, documents, {"kind": "token stream", "end_of_text": eot}


def _plain(path: Path, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    if path.stat().st_size > TEXT_BYTES:
        raise UserError(
            f"{path} is larger than {TEXT_BYTES >> 30} GiB: run `relpos data prepare` on it and pass the folder"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}. Token streams end in .bin or .bin.xz") from None
    if not text.strip("\0 \n\r\t"):
        return np.empty(0, np.uint32), np.zeros(0, np.int64), {}
    if tokenizer is None:
        raise UserError(
            f"{path} is plain text, and the model's folder has no tokenizer to cut it into tokens: "
            "pass a prepared folder or a .bin token stream"
        )
    end = tokenizer.eos_token_id
    ids: list[int] = []
    starts: list[int] = []
    for document in (d for d in text.split("\0") if d.strip()):
        starts.append(len(ids))
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if end is not None:
            ids.append(end)
    about = {
        "kind": "plain text",
        "end_of_text": end,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokenizer": type(tokenizer).__name__,
    }
    return np.asarray(ids, np.uint32), np.asarray(starts, np.int64), about


def _prepared(
    path: Path, split: str, max_tokens: int | None, folder: Path | None
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    from relpos.data import TokenData

    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}.{nearest(split, SPLITS)}")
    data = TokenData(path)
    _same_tokenizer(path, data.tokenizer_hash, folder)
    streams = {"train": [data.train], "validation": [data.validation], "all": [data.train, data.validation]}[split]
    total = sum(len(stream) for stream in streams)
    if total == 0:
        raise UserError(f"the {split} split of {path} is empty: choose another with --split ({', '.join(SPLITS)})")
    wanted = total if max_tokens is None else min(max_tokens, total)
    tokens = np.empty(wanted, data.dtype)
    starts: list[np.ndarray] = []
    begin = 0
    for stream in streams:
        starts.append(stream.starts + begin)
        for at in range(0, min(len(stream), wanted - begin), _PIECE):
            piece = stream.read(at, min(_PIECE, len(stream) - at, wanted - begin - at))
            tokens[begin + at : begin + at + len(piece)] = piece
        begin = min(begin + len(stream), wanted)
    about: dict[str, Any] = {"kind": "prepared folder", "split": split, "end_of_text": data.eot}
    about |= {"prepared_fingerprint": data.fingerprint, "tokenizer_hash": data.tokenizer_hash}
    if wanted < total:
        about["whole_text"] = {"tokens": total, "documents": sum(stream.documents for stream in streams)}
    return tokens, np.concatenate(starts), about


def _same_tokenizer(path: Path, known: str | None, folder: Path | None) -> None:
    """The ids mean the same to the data and to the model. Silent where one of them has no tokenizer."""
    from relpos.data import tokenizer as tokenizers

    if known is None or folder is None or not folder.is_dir():
        return
    try:
        own = tokenizers.load(folder).hash
    except UserError:
        return  # a model without a tokenizer: its vocabulary size is checked against the ids
    if own != known:
        raise UserError(
            f"the text in {path} was cut into tokens with another tokenizer than the one in {folder}: prepare it again "
            f"with --tokenizer {folder}"
        )
