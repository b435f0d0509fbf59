"""Data: every source and tokenizer, the shards, a real kill, the loader's order, and each mistake's message."""

from __future__ import annotations

import base64
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from children import finish, start

from relpos.data import MaskedRows, TokenData, Windows, collate, masked, prepare, sources, tokenizer
from relpos.data.loader import permute
from relpos.data.prepare import describe
from relpos.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

TEXTS = [
    "The first document, with a number 12345 and\n\n  two paragraphs.",
    "Zweites Dokument: Straße, naïve café, 東京 \U0001f600!",
    "def f(x):\n\treturn x ** 2  # it's <|endoftext|> as text\r\n",
    "   ",  # empty: dropped everywhere
    "The first document, with a number 12345 and\n\n  two paragraphs.",  # a duplicate
    "last",
]
KEPT = [t for t in TEXTS if t.strip()]


@cache
def corpus(n: int = 400) -> list[str]:
    """Documents of very different lengths from the standard library's source."""
    parts: list[str] = []
    for unit in sources._stdlib():
        text = Path(unit.path).read_text(encoding="utf-8", errors="replace")
        step = 200 + 37 * len(parts) % 5000
        parts += [text[i : i + step] for i in range(0, len(text), step)]
        if len(parts) >= n:
            break
    return [p for p in parts[:n] if p.strip()]


def documents(data: TokenData, split: str = "train") -> list[list[int]]:
    stream = getattr(data, split)
    ends = [*stream.starts[1:], len(stream)]
    return [stream.read(int(a), int(b - a)).tolist() for a, b in zip(stream.starts, ends)]


def decoded(data: TokenData, split: str = "train") -> list[str]:
    tok = tokenizer.load(data.tokenizer_folder)
    found = documents(data, split)
    assert all(d[-1] == data.eot and data.eot not in d[:-1] for d in found)
    return [tok.decode(d[:-1]) for d in found]


# Tokenizers.


def rank_file(tmp_path: Path) -> Path:
    """A small rank file in tiktoken's format, from a BPE trained here."""
    trained = tokenizer.load("bpe:600", corpus(60))
    path = tmp_path / "small.tiktoken"
    ranks = tokenizer._ranks(json.loads(trained.backend.to_str()))
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in sorted(ranks.items(), key=lambda x: x[1])))
    return path


def test_every_tokenizer_round_trips_and_loads_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    ranks = rank_file(tmp_path)
    folder = tmp_path / "folder"
    tokenizer.load("bpe:400", corpus(40)).save(folder)
    for spec in ("bytes", "bpe:500", str(ranks), str(folder)):
        tok = tokenizer.load(spec, corpus(40))
        assert tok.backend.id_to_token(tok.eot) == "<|endoftext|>"
        ids = tok.encode_batch(KEPT)
        assert [tok.decode(i) for i in ids] == KEPT
        assert all(tok.eot not in i for i in ids), "text must not turn into a special token"
        for text, fast in zip(KEPT, ids):  # the fast path gives the ids of the file that is saved
            assert fast.tolist() == tok.backend.encode(text, add_special_tokens=False).ids
        saved = tmp_path / f"saved-{tok.name.replace(':', '-')}"
        tok.save(saved)
        auto = AutoTokenizer.from_pretrained(saved)
        assert auto.eos_token_id == tok.eot and len(auto) == tok.vocab_size
        plain = KEPT[0] + KEPT[1]
        assert auto(plain, add_special_tokens=False).input_ids == tok.encode_batch([plain])[0].tolist()
        assert tokenizer.load(saved).hash == tok.hash
    assert tokenizer.load("bytes").encode_batch(["hé"])[0].tolist() == [0x68, 0xC3, 0xA9]


