"""One tokenizer, whatever it came from: a `tokenizer.json` that `AutoTokenizer` loads, and a fast way to encode.

    spec                        what it is
    bytes                       256 byte values, <|endoftext|> = 256, padding, mask; nothing to download
    bpe:4096                    a byte-level BPE with 4096 entries, trained on the corpus itself
    a file of ranks             lines of "base64 rank", as tiktoken writes them (GPT-2, cl100k, o200k)
    a folder                    tokenizer.json, or vocab.json + merges.txt, or anything AutoTokenizer reads there

Everything becomes a `tokenizers.Tokenizer`, so a run folder always holds a `tokenizer.json`. Encoding takes the fastest
way that gives the same ids: plain NumPy for bytes, tiktoken (where installed) for byte-level BPE whose token ids are in
the order of the merges, the `tokenizers` library for the rest. Text never turns into special tokens: a document that
contains the characters `<|endoftext|>` is encoded as those characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from relpos.errors import UserError
from relpos.files import settings_in

EOT = "<|endoftext|>"
PAD = "<|padding|>"
MASK = "<|mask|>"

# The pre-tokenization patterns of the published rank files (tiktoken, openai_public.py), by the number of ranks, and
# the id of <|endoftext|> there. A rank file does not carry its pattern; any other one is read with GPT-2's.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
    r"""|\s+(?!\S)|\s"""
)
_CASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASE[0]}*{_CASE[1]}+{_CASE[2]}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASE[0]}+{_CASE[1]}*{_CASE[2]}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_KNOWN_RANKS = {50256: (None, 50256), 100256: (_CL100K, 100257), 199998: (_O200K, 199999)}

# A text with every kind of token border, for the fingerprint of a tokenizer.
_PROBE = "Hello world, it's 12345 o'clock!\n\n\tdef f(x):  return x**2  # Straße, 東京, \U0001f600\r\n  the  end "


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level tokenizer.json (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + extra))
            extra += 1
    return letters


class Tokenizer:
    """`encode_batch` for text, `save` for a folder that `AutoTokenizer` loads, `hash` to tell two of them apart."""

    def __init__(self, backend: Any, eot: int | None, name: str, folder: Path | None = None):
        self.backend, self.eot, self.name, self.folder = backend, eot, name, folder
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def hash(self) -> str:
        """Equal for two tokenizers that give the same ids, however they are stored."""
        vocab = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        probe = self.backend.encode(_PROBE, add_special_tokens=False).ids
        return hashlib.sha256(json.dumps([vocab, probe]).encode()).hexdigest()

    @property
    def library(self) -> str:
        """What does the encoding: "numpy", "tiktoken" or "tokenizers"."""
        return self._fast[0]

    @cached_property
    def _fast(self) -> tuple[str, Any]:
        spec = json.loads(self.backend.to_str())
        ranks = _ranks(spec)
        if ranks is None:
            return "tokenizers", None
        if len(ranks) == 256 and all(ranks[bytes([b])] == b for b in range(256)) and _pattern(spec) == "":
            return "numpy", None
        try:
            import tiktoken
        except ImportError:
            return "tokenizers", None
        pattern = _pattern(spec)
        if not pattern:
            return "tokenizers", None
        return "tiktoken", tiktoken.Encoding("relpos", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, without any special token. Safe to call from several threads, and they run in parallel."""
        library, encoder = self._fast
        if library == "numpy":
            return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]
        if library == "tiktoken":
            return [encoder.encode_to_numpy(text, disallowed_special=()) for text in texts]
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, or copy those of the folder this one came from."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None and (self.folder / "tokenizer.json").is_file():
            for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, folder / name)
        else:
            self.backend.encode_special_tokens = False  # the reader of the file decides; here only we do
            self.backend.save(str(folder / "tokenizer.json"))
            self.backend.encode_special_tokens = True
        if not (folder / "tokenizer_config.json").is_file():
            eot = None if self.eot is None else self.backend.id_to_token(self.eot)
            config: dict[str, Any] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 10**30,
            }
            if eot is not None:
                config |= {"bos_token": eot, "eos_token": eot, "unk_token": eot}
                config["pad_token"] = eot if self.backend.token_to_id(PAD) is None else PAD
            if self.backend.token_to_id(MASK) is not None:
                config["mask_token"] = MASK
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# The fast paths, read off a tokenizer.json.


def _pattern(spec: dict[str, Any]) -> str | None:
    """The split pattern of a byte-level tokenizer.json; "" where it does not split; None for any other kind."""
    if spec.get("normalizer") is not None:
        return None
    pre = spec.get("pre_tokenizer") or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else ""
    if len(steps) == 2 and not steps[1].get("use_regex", True) and steps[0].get("type") == "Split":
        split = steps[0]
        if "Regex" in split["pattern"] and split["behavior"] == "Isolated" and not split["invert"]:
            return str(split["pattern"]["Regex"])
    return None


