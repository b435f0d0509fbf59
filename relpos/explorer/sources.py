"""From what a user names to what the page shows: a library of sources, each opened when it is first asked for.

A source is a capture that is read, made from an encoding, or taken from a model. A model stays loaded, so that a text
typed on the page is read by it at once. Result files of `relpos evaluate` become curves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relpos import capture as captures
from relpos.capture import Capture
from relpos.capture.model import TEXT, load_model, run_facts
from relpos.data import tokenizer as tokenizers
from relpos.errors import UserError, several
from relpos.evaluation import compare, result
from relpos.figures.sources import check_source, resolve, shipped
from relpos.files import final

LENGTH = 512
MAX_TEXT = 32768  # characters of a typed text
MAX_TOKENS = 2048
KEPT_TEXTS = 8  # typed texts whose captures stay in memory


class Source:
    """One thing to look at. `held()` gives its capture."""

    def __init__(self, key: str, what: Any, length: int | None = None):
        self.key, self.what, self.length = key, what, length
        self.name = what.name if isinstance(what, Capture) else _name(what)
        self.lock = threading.Lock()
        self._held: Capture | None = what if isinstance(what, Capture) else None
        self._model: nn.Module | None = what if isinstance(what, nn.Module) else None
        self._tokenizer: Any = None
        self._facts: dict[str, Any] | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the model, for a source that is one."""
        if isinstance(self.what, (str, Path)) and Path(self.what).is_dir():
            path = final(Path(self.what))
            return path if (path / "config.json").is_file() else None
        return None

    def held(self) -> Capture:
        with self.lock:
            if self._held is None:
                self._held = self._open()
            return self._held

    def _open(self) -> Capture:
        if self.folder is None:
            made = resolve(self.what, length=self.length, layers="all")
            made.name = self.name
            return made
        if self._read_by_model():
            words = TEXT.read_text(encoding="utf-8")
            return self._capture(words, self.length or LENGTH, "relpos' stored text")
        assert self._model is not None
        try:
            made = captures.from_model(self._model, length=self.length or LENGTH, layers="all", name=self.name)
        except UserError as error:
            if "tokens=" not in str(error):
                raise
            raise UserError(
                f"{self.name} comes without a tokenizer, and what its heads do depends on the text: put its "
                "tokenizer.json into the folder"
            ) from None
        return self._tell(made, made.provenance.get("text"))

    def _read_by_model(self) -> bool:
        """Load the model, and say whether it comes with a tokenizer."""
        assert self.folder is not None
        if self._model is None:
            self._model = load_model(self.folder).eval()
        if self._tokenizer is None:
            try:
                found = tokenizers.load(self.folder)
            except UserError:
                return False
            # transformers makes up an empty tokenizer for a GPT-2 folder without one.
            if not len(found.encode_batch(["a text"])[0]):
                return False
            self._tokenizer = found
        return True

    def _capture(self, words: str, limit: int, told: str) -> Capture:
        ids = self._tokenizer.encode_batch([words])[0].astype("int64")[:limit]
        if not len(ids):
            raise UserError("the text is empty: type a few words")
        made = captures.from_model(
            self._model,  # type: ignore[arg-type]
            tokens=torch.from_numpy(ids),
            length=len(ids),
            layers="all",
            name=self.name,
        )
        made.pieces = [self._tokenizer.decode([i]) for i in ids.tolist()]
        return self._tell(made, told)

    def _tell(self, made: Capture, told: Any) -> Capture:
        assert self.folder is not None
        made.provenance = {
            **made.provenance,
            "model": f"{self.name}, {made.provenance.get('model', '').partition(', ')[2]}",
            **run_facts(self.folder),
            **({"text": told} if told else {}),
        }
        return made

    def read(self, text: str) -> Capture:
        """The capture of a text that the user typed."""
        if len(text) > MAX_TEXT:
            raise UserError(f"the text has {len(text):,} characters; at most {MAX_TEXT:,} are read")
        if not text.strip():
            raise UserError("the text is empty: type a few words")
        if self.folder is None:
            raise UserError(f"{self.name} is no model folder, so it cannot read a text: start the explorer with one")
        with self.lock:
            if not self._read_by_model():
                raise UserError(f"the model {self.name} comes without a tokenizer, so it cannot read a text")
            count = len(self._tokenizer.encode_batch([text])[0])
            if count > MAX_TOKENS:
                raise UserError(f"the text has {count:,} tokens with this model's tokenizer; at most {MAX_TOKENS:,}")
            return self._capture(text, MAX_TOKENS, "typed on the page")

    def facts(self) -> dict[str, Any]:
        """What the page must know before it asks for a map."""
        held = self.held()
        with self.lock:
            if self._facts is None:
                self._facts = {**facts(held), "key": self.key, "reads": self.folder is not None and self._tokens()}
            return self._facts

    def _tokens(self) -> bool:
        return self._tokenizer is not None


