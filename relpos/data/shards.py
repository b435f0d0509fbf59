"""The folder that `relpos data prepare` writes, and how it is read.

    index.json            written last: a folder with it is complete
    tokenizer/            tokenizer.json and its configuration (left out for a token stream without --tokenizer)
    train-00000.bin       token ids, little-endian uint16 or uint32, every document followed by the end of text
    train-00000.starts    little-endian uint64: where each document begins, counted from the start of its shard
    validation-00000.bin  the documents kept apart, the same way

Reading is memory-mapped: a split is one long array that happens to lie in several files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from relpos.errors import UserError

FORMAT, VERSION = "relpos-tokens", 1
INDEX, JOURNAL, TOKENIZER = "index.json", "journal.jsonl", "tokenizer"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    file: str
    starts: str
    tokens: int
    documents: int
    sha256: str
    starts_sha256: str


class TokenStream:
    """One split as one array: `read(start, length)`, across the borders of the files."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shards: list[Shard]):
        self.shards = shards
        self._maps = [np.memmap(folder / s.file, dtype=dtype, mode="r") for s in shards]  # no shard is empty
        self._begin = np.cumsum([0, *[s.tokens for s in shards]])
        self._folder = folder

    def __len__(self) -> int:
        return int(self._begin[-1])

    @property
    def documents(self) -> int:
        return sum(s.documents for s in self.shards)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length`, as int64."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        shard = int(np.searchsorted(self._begin, start, side="right")) - 1
        out = np.empty(length, dtype=np.int64)
        done = 0
        while done < length:
            at = start + done - int(self._begin[shard])
            part = self._maps[shard][at : at + length - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1
        return out

    @cached_property
    def starts(self) -> np.ndarray:
        """Where every document begins in this array, int64, ascending."""
        parts = [
            np.fromfile(self._folder / s.starts, dtype="<u8").astype(np.int64) + int(begin)
            for s, begin in zip(self.shards, self._begin, strict=False)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class TokenData:
    """An opened folder. Opening checks the index and the size of every file; `verify` compares the checksums too."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = _read_index(self.folder)
        self.dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self.vocab_size: int = self.index["vocab_size"]
        self.eot: int = self.index["eot"]
        self.fingerprint: str = self.index["fingerprint"]
        self.tokenizer_hash: str | None = self.index["tokenizer"]["hash"]
        self.unigram_entropy: float = self.index["unigram_entropy"]
        shards = {name: [Shard(**s) for s in self.index["splits"][name]["shards"]] for name in SPLITS}
        for shard in [*shards["train"], *shards["validation"]]:
            self._check_size(shard.file, shard.tokens * self.dtype.itemsize)
            self._check_size(shard.starts, shard.documents * 8)
        self.train = TokenStream(self.folder, self.dtype, shards["train"])
        self.validation = TokenStream(self.folder, self.dtype, shards["validation"])

    @property
    def tokenizer_folder(self) -> Path | None:
        path = self.folder / TOKENIZER
        return path if (path / "tokenizer.json").is_file() else None

    def _check_size(self, name: str, expected: int) -> None:
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"the shard {path} is missing; prepare the data again")
        size = path.stat().st_size
        if size != expected:
            how = "truncated" if size < expected else "not the one that was written"
            raise UserError(f"the shard {path} is {how}: {size} bytes, not {expected}; prepare the data again")

    def verify(self) -> None:
        """Compare the checksum of every file with the index."""
        if self.tokenizer_hash is not None:
            from relpos.data import tokenizer

            if self.tokenizer_folder is None:
                raise UserError(f"the tokenizer in {self.folder / TOKENIZER} is missing; prepare the data again")
            if tokenizer.load(self.tokenizer_folder).hash != self.tokenizer_hash:
                raise UserError(f"the tokenizer in {self.tokenizer_folder} is not the one that made the data")
        for stream in (self.train, self.validation):
            for shard in stream.shards:
                for name, expected in ((shard.file, shard.sha256), (shard.starts, shard.starts_sha256)):
                    with open(self.folder / name, "rb") as file:
                        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                            raise UserError(
                                f"the shard {self.folder / name} does not match its checksum: it is damaged or from "
                                "elsewhere. Prepare the data again"
                            )


def _read_index(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {str(folder)!r} with prepared data; `relpos data prepare` makes one")
    path = folder / INDEX
    if not path.is_file():
        if (folder / JOURNAL).is_file():
            raise UserError(
                f"the preparation of {folder} was not finished; run the same `relpos data prepare` again, it goes on"
            )
        raise UserError(f"{folder} has no {INDEX}: it was not written by `relpos data prepare`")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}. Prepare the data again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path} is not an index of `relpos data prepare`")
    if index.get("version") != VERSION:
        found = index.get("version")
        raise UserError(f"{path} has version {found}, this relpos reads {VERSION}; prepare the data again")
    return index
