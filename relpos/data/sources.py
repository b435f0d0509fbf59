"""Documents from files, folders and datasets, piece by piece, in an order that a restart can repeat.

A source is a list of units (a file, a row group of a Parquet file, a dataset) read in a fixed order. A unit yields
pieces of documents `(piece, last)`: text, or token ids for a token stream. Most documents are one piece; a very long
one is cut where GPT-2-like pre-tokenizers cut too (between a letter and a space), so memory stays bounded and the
tokens are those of the whole. A restart goes to the unit and skips the documents of it that are done.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from relpos.errors import UserError, nearest

Piece = tuple["str | np.ndarray", bool]  # the piece, and whether it is the last of its document

STDLIB = "stdlib"  # the name of the corpus that every machine with Python has
_BLOCK = 1 << 20  # characters or tokens read at a time
LONGEST = 1 << 21  # characters or tokens in one piece; a longer document comes in several
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")


class Unreachable(UserError):
    """A source that cannot be read now but may be later: what was prepared from it so far is kept."""


@dataclass(frozen=True)
class Unit:
    """What is read in one go. `name` and `size` go into the fingerprint that a restart must find again."""

    kind: str  # "text", "jsonl", "parquet", "tokens", "dataset"
    path: str
    name: str
    size: int
    part: int = 0  # row group of a Parquet file


@dataclass(frozen=True)
class Options:
    field: str = "text"  # of a JSONL line, a Parquet column, a dataset row
    separator: str = "\0"  # between documents of a text file
    eot: int | None = None  # ends a document of a token stream
    split: str = "train"  # of a Hugging Face dataset
    config: str | None = None  # of a Hugging Face dataset


@dataclass(frozen=True)
class Source:
    name: str
    units: list[Unit]
    options: Options
    skipped: list[str] = field(default_factory=list)  # files of a folder that hold no text

    @property
    def tokens(self) -> bool:
        """Whether it holds token ids rather than text."""
        return self.units[0].kind == "tokens"

    @property
    def size(self) -> int:
        """Bytes on disk, for a progress bar; 0 where unknown."""
        return sum(unit.size for unit in self.units)

    @property
    def fingerprint(self) -> str:
        units = [(u.kind, u.name, u.size, u.part) for u in self.units]
        return hashlib.sha256(json.dumps([units, vars(self.options)]).encode()).hexdigest()

    def pieces(self, unit: Unit, skip: int = 0) -> Iterator[Piece]:
        """The pieces of a unit's documents, the first `skip` documents left out. Empty documents do not count."""
        if unit.kind == "dataset":  # it can skip by itself
            yield from _dataset(unit, self.options, skip)
            return
        readers = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "tokens": _tokens}
        for piece in readers[unit.kind](unit, self.options):
            if skip == 0:
                yield piece
            elif piece[1]:
                skip -= 1

    def sample(self, characters: int) -> Iterator[str]:
        """Text from all over the source, for training a tokenizer: units in the order of their names' hashes."""
        units = sorted(self.units, key=lambda u: hashlib.sha256(f"{u.name} {u.part}".encode()).digest())
        share = max(characters // max(len(units), 1), 1 << 16)
        for unit in units:
            left = min(share, characters)
            for piece, _ in self.pieces(unit):
                assert isinstance(piece, str)
                yield piece
                left -= len(piece)
                characters -= len(piece)
                if left <= 0:
                    break
            if characters <= 0:
                return


def find(source: str, options: Options) -> Source:
    """What SOURCE names: a file, a folder, `stdlib`, or a dataset of the Hugging Face Hub."""
    path = Path(source).expanduser()
    if source == STDLIB:
        return Source(STDLIB, _stdlib(), options)
    if path.is_dir():
        return _folder(path, options)
    if path.is_file():
        kind = "jsonl" if path.suffix.lower() == ".json" else _kind(path)
        if kind == "tokens" and options.eot is None:
            raise UserError(f"{path} is a token stream: say which token ends a document, such as --eot 50256 for GPT-2")
        units = _units(path, path.name, kind)
        if not units:
            raise UserError(f"{path} is not UTF-8 text, JSONL, Parquet or a token stream (.bin, .bin.xz)")
        return Source(path.name, units, options)
    if re.fullmatch(r"(hf:)?[A-Za-z0-9][\w.-]*/[\w.-]+", source) and path.suffix not in _SUFFIXES:
        name = source.removeprefix("hf:")
        _load_dataset(name, options)  # a wrong name or a missing package is known now, not in the middle
        return Source(name, [Unit("dataset", name, name, 0)], options)
    raise UserError(f"there is no file or folder {source!r}, nor is it a Hugging Face dataset's name: owner/name")


_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "tokens", ".txt": "text", ".json": "text",
}  # fmt: skip