def test_rank_file_equals_tiktoken(tmp_path):
    """Against tiktoken itself, on random text of every script and on runs that its merges meet in odd places."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    rng = np.random.default_rng(0)
    letters = [*range(32, 127), 10, 9, *range(0x3B1, 0x3C9), *range(0x4E00, 0x4E40), 0x1F600, 0xA0, 0x301]
    texts = ["".join(chr(rng.choice(letters)) for _ in range(300)) for _ in range(40)]
    texts += ["a" * 500, " " * 40 + "x", "\n\n \n", "it's IT'S we'll", *corpus(40)]
    shared = ROOT.parent / "shared" / "data" / "tokenizer" / "gpt2.tiktoken"
    for path in [rank_file(tmp_path), *([shared] if shared.is_file() else [])]:
        tok = tokenizer.load(path)
        pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # tiktoken's own
        special = {"<|endoftext|>": tok.eot}
        ranks = load_tiktoken_bpe(str(path))
        known = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        for text in texts:
            assert tok.backend.encode(text, add_special_tokens=False).ids == known.encode_ordinary(text)
        if path == shared:
            assert tok.encode_batch(["Hello world"])[0].tolist() == [15496, 995] and tok.eot == 50256


def test_without_tiktoken_the_ids_are_the_same(monkeypatch):
    tok = tokenizer.load("bpe:500", corpus(40))
    fast = tok.encode_batch(KEPT)
    assert tok.library == "tiktoken"
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    slow = tokenizer.load("bpe:500", corpus(40))
    assert slow.library == "tokenizers"
    assert all(np.array_equal(a, b) for a, b in zip(fast, slow.encode_batch(KEPT)))


# Sources.


def write_sources(folder: Path) -> dict[str, tuple[Path, dict]]:
    import pyarrow
    import pyarrow.parquet

    made: dict[str, tuple[Path, dict]] = {}
    text = folder / "nul.txt"
    text.write_text("\0".join(TEXTS), encoding="utf-8", newline="")
    made["text"] = (text, {})
    text = folder / "separated.txt"
    text.write_text("\n====\n".join(TEXTS), encoding="utf-8", newline="")
    made["separator"] = (text, {"separator": "\n====\n"})
    many = folder / "many"
    (many / "deep").mkdir(parents=True)
    for i, one in enumerate(TEXTS):
        (many / ("deep" if i > 2 else ".") / f"{i}.txt").write_bytes(one.encode())
    (many / "picture.png").write_bytes(b"\x89PNG\xff\xfe\x00")
    (many / "weights.bin").write_bytes(b"\xff\xfe\x00")  # no token stream without --eot
    (many / ".hidden").write_text("not read")
    made["folder"] = (many, {})
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"id": i, "body": t}) + "\n" for i, t in enumerate(TEXTS)))
    made["jsonl"] = (lines, {"field": "body"})
    rows = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS + [None], "n": range(7)}), rows, row_group_size=2)
    made["parquet"] = (rows, {})
    ids = tokenizer.load("bytes").encode_batch(KEPT)
    stream = np.concatenate([np.append(i, 256) for i in ids]).astype("<u2").tobytes()
    (folder / "stream.bin").write_bytes(stream)
    made["bin"] = (folder / "stream.bin", {"eot": 256})
    with lzma.open(folder / "stream.bin.xz", "wb") as file:
        file.write(stream)
    made["bin.xz"] = (folder / "stream.bin.xz", {"eot": 256})
    return made


def test_every_source_gives_the_same_documents(tmp_path):
    for name, (path, options) in write_sources(tmp_path).items():
        data = prepare(str(path), tmp_path / f"out-{name}", "bytes", validation=0.0, **options)
        got = decoded(data)
        assert (sorted(got) if name == "folder" else got) == (sorted(KEPT) if name == "folder" else KEPT), name
        assert data.index["tokenizer"]["hash"] == tokenizer.load("bytes").hash
        if name == "folder":
            assert data.index["skipped"] == ["picture.png", "weights.bin"]


def test_hugging_face_dataset(tmp_path, monkeypatch):
    """The library itself, streaming a dataset that lies on this disk."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    rows = "".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(TEXTS))
    (tmp_path / "owner" / "name" / "train.jsonl").write_text(rows)
    assert decoded(prepare("hf:owner/name", tmp_path / "out", "bytes", validation=0.0)) == KEPT
    source = sources.find("hf:owner/name", sources.Options())
    assert [piece for piece, _ in source.pieces(source.units[0], 4)] == TEXTS[4:]
    with pytest.raises(UserError, match="split 'test'"):
        prepare("hf:owner/name", tmp_path / "never", "bytes", split="test")


