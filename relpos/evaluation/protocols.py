"""The protocols: which windows of the text a model reads, and which of their tokens count.

A window of length T feeds T tokens `x[s] .. x[s+T-1]`; row t predicts `x[s+t+1]`. The first token of a text (or of a
document, where documents are kept apart) has nothing before it and is never scored. Every other token counts at most
once per protocol and length, and the counted tokens are the same at every length:

- `blocks`: consecutive windows without overlap, every token of each counts; its context is anything from 1 to T tokens.
  This is what the CABLE paper does. A stream is cut to whole windows of the longest length.
- `sliding`: windows overlap, moving by `stride`; only tokens not yet counted count, so all but the first few have at
  least `T - stride` tokens before them.
- `last`: windows of all lengths end at the same places, one every `every` tokens, and only the last `k` tokens count:
  the length of the context is the only difference between two lengths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from relpos.errors import UserError, nearest, several
from relpos.evaluation.text import Text

PROTOCOLS = ("blocks", "sliding", "last")
DOCUMENTS = ("stream", "separate")
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Settings:
    """How to score. None means a default that follows from the lengths; `resolve` fills it in."""

    lengths: tuple[int, ...] = PAPER_LENGTHS
    protocols: tuple[str, ...] = ("blocks", "last")
    stride: int | None = None  # sliding: half the shortest length
    last: int | None = None  # last: k tokens, 256 or the shortest length
    every: int | None = None  # last: one window end every so many tokens, a quarter of the longest length that fits
    documents: str = "stream"
    min_document: int = 2  # documents with fewer tokens are left out where documents are separate
    bos: int | None = None  # this id replaces the first token of every window
    batch_tokens: int = 8192  # windows are read together up to so many tokens

    def resolve(self, text: Text | None = None) -> Settings:
        """Checked and filled in. What follows from the text (`every`) waits until it is given."""
        for name in several("protocols", self.protocols):
            if name not in PROTOCOLS:
                raise UserError(f"there is no protocol {name!r}.{nearest(name, PROTOCOLS)}")
        if self.documents not in DOCUMENTS:
            raise UserError(f"--documents cannot be {self.documents!r}.{nearest(self.documents, DOCUMENTS)}")
        lengths = tuple(sorted(set(several("lengths", self.lengths))))
        if not lengths or lengths[0] < 1:
            raise UserError(f"lengths must be whole numbers of tokens from 1 on, not {list(self.lengths)}")
        if not self.protocols:
            raise UserError(f"name at least one protocol: {', '.join(PROTOCOLS)}")
        for name in ("stride", "last", "every", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        for name, value in (("stride", self.stride), ("last", self.last)):
            if value is not None and value > lengths[0]:
                raise UserError(
                    f"{name}={value} is more than the shortest length, {lengths[0]}: not all tokens would fit"
                )
        last = self.last or min(256, lengths[0])
        every = self.every
        if every is not None and every < last and "last" in self.protocols:
            raise UserError(f"every={every} is less than last={last}: tokens would count more than once")
        if every is None and text is not None:
            every = max(last, max(fitting(text, self)[0], default=lengths[-1]) // 4)
        return Settings(
            lengths=lengths,
            protocols=tuple(p for p in PROTOCOLS if p in self.protocols),
            stride=self.stride or max(1, lengths[0] // 2),
            last=last,
            every=every,
            documents=self.documents,
            min_document=max(2, self.min_document),
            bos=self.bos,
            batch_tokens=self.batch_tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Windows:
    """Windows of one protocol and length. Row r of window w predicts token `start[w] + r + 1`; rows from `first[w]` on
    count."""

    start: np.ndarray  # int64
    size: np.ndarray  # int64, tokens fed
    first: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.start)

    def targets(self) -> np.ndarray:
        """Indices of all tokens that count, in order of the windows."""
        if not len(self):
            return np.empty(0, np.int64)
        return np.concatenate(
            [np.arange(s + f + 1, s + n + 1) for s, n, f in zip(self.start, self.size, self.first, strict=True)]
        )

    def batches(self, batch_tokens: int) -> list[np.ndarray]:
        """Indices of windows read together: neighbours of the same shape, at most `batch_tokens` or one window."""
        groups: list[list[int]] = []
        for w in range(len(self)):
            group = groups[-1] if groups else []
            same = group and self.size[group[0]] == self.size[w] and self.first[group[0]] == self.first[w]
            if same and (len(group) + 1) * self.size[w] <= batch_tokens:
                group.append(w)
            else:
                groups.append([w])
        return [np.asarray(g) for g in groups]


def segments(text: Text, settings: Settings) -> list[tuple[int, int]]:
    """The stretches no window leaves: the whole text, or each document of at least `min_document` tokens."""
    if settings.documents == "stream":
        return [(0, len(text.tokens))]
    return [(a, b) for a, b in text.segments() if b - a >= settings.min_document]


def fitting(text: Text, settings: Settings) -> tuple[list[int], dict[int, str]]:
    """The lengths this text is long enough for, and why not for the others."""
    longest = max((b - a for a, b in segments(text, settings)), default=0)
    what = "the text has" if settings.documents == "stream" else "the longest document has"
    fit = [T for T in settings.lengths if longest >= T + 1]
    return fit, {T: f"{what} {longest} tokens; a window of {T} needs {T + 1}" for T in settings.lengths if T not in fit}


def windows(protocol: str, T: int, text: Text, settings: Settings) -> Windows:
    """All windows of one protocol and length. `T` must fit (see `fitting`); `settings` must be resolved."""
    longest = max(fitting(text, settings)[0])
    found: list[tuple[int, int, int]] = []
    for a, b in segments(text, settings):
        n = b - a - 1  # tokens that can be predicted
        if protocol == "blocks":
            if settings.documents == "stream":
                n -= n % longest
            found += [(a + s, min(T, n - s), 0) for s in range(0, n, T)]
        elif protocol == "sliding":
            assert settings.stride is not None
            done = min(T, n)
            found.append((a, done, 0))
            while done < n:
                end = min(done + settings.stride, n)
                start = max(0, end - T)
                found.append((a + start, end - start, done - start))
                done = end
        else:
            assert settings.last is not None and settings.every is not None
            found += [(a + e - T, T, T - settings.last) for e in range(longest, n + 1, settings.every)]
    table = np.asarray(found, np.int64).reshape(-1, 3)
    return Windows(table[:, 0], table[:, 1], table[:, 2])


def statement(protocol: str, settings: Settings, longest: int) -> str:
    """The protocol in one paragraph, for the result file."""
    stream = settings.documents == "stream"
    where = (
        "The documents are joined, each with its end-of-text token where the data has one; windows cross document "
        "borders."
        if stream
        else f"No window crosses a document border; documents under {settings.min_document} tokens are left out."
    )
    how = {
        "blocks": "Consecutive windows of T tokens without overlap; every token they predict counts, with 1 to T "
        "tokens before it. "
        + (
            f"Only as much text is used as fills whole windows of {longest} tokens; where T does not divide that, the "
            "last window is shorter."
            if stream
            else "The last window of a document, and the only one of a document shorter than T, is shorter."
        ),
        "sliding": f"Windows of T tokens that move by {settings.stride}; only tokens not counted before count, so all "
        f"but the first T of a {'text' if stream else 'document'} have at least T - {settings.stride} tokens before "
        "them.",
        "last": f"Windows of every length end at the same tokens, one every {settings.every} tokens; only the last "
        f"{settings.last} tokens of each count."
        + ("" if stream else f" Documents shorter than {longest + 1} tokens give no window."),
    }[protocol]
    bos = f" The first token of every window is replaced by id {settings.bos}." if settings.bos is not None else ""
    return f"{how} {where} The same tokens count at every length. Means are weighted by tokens.{bos}"