def facts(held: Capture) -> dict[str, Any]:
    return {
        "name": held.name,
        "title": held.title,
        "heads": held.heads,
        "length": held.length,
        "num_layers": held.num_layers,
        "layers": {str(number): kinds for number in range(held.num_layers) if (kinds := _kinds(held, number))},
        "held": sorted(held.layers),
        "pieces": held.pieces,
        "default_kind": held.default_kind(),
        "provenance": {key: str(value) for key, value in held.provenance.items() if value not in (None, "", {}, [])},
    }


def _kinds(held: Capture, layer: int) -> list[str]:
    found = []
    for kind in captures.KINDS:
        try:
            held.check(kind, layer, held.length)
        except UserError:
            continue
        found.append(kind)
    return found


def _name(what: Any) -> str:
    if isinstance(what, nn.Module):
        return getattr(getattr(what, "config", None), "model_type", type(what).__name__)
    path = Path(what)
    if path.is_dir():
        return path.resolve().name
    return path.name.removesuffix(".safetensors") if path.is_file() else str(what)


class Library:
    """All sources of one page, its typed texts and its evaluation results."""

    def __init__(self, given: Iterable[Any] = (), *, length: int | None = None):
        if length is not None and not 1 <= length <= captures.MAX_LENGTH:
            raise UserError(f"length must be between 1 and {captures.MAX_LENGTH}, not {length}")
        given = several("sources", given)
        results = [what for what in given if _is_result(what)]
        others = [what for what in given if not _is_result(what)]
        if not others:
            others = list(shipped())
        self.sources: dict[str, Source] = {}
        for what in others:
            check_source(what)
            source = Source(str(len(self.sources)), what, length)
            if source.folder is None and isinstance(what, (str, Path)):
                source.held()  # a mistake in a name is said before the page opens; these are read in a moment
            self.sources[source.key] = source
        self.results = compare.load(results) if results else compare.Comparison()
        if self.results.unread:
            raise UserError(self.results.unread[0])
        self._texts: OrderedDict[str, Source] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Source:
        found = self.sources.get(key) or self._texts.get(key)
        if found is None:
            raise UserError(f"there is no source {key!r} on this page: reload it")
        return found

    def read(self, key: str, text: str) -> Source:
        """A typed text as a source of its own; the oldest of them is forgotten."""
        made = self.get(key).read(text)
        with self._lock:
            self._count += 1
            source = Source(f"t{self._count}", made)
            source.name = f"{made.name}: {text.strip()[:24]}"
            self._texts[source.key] = source
            while len(self._texts) > KEPT_TEXTS:
                self._texts.popitem(last=False)
        return source

    def curves(self) -> list[dict[str, Any]]:
        """Perplexity by length, from the result files: (label, protocol) -> points."""
        made = []
        for label, value in self.results.perplexity:
            protocols = {
                name: {
                    "statement": entry.get("statement", ""),
                    "points": [
                        {"length": row["length"], "perplexity": row["perplexity"], "ci95": row.get("ci95")}
                        for row in entry.get("results", [])
                        if row["status"] == "ok" and row["perplexity"] is not None
                    ],
                }
                for name, entry in value["protocols"].items()
            }
            made.append({"label": label, "train_length": value["model"].get("train_length"), "protocols": protocols})
        return made

    def index(self) -> dict[str, Any]:
        return {
            "sources": [{"key": source.key, "name": source.name} for source in self.sources.values()],
            "curves": self.curves(),
            "warnings": self.results.warnings,
        }


def _is_result(what: Any) -> bool:
    """A result file, or a folder with nothing but them."""
    if not isinstance(what, (str, Path)):
        return False
    path = Path(what)
    if path.is_dir():
        return not (path / "config.json").is_file() and any(_holds_result(file) for file in path.glob("*.json"))
    return path.suffix == ".json"


def _holds_result(path: Path) -> bool:
    try:
        result.read_json(path)
    except UserError:
        return False
    return True