def test_token_stream_without_a_tokenizer_and_without_a_last_end(tmp_path):
    (tmp_path / "s.bin").write_bytes(np.asarray([5, 6, 9, 9, 7, 8], dtype="<u2").tobytes())
    data = prepare(str(tmp_path / "s.bin"), tmp_path / "out", eot=9, validation=0.0)
    assert documents(data) == [[5, 6, 9], [7, 8, 9]]  # an empty document is dropped, an open one closed
    assert data.vocab_size == 10 and data.tokenizer_folder is None


def test_standard_library_and_a_limit(tmp_path):
    data = prepare("stdlib", tmp_path / "d", "bpe:512", max_tokens=50_000)
    assert 50_000 <= len(data.train) + len(data.validation) < 300_000
    assert any("import" in text for text in decoded(data)[:5])
    assert 3 < data.unigram_entropy < np.log(512)


def test_long_documents_in_pieces_give_the_same_tokens(tmp_path, monkeypatch):
    texts = ["word and more words " * 2000 + "end.", "short", "another long one, " * 900]
    (tmp_path / "t.txt").write_text("\0".join(texts))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    whole = prepare(str(tmp_path / "t.txt"), tmp_path / "whole", "bpe:300", validation=0.0)
    monkeypatch.setattr(sources, "LONGEST", 5000)
    monkeypatch.setattr(sources, "_BLOCK", 3001)
    for name in ("t.txt", "t.jsonl"):
        out = tmp_path / name.replace(".", "-")
        cut = prepare(str(tmp_path / name), out, str(whole.tokenizer_folder), validation=0.0)
        assert documents(cut) == documents(whole)


def _measure_memory(folder: Path) -> None:
    import resource

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    prepare(str(folder / "small.txt"), folder / "small", "bytes", validation=0.0, workers=1)
    before = peak()
    data = prepare(str(folder / "big.txt"), folder / "big", "bytes", validation=0.0, workers=1)
    (folder / "measured.json").write_text(json.dumps([peak() - before, len(data.train), data.train.documents]))


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """One document of 64 MB: the peak over the start stays far below its size."""
    with open(tmp_path / "big.txt", "w") as file:
        for _ in range(64):
            file.write("some words that go on and on " * 36157)
    (tmp_path / "small.txt").write_text("a few words " * 100_000)
    finish(start(_measure_memory, tmp_path, log=tmp_path / "log"), tmp_path / "log")
    grown, tokens, count = json.loads((tmp_path / "measured.json").read_text())
    assert tokens > 64e6 and count == 1
    assert grown < 48, f"{grown:.0f} MB for a document of {tokens / 1e6:.0f} MB"


# Shards, splits, restart.


def test_split_is_by_document_and_does_not_depend_on_workers(tmp_path):
    texts = corpus()
    (tmp_path / "t.txt").write_text("\0".join(texts + texts[:50]))
    made = [
        prepare(str(tmp_path / "t.txt"), tmp_path / f"w{w}", "bytes", validation=0.2, shard_tokens=90_000, workers=w)
        for w in (1, 4)
    ]
    assert made[0].fingerprint == made[1].fingerprint and len(made[0].train.shards) > 3
    train, held = decoded(made[0]), decoded(made[0], "validation")
    assert 0.1 < len(held) / (len(train) + len(held)) < 0.3
    assert not set(train) & set(held), "a duplicate went to the other split"
    assert sorted(train + held) == sorted(texts + texts[:50])
    made[0].verify()
    # Reading across the borders of shards.
    joined = np.concatenate([np.fromfile(made[0].folder / s.file, "<u2") for s in made[0].train.shards])
    assert np.array_equal(made[0].train.read(0, len(made[0].train)), joined)
    assert np.array_equal(made[0].train.read(89_990, 100_000), joined[89_990:189_990])


