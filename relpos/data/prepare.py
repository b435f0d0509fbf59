"""Text to token shards: parallel, bounded in memory, restartable after a kill without losing or doubling a document.

Documents are read in a fixed order, encoded by threads (tiktoken and tokenizers let go of the interpreter while they
work) and written in the same order, so the result does not depend on the number of workers. Shards are written into
`.part/`; a commit syncs them, renames them into place and then appends one line to `journal.jsonl` that says how far
the source has been read. A restart takes the last line of the journal and goes on after the document it names: shards
written but not journalled are written over. `index.json` comes last and the journal goes, so a folder with an index is
complete. A document goes to the validation split by the hash of its text, so a duplicate goes where its twin went.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relpos.data import sources, tokenizer
from relpos.data.progress import Progress
from relpos.data.shards import FORMAT, INDEX, JOURNAL, SPLITS, TOKENIZER, VERSION, TokenData
from relpos.errors import UserError

_PART, _LOCK = ".part", ".lock"
_CHUNK = 1 << 19  # characters (or tokens) handed to a thread at a time
_TOKENIZER_SAMPLE = 1 << 24  # characters a `bpe:N` is trained on


def prepare(
    source: str,
    out: str | Path,
    tokenizer_spec: str | None = None,
    *,
    eot: int | None = None,
    field: str = "text",
    separator: str = "\0",
    split: str = "train",
    config: str | None = None,
    validation: float = 0.01,
    max_tokens: int | None = None,
    shard_tokens: int = 1 << 26,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> TokenData:
    """Write the folder `out` and return it opened. Preparing the same thing again returns what is there.

    `validation` is the share of documents kept apart, by hash; `max_tokens` stops after the document that reaches it.
    """
    if not 0 <= validation < 1:
        raise UserError(f"--validation is a share of the documents from 0 to below 1, not {validation}")
    for name, value in (("--shard-tokens", shard_tokens), ("--max-tokens", max_tokens), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if eot is not None and not 0 <= eot < 1 << 32:
        raise UserError(f"--eot is a token id, from 0 on, not {eot}")
    if not separator:
        raise UserError("--separator cannot be empty; leave it out to split at NUL characters")
    options = sources.Options(field=field, separator=separator, eot=eot, split=split, config=config)
    found = sources.find(source, options)
    if tokenizer_spec is None and not found.tokens:
        raise UserError("say which tokenizer to use: --tokenizer bytes, bpe:4096, a rank file or a folder")
    if tokenizer_spec is not None and tokenizer_spec.startswith("bpe:"):
        tokenizer.size_of_spec(tokenizer_spec)
        if found.tokens:
            raise UserError("a BPE is trained on text; for a token stream give the tokenizer that made it")
    request = {
        "source": found.name,
        "source_fingerprint": found.fingerprint,
        "tokenizer": tokenizer_spec,
        "eot": eot,
        "validation": validation,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
    }
    folder = Path(out)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            if _already_there(folder, request, overwrite):
                return TokenData(folder)
            bar = Progress(f"preparing {found.name}", progress)
            try:
                _run(found, folder, request, workers or os.cpu_count() or 1, bar)
            except sources.Unreachable:
                raise  # what was committed stays, for a restart
            except UserError:
                _remove_ours(folder)  # nothing half-written: an unusable source leaves nothing behind
                raise
    except UserError:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full while writing {folder}. Make room and run the same command again: it goes on"
            ) from None
        raise
    return TokenData(folder)


def describe(data: TokenData) -> str:
    """A line or two for the terminal."""
    name, library = data.index["tokenizer"]["name"], data.index["tokenizer"]["library"]
    lines = [
        f"{data.folder}: {len(data.train):,} training tokens in {data.train.documents:,} documents, "
        f"{len(data.validation):,} validation tokens in {data.validation.documents:,}; "
        f"unigram entropy {data.unigram_entropy:.3f} nats",
        f"tokenizer: {name or 'none (token stream)'}, {data.vocab_size:,} ids" + (f", by {library}" if library else ""),
    ]
    share, documents = data.index["request"]["validation"], data.train.documents
    if share and not data.validation.documents:
        enough = min(0.5, max(2 * share, 5 / documents))
        more = f"--validation {enough:.2g} would keep some apart"
        if enough <= share:
            more = "documents with the same text always stay together"
        if documents == 1:
            more = "--separator says what lies between documents"
        lines.append(f"nothing to validate on: a share of {share:g} left out none of {documents:,} documents; {more}")
    skipped = data.index["skipped"]
    if skipped:
        lines.append(f"left out {len(skipped)} files that are not UTF-8 text, such as {skipped[0]}")
    return "\n".join(lines)


def unescape(text: str) -> str:
    """`\\n` and `\\0` as typed on a command line, into the characters they mean."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise UserError(f"--separator {text!r} has a wrong escape: {error}") from None