def _ranks(spec: dict[str, Any]) -> dict[bytes, int] | None:
    """Token bytes -> id where the ids follow the order of the merges, which is what makes them tiktoken's ranks."""
    model = spec["model"]
    if model.get("type") != "BPE" or _pattern(spec) is None or model.get("byte_fallback") or model.get("dropout"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    vocab = model["vocab"]
    merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    results = [vocab.get("".join(pair)) for pair in merges]
    if any(r is None for r in results) or any(b <= a for a, b in zip(results, results[1:], strict=False)):
        return None
    try:
        ranks = {bytes(byte_of[c] for c in token): i for token, i in vocab.items() if token not in special}
    except KeyError:
        return None
    complete = all(bytes([b]) in ranks for b in range(256)) and len(ranks) == 256 + len(merges)
    return ranks if complete else None


# Where tokenizers come from.


def load(spec: str | Path, corpus: Iterable[str] = (), eot: int | None = None) -> Tokenizer:
    """The tokenizer a spec names (see the module). `bpe:N` reads `corpus`; `eot` overrides the end of text."""
    spec = str(spec)
    if spec == "bytes":
        tokenizer = _bytes()
    elif spec.startswith("bpe:"):
        tokenizer = _train(spec, corpus)
    else:
        path = Path(spec).expanduser()
        if path.is_dir():
            tokenizer = _folder(path)
        elif path.is_file():
            tokenizer = _file(path)
        else:
            raise UserError(
                f"there is no tokenizer {spec!r}: give 'bytes', 'bpe:4096', a tiktoken-style rank file, or a folder "
                "with tokenizer.json"
            )
    if eot is not None:
        if not 0 <= eot < tokenizer.vocab_size:
            raise UserError(f"--eot {eot} is not a token of {spec}: its ids are 0 to {tokenizer.vocab_size - 1}")
        tokenizer.eot = eot
    return tokenizer


def size_of_spec(spec: str) -> int:
    """The vocabulary size that `bpe:4096` asks for."""
    text = spec.partition(":")[2]
    if not text.isdecimal() or not 257 <= int(text) <= 10**7:
        raise UserError(
            f"{spec!r}: a BPE needs a size from 257 (256 bytes and <|endoftext|>) to ten million, such as bpe:4096"
        )
    return int(text)


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str | None, eot: int) -> Any:
    """A byte-level BPE. `pattern` None is GPT-2's, "" does not split."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    # tiktoken takes a piece that is a token as it stands; so does ignore_merges.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=bool(merges)))
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.decoder = decoders.ByteLevel()
    for unused in range(len(vocab), eot):
        backend.add_special_tokens([AddedToken(f"<|unused_{unused}|>", special=True, normalized=False)])
    backend.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return backend


def _bytes() -> Tokenizer:
    from tokenizers import AddedToken

    backend = _byte_level({letter: byte for byte, letter in enumerate(byte_letters())}, [], "", 256)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (PAD, MASK)])
    return Tokenizer(backend, 256, "bytes")


def _train(spec: str, corpus: Iterable[str]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    size = size_of_spec(spec)
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(m if isinstance(m, list) else m.split(" ")) for m in model["merges"]]
    vocab = model["vocab"]
    return Tokenizer(_byte_level(vocab, merges, None, len(vocab)), len(vocab), spec)


def read_ranks(path: Path) -> dict[bytes, int]:
    """A tiktoken-style file: one token per line, base64 of its bytes, a space, its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number} is not 'base64 rank': a tokenizer file is a tiktoken-style rank file or a "
                "tokenizer.json"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise UserError(f"{path} is not a whole rank file: ranks must be 0, 1, 2, ... and every byte must be a token")
    return ranks


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair each token was made from: merge its bytes by lower ranks until two parts are left."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            low, at = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)))
            if low >= rank:
                raise UserError(f"the rank file holds {token!r}, which no pair of lower ranks makes")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def _file(path: Path) -> Tokenizer:
    if path.suffix == ".json":
        return _folder(path.parent, path)
    ranks = read_ranks(path)
    pattern, eot = _KNOWN_RANKS.get(len(ranks), (None, len(ranks)))
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(a), spell(b)) for a, b in merges_of_ranks(ranks)]
    return Tokenizer(_byte_level(vocab, merges, pattern, eot), eot, path.stem)


def _folder(folder: Path, file: Path | None = None) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = file or folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exception
            raise UserError(f"{file} is not a tokenizer.json: {error}") from None
        whole = folder if file.name == "tokenizer.json" else None  # else what lies beside it is another's
        return Tokenizer(backend, _end_of_text(folder, backend), folder.name, whole)
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return _vocab_and_merges(folder / vocab, folder / merges)
    return _through_transformers(folder)


def _vocab_and_merges(vocab_file: Path, merges_file: Path) -> Tokenizer:
    vocab = settings_in(vocab_file)
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    merges = [(first, second) for first, _, second in pairs]
    special = {token: i for token, i in vocab.items() if token == EOT}
    for token in special:
        del vocab[token]
    eot = special.get(EOT, len(vocab))
    return Tokenizer(_byte_level(vocab, merges, None, eot), eot, vocab_file.parent.name)


def _through_transformers(folder: Path) -> Tokenizer:
    """Older formats: let transformers read the folder, and take the tokenizer.json it writes."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json, or vocab.json + merges.txt)") from error
    # A folder with a model and no tokenizer files can give an empty tokenizer of the model's kind.
    if len(tokenizer) < 32 or not tokenizer("a text")["input_ids"]:
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json, or vocab.json + merges.txt)")
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        if not os.path.isfile(os.path.join(temporary, "tokenizer.json")):
            raise UserError(f"the tokenizer in {folder} has no fast form (tokenizer.json); convert it first")
        loaded = _folder(Path(temporary))
        loaded.name, loaded.folder = folder.name, None
        return loaded


def _end_of_text(folder: Path, backend: Any) -> int | None:
    """The id that ends a document: eos_token of the configuration, else one of the usual names."""
    names: list[str] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).is_file():
            config = settings_in(folder / file)
            for key in ("eos_token", "sep_token"):
                token = config.get(key)
                names.append(token.get("content", "") if isinstance(token, dict) else token or "")
    for name in [*names, EOT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]"]:
        found = backend.token_to_id(name) if name else None
        if found is not None:
            return int(found)
    return None