def _prepare_slowly(source: str, tok: str, out: str) -> None:
    sys.modules["relpos.data.prepare"]._CHUNK = 20_000  # small steps, so that a kill falls anywhere
    prepare(source, out, tok, validation=0.1, shard_tokens=40_000, workers=1)


def test_killed_preparation_goes_on(tmp_path):
    """A real SIGKILL in the middle, more than once; the result is that of an undisturbed run, file by file."""
    texts = corpus(3000)
    (tmp_path / "t.txt").write_text("\0".join(texts))
    trained = tmp_path / "tok"
    tokenizer.load("bpe:600", texts[:100]).save(trained)
    arguments = [str(tmp_path / "t.txt"), str(trained)]
    out = tmp_path / "out"

    log = tmp_path / "log"
    finish(start(_prepare_slowly, *arguments, str(tmp_path / "whole"), log=log), log)
    kills = 0
    for lines in (3, 9, 20):  # kill when the journal has so many lines
        process = start(_prepare_slowly, *arguments, str(out), log=log)
        journal = out / "journal.jsonl"
        while process.is_alive():
            if journal.is_file() and journal.read_bytes().count(b"\n") >= lines:
                process.kill()
                break
            time.sleep(0.001)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if not (out / "index.json").exists():
            with pytest.raises(UserError, match="was not finished"):
                TokenData(out)
            with open(journal, "a") as file:  # as if the kill had come while a line was being written
                file.write('{"segment": 9')
    assert kills >= 2
    finish(start(_prepare_slowly, *arguments, str(out), log=log), log)
    whole, resumed = TokenData(tmp_path / "whole"), TokenData(out)
    assert resumed.index == whole.index and sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "whole"))
    resumed.verify()
    assert sorted(decoded(resumed) + decoded(resumed, "validation")) == sorted(texts)


def test_a_kill_before_the_index(tmp_path, monkeypatch):
    """All that was asked for is there then, and no document more comes in."""
    (tmp_path / "t.txt").write_text("\0".join(corpus(300)))
    options = dict(max_tokens=5000, shard_tokens=1000, validation=0.1, workers=1)
    whole = prepare(str(tmp_path / "t.txt"), tmp_path / "whole", "bytes", **options)
    module = sys.modules["relpos.data.prepare"]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_finish", stop)
        prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bytes", **options)
    assert prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bytes", **options).index == whole.index


def test_a_tokenizer_beside_another(tmp_path):
    tokenizer.load("bpe:300", corpus(50)).save(tmp_path / "tok")
    tokenizer.load("bpe:400", corpus(50)).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "tok" / "other.json")
    (tmp_path / "t.txt").write_text("\0".join(corpus(20)))
    data = prepare(str(tmp_path / "t.txt"), tmp_path / "d", str(tmp_path / "tok" / "other.json"), validation=0.0)
    data.verify()
    assert data.vocab_size == 400 and decoded(data) == corpus(20)


def test_a_tokenizer_that_is_gone(tmp_path):
    (tmp_path / "t.txt").write_text("\0".join(corpus(20)))
    data = prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bytes", validation=0.0)
    shutil.rmtree(tmp_path / "d" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer is missing"):
        data.verify()


def test_preparing_again_and_over(tmp_path):
    (tmp_path / "t.txt").write_text("hello\0world")
    first = prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bytes", validation=0.0)
    stamp = (tmp_path / "d" / "index.json").stat().st_mtime_ns
    assert prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bytes", validation=0.0).fingerprint == first.fingerprint
    assert (tmp_path / "d" / "index.json").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="already holds other"):
        prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bpe:300", validation=0.0)
    again = prepare(str(tmp_path / "t.txt"), tmp_path / "d", "bpe:300", validation=0.0, overwrite=True)
    assert decoded(again) == ["hello", "world"]