# The folder: who owns it, what is in it already.


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with open(folder / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is preparing {folder} right now") from None
        try:
            yield
        finally:
            (folder / _LOCK).unlink(missing_ok=True)


def _journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal: a line half written by a kill does not count."""
    path = folder / JOURNAL
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _already_there(folder: Path, request: dict[str, Any], overwrite: bool) -> bool:
    """True where the folder holds this very preparation, complete; an error where it holds something else."""
    advice = "choose another --out, or pass --overwrite"
    if overwrite:
        _remove_ours(folder)
    if (folder / INDEX).exists():
        made_by = TokenData(folder).index.get("request")
        if made_by != request:
            raise UserError(f"{folder} already holds other prepared data; {advice}")
        return True
    lines = _journal(folder)
    if lines and lines[0] != request:
        raise UserError(
            f"{folder} holds an unfinished preparation of something else, or its source has changed; {advice}"
        )
    if not lines:
        foreign = sorted({p.name for p in folder.iterdir()} - {_PART, _LOCK, JOURNAL, TOKENIZER})
        if foreign:
            raise UserError(f"{folder} is not empty (it holds {foreign[0]}); choose another --out")
    return False


def _remove_ours(folder: Path) -> None:
    """Delete what this module writes, and nothing else. The index goes first: without it nothing here counts."""
    (folder / INDEX).unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)
    for name in SPLITS:
        for path in [*folder.glob(f"{name}-[0-9]*.bin"), *folder.glob(f"{name}-[0-9]*.starts")]:
            path.unlink()
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    shutil.rmtree(folder / _PART, ignore_errors=True)
    (folder / _LOCK).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Writing.


class _ShardWriter:
    """One shard of one split, growing in `.part/`."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]):
        self.split, self.dtype, self.tokens = split, dtype, 0
        self.path, self.starts_path = folder / f"{split}.bin", folder / f"{split}.starts"
        self.starts = array("Q")
        self._file = open(self.path, "wb")  # noqa: SIM115
        self._sum = hashlib.sha256()
        self._waiting: list[np.ndarray] = []
        self._open_document = False

    def add(self, ids: np.ndarray, last: bool) -> None:
        if not self._open_document:
            self.starts.append(self.tokens)
        self._open_document = not last
        self._waiting.append(ids)
        self.tokens += len(ids)
        if len(self._waiting) > 4096 or len(ids) > _CHUNK:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            data = np.concatenate(self._waiting).astype(self.dtype).tobytes()
            self._waiting = []
            self._sum.update(data)
            self._file.write(data)

    def close(self) -> dict[str, Any]:
        """Sync to the disk; what the index says about this shard."""
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self.starts.itemsize == 8:
            raise AssertionError("array('Q') is not 64 bits wide here")
        starts = np.frombuffer(self.starts, dtype=np.uint64).astype("<u8").tobytes()
        with open(self.starts_path, "wb") as file:
            file.write(starts)
            file.flush()
            os.fsync(file.fileno())
        return {
            "tokens": self.tokens,
            "documents": len(self.starts),
            "sha256": self._sum.hexdigest(),
            "starts_sha256": hashlib.sha256(starts).hexdigest(),
        }


@dataclass
class _State:
    """How far the preparation is; a line of the journal."""

    segment: int = 0  # commits so far
    unit: int = 0  # the unit of the source being read
    documents: int = 0  # of that unit, done
    tokens: int = 0  # written in all
    largest: int = -1  # largest token id seen
    shards: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in SPLITS})


class _Writer:
    def __init__(self, folder: Path, state: _State, dtype: np.dtype[Any]):
        self.folder, self.state, self.dtype = folder, state, dtype
        self._begin()

    def _begin(self) -> None:
        part = self.folder / _PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        self.writers = {name: _ShardWriter(part, name, self.dtype) for name in SPLITS}

    @property
    def train_tokens(self) -> int:
        return self.writers["train"].tokens

    def commit(self) -> None:
        state, line = self.state, {}
        for name, writer in self.writers.items():
            entry = writer.close()
            if entry["tokens"]:
                stem = f"{name}-{state.segment:05d}"
                line[name] = {"file": f"{stem}.bin", "starts": f"{stem}.starts"} | entry
        for name, entry in line.items():
            os.replace(self.writers[name].path, self.folder / entry["file"])
            os.replace(self.writers[name].starts_path, self.folder / entry["starts"])
        _sync(self.folder)
        state.segment += 1
        for name, entry in line.items():
            state.shards[name].append(entry)
        _append(self.folder, {k: v for k, v in vars(state).items() if k != "shards"} | {"shards": line})
        self._begin()