def _kind(path: Path) -> str:
    """By the suffix, that of a compression aside."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in (".xz", ".gz"):
        suffixes = suffixes[:-1]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "text")


def _units(path: Path, name: str, kind: str) -> list[Unit]:
    """The units of one file; none where it holds no text."""
    size = path.stat().st_size
    if kind == "parquet":
        groups = _parquet_file(path).num_row_groups
        return [Unit(kind, str(path), name, size // max(groups, 1), group) for group in range(groups)]
    if kind in ("text", "jsonl"):
        with _open(path) as file:
            try:
                codecs.getincrementaldecoder("utf-8")().decode(file.read(1 << 20))
            except (UnicodeDecodeError, OSError, EOFError, lzma.LZMAError):
                return []
    return [Unit(kind, str(path), name, size)]


def _folder(folder: Path, options: Options) -> Source:
    units: list[Unit] = []
    skipped: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        for file in sorted(f for f in files if not f.startswith(".")):
            path = Path(root) / file
            if not path.is_file() or path.stat().st_size == 0:
                continue
            name = path.relative_to(folder).as_posix()
            kind = _kind(path)
            if kind == "tokens" and options.eot is None:
                kind = "text"  # some binary file, which is then left out
            found = _units(path, name, kind)
            units += found
            skipped += [] if found else [name]
    kinds = {unit.kind == "tokens" for unit in units}
    if len(kinds) > 1:
        raise UserError(f"{folder} mixes token streams with text; prepare them apart")
    if not units:
        raise UserError(f"{folder} holds no text: {len(skipped)} files, none of them UTF-8 text, JSONL or Parquet")
    return Source(folder.resolve().name, units, options, skipped)


_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def _stdlib() -> list[Unit]:
    """The Python standard library's source, tests and installed packages left out: 10 to 20 MB on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    units = []
    for at, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        for file in sorted(files):
            path = Path(at) / file
            if file.endswith(".py") and path.stat().st_size > 0:
                name = path.relative_to(root).as_posix()
                units += [Unit("text", str(path), name, path.stat().st_size)]
    if not units:
        raise UserError(f"this Python's standard library has no source in {root}; give a SOURCE of your own")
    return units


# One reader for each kind.


def _open(path: str | Path) -> IO[bytes]:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _blocks(unit: Unit, size: int) -> Iterator[bytes]:
    try:
        with _open(unit.path) as file:
            while block := file.read(size):
                yield block
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{unit.path} is truncated or damaged: {error}") from None


def _cut(text: str) -> int:
    """Where to cut a long text: the last border of a word, else the end."""
    tail = text[-4096:]
    for match in reversed(list(_CUT.finditer(tail))):
        return len(text) - len(tail) + match.end()
    return len(text)