# Mistakes.


def test_mistakes_in_sources(tmp_path, monkeypatch):
    def fails(match: str, source: Path | str, tok: str | None = "bytes", **options) -> None:
        out = tmp_path / "never"
        with pytest.raises(UserError, match=match):
            prepare(str(source), out, tok, **options)
        assert not out.exists(), "something half-written was left"

    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    fails("no file or folder", "nowhere.txt")
    fails("is not UTF-8 text around byte 1,500,003", file("late.txt", b"text " * 300_000 + b"caf\xe9 \xff\xfe"))
    for number, (name, content) in enumerate(
        (name, content) for name in ("vocab.json", "tokenizer_config.json") for content in ("{bad", '["a"]')
    ):
        folder = tmp_path / f"tokenizer-{number}"
        tokenizer.load("bytes").save(folder)
        if name == "vocab.json":
            (folder / "tokenizer.json").unlink()
            (folder / "merges.txt").write_text("")
        (folder / name).write_text(content)
        fails(f"{name}' (is not valid JSON|holds no settings)", file("a.txt", b"text"), str(folder))
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails(r"pip install 'relpos\[data\]'", "HuggingFaceFW/fineweb-edu")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails("needs pyarrow", file("x.parquet", b"PAR1"))
    monkeypatch.delitem(sys.modules, "pyarrow")
    fails("not a whole Parquet", file("x.parquet", b"PAR1xxxx"))
    fails("cannot be in .*ids 0 to 65535", file("tokens.bin", b"\1\0\2\0"), None, eot=1 << 16)
    fails("--eot is a token id, from 0 on, not -1", file("tokens.bin", b"\1\0\2\0"), None, eot=-1)
    fails("to ten million", file("a.txt", b"text"), "bpe:99999999999")
    fails("holds int and no text in the field 'text'.* 'test'", file("a.jsonl", b'{"text": 3, "test": "a"}'))
    fails("is empty", file("empty.txt", b""))
    fails("is empty", file("blank.txt", b"  \n\0 "))
    fails("not UTF-8", file("latin.txt", b"caf\xe9 au lait"))
    (tmp_path / "nothing").mkdir()
    fails("holds no text", tmp_path / "nothing")
    fails("line 2 is not JSON", file("bad.jsonl", b'{"text": "a"}\n{"text": \n'))
    fails("Did you mean 'texts'", file("field.jsonl", b'{"texts": "a"}\n'))
    fails("say which token ends", file("s.bin", b"\1\0"))
    fails("length is odd", file("odd.bin", b"\1\0\2"), eot=256)
    fails("holds the token 300", file("high.bin", np.asarray([1, 300, 256], "<u2").tobytes()), eot=256)
    whole = lzma.compress(np.arange(200, dtype="<u2").tobytes())
    fails("truncated or damaged", file("cut.bin.xz", whole[:-20]), eot=199)
    good = file("good.txt", b"some text")
    fails("no tokenizer 'byte'", good, "byte")
    fails("a size from 257", good, "bpe:12")
    fails("line 1 is not 'base64 rank'", good, str(file("ranks.tiktoken", b"not ranks at all\n")))
    fails("say which tokenizer", good, None)
    fails("--validation is a share", good, validation=1.5)
    fails("is not a token of", good, eot=999)
    fails("lower --validation", good, validation=0.9999999)
    (tmp_path / "mixed").mkdir()
    file("mixed/a.txt", b"text")
    file("mixed/b.bin", b"\1\0")
    fails("mixes token streams", tmp_path / "mixed", eot=1)
    (tmp_path / "full").mkdir()
    file("full/thesis.tex", b"mine")
    with pytest.raises(UserError, match="is not empty"):
        prepare(str(good), tmp_path / "full", "bytes")
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]