def _append(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / JOURNAL, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _restore(folder: Path, request: dict[str, Any]) -> _State:
    """Where the journal says to go on."""
    lines = _journal(folder)
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    state = _State()
    if not lines:
        (folder / JOURNAL).unlink(missing_ok=True)
        _append(folder, request)
        return state
    with open(folder / JOURNAL, "r+", encoding="utf-8") as file:  # cut off a line that a kill left unfinished
        file.truncate(len(whole.encode()))
    for line in lines[1:]:
        for name, entry in line["shards"].items():
            state.shards[name].append(entry)
        for key, value in line.items():
            if key != "shards":
                setattr(state, key, value)
    return state


# Reading and encoding.


@dataclass
class _Chunk:
    """Pieces on their way to a thread. `marks` holds for each (unit, last piece of its document, first piece)."""

    pieces: list[Any] = field(default_factory=list)
    marks: list[tuple[int, bool, bool]] = field(default_factory=list)
    size: int = 0


def _chunks(source: sources.Source, state: _State) -> Iterator[_Chunk]:
    chunk = _Chunk()
    for number in range(state.unit, len(source.units)):
        first = True
        for piece, last in source.pieces(source.units[number], state.documents if number == state.unit else 0):
            chunk.pieces.append(piece)
            chunk.marks.append((number, last, first))
            chunk.size += len(piece)
            first = last
            if chunk.size >= _CHUNK or len(chunk.pieces) >= 4096:
                yield chunk
                chunk = _Chunk()
    if chunk.pieces:
        yield chunk


def _encode(tok: tokenizer.Tokenizer | None, chunk: _Chunk) -> tuple[_Chunk, list[np.ndarray], list[float]]:
    """Ids of each piece, and for the first piece of a document a number in [0, 1) by its hash."""
    ids = chunk.pieces if tok is None or isinstance(chunk.pieces[0], np.ndarray) else tok.encode_batch(chunk.pieces)
    places = []
    for piece, (_, _, first) in zip(chunk.pieces, chunk.marks, strict=True):
        if first:
            data = piece.encode("utf-8") if isinstance(piece, str) else piece.tobytes()
            places.append(int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48)
        else:
            places.append(-1.0)
    return chunk, ids, places


def _encoded(
    source: sources.Source, state: _State, tok: tokenizer.Tokenizer | None, workers: int
) -> Generator[tuple[_Chunk, list[np.ndarray], list[float]]]:
    """Encoded chunks in the order of the source, with a bounded number of them under way."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for chunk in _chunks(source, state):
                waiting.append(pool.submit(_encode, tok, chunk))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _load_tokenizer(source: sources.Source, folder: Path, request: dict[str, Any]) -> tokenizer.Tokenizer | None:
    """The tokenizer, saved in the folder. One that was trained before a kill is used again, not trained again."""
    spec, saved = request["tokenizer"], folder / TOKENIZER
    if spec is None:
        return None
    if (saved / "tokenizer.json").is_file():
        tok = tokenizer.load(saved, eot=request["eot"])
        tok.name = Path(spec).name
        return tok
    tok = tokenizer.load(spec, source.sample(_TOKENIZER_SAMPLE) if spec.startswith("bpe:") else (), request["eot"])
    if tok.eot is None:
        raise UserError(f"the tokenizer {spec} names no token that ends a document; say which with --eot ID")
    staged = folder / _PART / TOKENIZER
    shutil.rmtree(staged, ignore_errors=True)
    tok.save(staged)
    shutil.rmtree(saved, ignore_errors=True)
    os.replace(staged, saved)
    return tok


def _run(source: sources.Source, folder: Path, request: dict[str, Any], workers: int, bar: Progress) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the threads here are the parallelism
    tok = _load_tokenizer(source, folder, request)
    vocab_size = None if tok is None else tok.vocab_size
    eot: int = request["eot"] if tok is None or tok.eot is None else tok.eot
    dtype = np.dtype("<u2") if (vocab_size or 0) <= 1 << 16 else np.dtype("<u4")
    state = _restore(folder, request)
    writer = _Writer(folder, state, dtype)
    end_of_text = np.asarray([eot], dtype=np.uint32)
    before = np.cumsum([0, *[unit.size for unit in source.units]])
    began, tokens_then = time.monotonic(), state.tokens
    most = request["max_tokens"]
    full = most is not None and state.tokens >= most  # all is there, if only the index was not written
    into, empty = "train", True  # the split of the document being written; whether it has no token yet
    read = 0  # of the current unit
    with bar, contextlib.closing(_encoded(source, state, tok, workers)) as encoded:
        for chunk, arrays, places in () if full else encoded:
            for (unit, last, first), ids, place in zip(chunk.marks, arrays, places, strict=True):
                if unit != state.unit:
                    state.unit, state.documents, read = unit, 0, 0
                if first:
                    into, empty = "validation" if place < request["validation"] else "train", True
                read += len(ids) * (2 if source.tokens else 4)
                if len(ids):
                    top = int(ids.max())
                    state.largest = max(state.largest, top)
                    if vocab_size is not None and top >= vocab_size:
                        raise UserError(
                            f"{source.units[unit].name} holds the token {top}, but the tokenizer has only ids 0 to "
                            f"{vocab_size - 1}: it is not the one that made this stream"
                        )
                    empty = False
                    writer.writers[into].add(ids, last and source.tokens)
                    state.tokens += len(ids)
                if not last:
                    continue
                if not empty and not source.tokens:
                    writer.writers[into].add(end_of_text, True)
                    state.tokens += 1
                state.documents += 1
                full = most is not None and state.tokens >= most
                if full or writer.train_tokens >= request["shard_tokens"]:
                    writer.commit()
                if full:
                    break
            done = (before[state.unit] + min(read, source.units[state.unit].size)) / max(source.size, 1)
            speed = (state.tokens - tokens_then) / max(time.monotonic() - began, 1e-9)
            bar(float(done), f"{state.tokens:,} tokens, {speed / 1e6:.2f}M/s")
            if full:
                break
    if not state.tokens:
        raise UserError(f"{source.name} is empty: no document with any text in it")
    if not full:
        writer.commit()
    if not state.shards["train"]:
        raise UserError(f"{source.name} left nothing to train on: every document is in validation; lower --validation")
    _finish(source, folder, request, state, tok, dtype, eot)


def _finish(
    source: sources.Source,
    folder: Path,
    request: dict[str, Any],
    state: _State,
    tok: tokenizer.Tokenizer | None,
    dtype: np.dtype[Any],
    eot: int,
) -> None:
    vocab_size = tok.vocab_size if tok is not None else max(state.largest, eot) + 1
    sums = [[s["sha256"], s["starts_sha256"]] for name in SPLITS for s in state.shards[name]]
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
        "vocab_size": vocab_size,
        "eot": eot,
        "tokenizer": {
            "name": None if tok is None else tok.name,
            "hash": None if tok is None else tok.hash,
            "library": None if tok is None or source.tokens else tok.library,
        },
        "unigram_entropy": _unigram_entropy(folder, state, dtype, vocab_size),
        "splits": {
            name: {
                "tokens": sum(s["tokens"] for s in state.shards[name]),
                "documents": sum(s["documents"] for s in state.shards[name]),
                "shards": state.shards[name],
            }
            for name in SPLITS
        },
        "fingerprint": hashlib.sha256(json.dumps([sums, vocab_size, eot]).encode()).hexdigest(),
        "skipped": source.skipped[:100],
        "request": request,
    }
    shutil.rmtree(folder / _PART, ignore_errors=True)
    staged = folder / f".{INDEX}"
    with open(staged, "w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, folder / INDEX)
    _sync(folder)
    (folder / JOURNAL).unlink(missing_ok=True)


def _unigram_entropy(folder: Path, state: _State, dtype: np.dtype[Any], vocab_size: int) -> float:
    """Entropy of the training tokens without any context, in nats: what a model must beat to have learned anything."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in state.shards["train"]:
        with open(folder / shard["file"], "rb") as file:
            while len(tokens := np.fromfile(file, dtype=dtype, count=1 << 19)):
                counts += np.bincount(tokens, minlength=vocab_size)
    p = counts[counts > 0] / counts.sum()
    entropy = float(-(p * np.log(p)).sum())
    assert math.isfinite(entropy)
    return max(entropy, 0.0)