def _clean(text: str) -> str:
    """JSON may hold half of a surrogate pair, which no encoding can write."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")


def _long(text: str) -> Iterator[Piece]:
    """One document, in pieces where it is long."""
    while len(text) > LONGEST:
        at = _cut(text[:LONGEST])
        yield text[:at], False
        text = text[at:]
    yield text, True


class _Decoder:
    """UTF-8 in blocks. A file is known to begin as such; what is none further in is not replaced in silence."""

    def __init__(self, unit: Unit):
        self.unit, self.inner, self.read = unit, codecs.getincrementaldecoder("utf-8")(), 0

    def __call__(self, block: bytes, last: bool = False) -> str:
        try:
            text = self.inner.decode(block, last)
        except UnicodeDecodeError as error:
            where = f"around byte {self.read + error.start:,}"
            raise UserError(f"{self.unit.path} is not UTF-8 text {where}: convert it, or leave it out") from None
        self.read += len(block)
        return text


def _text(unit: Unit, options: Options) -> Iterator[Piece]:
    decoder = _Decoder(unit)
    separator = options.separator
    rest = ""
    started = False  # whether a piece of the current document has gone out
    for block in _blocks(unit, _BLOCK):
        rest += decoder(block)
        *whole, rest = rest.split(separator)
        for text in whole:
            if started:
                yield text, True
            elif text.strip():
                yield from _long(text)
            started = False
        while len(rest) > LONGEST:
            # The separator may be half read: never cut inside the last few characters.
            at = _cut(rest[: LONGEST - len(separator)])
            yield rest[:at], False
            rest, started = rest[at:], True
    rest += decoder(b"", True)
    if started or rest.strip():
        yield from _long(rest)


def _jsonl(unit: Unit, options: Options) -> Iterator[Piece]:
    try:
        with _open(unit.path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise UserError(f"{unit.path}, line {number} is not JSON: {error}") from None
                text = _field(row, options.field, f"{unit.path}, line {number}")
                if text.strip():
                    yield from _long(_clean(text))
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{unit.path} is truncated or damaged: {error}") from None


def _field(row: Any, name: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with the field {name!r}, found {type(row).__name__}")
    text = row.get(name)
    if not isinstance(text, str):
        texts = [key for key, value in row.items() if isinstance(value, str)]
        what = "has no field" if name not in row else f"holds {type(text).__name__} and no text in the field"
        raise UserError(f"{where} {what} {name!r}; say which with --field.{nearest(name, texts)}")
    return text


def _parquet_file(path: str | Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'relpos[data]'") from None
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a whole Parquet file: {error}") from None


def _parquet(unit: Unit, options: Options) -> Iterator[Piece]:
    file = _parquet_file(unit.path)
    names = file.schema_arrow.names
    if options.field not in names:
        hint = nearest(options.field, names)
        raise UserError(f"{unit.path} has no column {options.field!r}; say which with --field.{hint}")
    for batch in file.iter_batches(batch_size=64, row_groups=[unit.part], columns=[options.field]):
        for value in batch.column(0):
            text = value.as_py()
            if text is None:
                continue
            if not isinstance(text, str):
                raise UserError(f"{unit.path}: column {options.field!r} holds {batch.column(0).type}, not text")
            if text.strip():
                yield from _long(text)


def _tokens(unit: Unit, options: Options) -> Iterator[Piece]:
    """Little-endian uint16; a document ends with the token `eot`, which stays."""
    if options.eot is not None and options.eot >= 1 << 16:
        raise UserError(f"--eot {options.eot} cannot be in {unit.path}: its tokens take two bytes, ids 0 to 65535")
    started = False
    left = b""
    for block in _blocks(unit, 2 * _BLOCK):
        block = left + block
        even = len(block) // 2 * 2
        left = block[even:]
        ids = np.frombuffer(block[:even], dtype="<u2")
        begin = 0
        for end in np.flatnonzero(ids == options.eot) + 1:
            if started or end - begin > 1:  # more than the bare end of text
                yield ids[begin:end], True
            begin, started = int(end), False
        if begin < len(ids):
            yield ids[begin:], False
            started = True
    if left:
        raise UserError(f"{unit.path} is truncated: its length is odd, and a token takes two bytes")
    if started:  # the stream ends within a document: close it
        yield np.asarray([options.eot], dtype=np.uint16), True


def _load_dataset(name: str, options: Options) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"there is no file or folder {name!r}; to read it as a Hugging Face dataset, pip install 'relpos[data]'"
        ) from None
    try:
        return load_dataset(name, options.config, split=options.split, streaming=True)
    except Exception as error:  # the library raises a dozen kinds: no such dataset, no such split, no network
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unreachable(f"the dataset {name!r} (split {options.split!r}) cannot be read: {first}") from None


def _dataset(unit: Unit, options: Options, skip: int) -> Iterator[Piece]:
    """Rows of a streamed dataset. A row without text is an empty piece, so that `skip` can be left to the library."""
    for number, row in enumerate(_load_dataset(unit.path, options).skip(skip), skip):
        text = _field(row, options.field, f"{unit.path}, row {number}")
        yield from _long(_clean(text) if text.strip() else "")