def test_mistakes_in_shards(tmp_path):
    (tmp_path / "t.txt").write_text("\0".join(corpus(30)))
    good = tmp_path / "good"
    prepare(str(tmp_path / "t.txt"), good, "bytes", validation=0.3)

    def broken(change) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        change(tmp_path / "bad")
        return tmp_path / "bad"

    with pytest.raises(UserError, match="no folder"):
        TokenData(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not written by"):
        TokenData(tmp_path)
    with pytest.raises(UserError, match="is missing"):
        TokenData(broken(lambda d: (d / "train-00000.bin").unlink()))
    with pytest.raises(UserError, match="is truncated"):
        TokenData(broken(lambda d: os.truncate(d / "validation-00000.bin", 100)))
    with pytest.raises(UserError, match="is damaged"):
        TokenData(broken(lambda d: (d / "index.json").write_text("{")))
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        TokenData(broken(lambda d: (d / "tokenizer" / "tokenizer.json").write_text("{"))).verify()
    other = tokenizer.load("bpe:300", ["some text to learn from " * 50])
    with pytest.raises(UserError, match="is not the one that made the data"):
        TokenData(broken(lambda d: other.save(d / "tokenizer"))).verify()
    with pytest.raises(UserError, match="not an index"):
        TokenData(broken(lambda d: (d / "index.json").write_text('{"weight_map": {}}')))
    with pytest.raises(UserError, match="version 99"):
        TokenData(broken(lambda d: (d / "index.json").write_text('{"format": "relpos-tokens", "version": 99}')))

    def flip(folder: Path) -> None:
        raw = bytearray((folder / "train-00000.bin").read_bytes())
        raw[500] ^= 1
        (folder / "train-00000.bin").write_bytes(raw)

    foreign = TokenData(broken(flip))
    with pytest.raises(UserError, match="does not match its checksum"):
        foreign.verify()
    result = subprocess.run(
        [sys.executable, str(ROOT / "relpos_cli.py"), "data", "check", str(tmp_path / "bad")],
        env=ENV, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 2 and "checksum" in result.stderr and "Traceback" not in result.stderr


# The loader.


def test_permutation_is_one():
    for n in (1, 2, 3, 7, 64, 1000, 4097):
        for key in (0, 1, 1 << 40):
            assert sorted(permute(np.arange(n), n, key)) == list(range(n))
    a, b = permute(np.arange(1000), 1000, 1), permute(np.arange(1000), 1000, 2)
    assert (a != b).mean() > 0.9 and abs(np.corrcoef(a, np.arange(1000))[0, 1]) < 0.1


@pytest.fixture
def small(tmp_path: Path) -> TokenData:
    (tmp_path / "t.txt").write_text("\0".join(corpus(120)))
    return prepare(str(tmp_path / "t.txt"), tmp_path / "small", "bytes", validation=0.0, shard_tokens=20_000)


def test_order_is_a_function_of_seed_and_step(small):
    windows = Windows(small.train, 64, seed=7, count=9000)
    n = windows.windows
    assert 2 * n < 9000  # more than one epoch
    order = windows.order(np.arange(9000))
    assert sorted(order[:n]) == list(range(n)) and sorted(order[n : 2 * n]) == list(range(n))
    assert not np.array_equal(order[:n], order[n : 2 * n])
    assert np.array_equal(windows.order(np.arange(1234, 1300)), order[1234:1300])
    assert not np.array_equal(Windows(small.train, 64, seed=8).order(np.arange(n)), order[:n])
    row = windows[1500]["input_ids"]
    assert row.tolist() == small.train.read(int(order[1500]) * 64, 64).tolist()
    held = Windows(small.train, 64, shuffle=False)
    assert held[3]["input_ids"].tolist() == small.train.read(192, 64).tolist()
    with pytest.raises(UserError, match="fewer than one window"):
        Windows(small.train, 10**9)


def test_ranks_share_a_batch_without_overlap(small):
    """As accelerate deals batches out: together, two processes read what one would, and never the same example."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    windows = Windows(small.train, 64, seed=1, count=96)

    def read(world: int, rank: int, size: int) -> list[list[int]]:
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(windows), size, True), world, rank)
        return [windows.order(np.asarray(batch)).tolist() for batch in shard]

    one = read(1, 0, 8)
    two = [a + b for a, b in zip(read(2, 0, 4), read(2, 1, 4))]
    assert two == one and len({i for batch in one for i in batch}) == 96


def test_packed_batches_have_document_borders_and_one_shape(small):
    windows = Windows(small.train, 128, seed=3, documents=True, count=200)
    borders = windows.borders()
    starts = set(small.train.starts.tolist())
    shapes = set()
    for first in range(0, 200, 4):
        batch = collate(windows.__getitems__(list(range(first, first + 4))), borders)
        cu = batch["cu_seqlens"]
        shapes.add((tuple(batch["input_ids"].shape), tuple(cu.shape)))
        assert cu[0] == 0 and cu[-1] == 512 and (cu[1:] >= cu[:-1]).all() and cu.dtype == torch.int32
        order = windows.order(np.arange(first, first + 4))
        expected = {
            row * 128 + i for row, w in enumerate(order) for i in range(128) if i == 0 or int(w) * 128 + i in starts
        }
        assert set(cu.tolist()) - {512} == expected
        assert set((batch["labels"][0] == -100).nonzero().flatten().tolist()) == expected
    assert shapes == {((1, 512), (4 * (borders + 1) + 1,))}
    plain = collate(windows.__getitems__([0, 1]))
    assert plain["input_ids"].shape == (2, 128) and torch.equal(plain["labels"], plain["input_ids"])


def test_masking_is_bert_s():
    ids = torch.randint(256, (64, 512), generator=torch.Generator().manual_seed(0))
    inputs, labels = masked(ids, mask=258, vocab_size=256, generator=torch.Generator().manual_seed(1))
    chosen = labels != -100
    assert abs(chosen.float().mean() - 0.15) < 0.01
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert abs((inputs[chosen] == 258).float().mean() - 0.8) < 0.03
    assert abs((inputs[chosen] == ids[chosen]).float().mean() - 0.1) < 0.02


def test_masks_are_a_function_of_seed_and_example(small):
    windows = Windows(small.train, 64, seed=3)
    rows = windows.__getitems__([5, 6, 7, 8])
    make = MaskedRows(mask=258, vocab_size=257, seed=3)
    whole, parts = make(rows), [make(rows[2:]), make(rows[:2])]
    for key in ("input_ids", "labels"):
        assert torch.equal(whole[key], torch.cat([parts[1][key], parts[0][key]]))
    assert not torch.equal(make(rows)["labels"], MaskedRows(mask=258, vocab_size=257, seed=4)(rows)["labels"])


@pytest.mark.parametrize(
    ("text", "share", "hint"),
    [("one", 0.01, "--separator"), ("one\0two\0three", 0.01, "0.5"), ("b\0b\0b", 0.5, "same text")],
)
def test_an_empty_validation_split_is_said(tmp_path, text, share, hint):
    (tmp_path / "a.txt").write_text(text)
    said = describe(prepare(str(tmp_path / "a.txt"), tmp_path / "data", "bytes", validation=share))
    assert "nothing to validate on" in said and hint in said
    none = describe(prepare(str(tmp_path / "a.txt"), tmp_path / "none", "bytes", validation=0.0))
    assert "nothing to validate on" not in none
