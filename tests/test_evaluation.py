"""Evaluation against numbers worked out a second time: every token scored on its own, one forward pass each."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import relpos_cli
from relpos.attention import blockwise, fused
from relpos.data import prepare
from relpos.data import tokenizer as tokenizers
from relpos.errors import UserError
from relpos.evaluation import Settings, compare, evaluate, evaluate_folders, make_text, open_text, statistics
from relpos.evaluation import passkey as passkeys
from relpos.evaluation import protocols as protocol_room
from relpos.evaluation import result as results
from relpos.evaluation.context import effective_context
from relpos.evaluation.scoring import Scorer, load_model, load_tokenizer, pick_device
from relpos.figures import curves
from relpos.models import RelPosConfig, RelPosForCausalLM

ROOT = Path(__file__).resolve().parent.parent
STORED = Path(__file__).parent / "stored"
VOCABULARY, EOT = 61, 0
LENGTHS = (8, 12, 16, 48)  # 12 does not divide 48 * 5; 8 and 16 do


def gpt2(positions: int = 64, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, n_positions=positions, vocab_size=VOCABULARY, initializer_range=0.4,
        bos_token_id=1, eos_token_id=EOT, resid_pdrop=0.5, **changes,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def ours(encoding: str, vocabulary: int = VOCABULARY) -> RelPosForCausalLM:
    torch.manual_seed(0)
    config = RelPosConfig(
        encoding=encoding, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, vocab_size=vocabulary,
        initializer_range=0.3, train_length=16,
    )  # fmt: skip
    return RelPosForCausalLM(config).eval()


@pytest.fixture(scope="module")
def text():
    """265 tokens in 11 documents of 3 to 60 tokens, each ended by EOT."""
    draw = np.random.default_rng(0)
    sizes = [3, 60, 9, 17, 55, 5, 26, 31, 12, 40, 7]
    tokens = np.concatenate([np.append(draw.integers(1, VOCABULARY, n - 1), EOT) for n in sizes])
    return make_text(tokens, np.cumsum([0, *sizes[:-1]]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text) -> Path:
    """Saved models and texts for the tests of the command."""
    base = tmp_path_factory.mktemp("evaluation")
    gpt2(32).save_pretrained(base / "gpt2")
    ours("kerple").save_pretrained(base / "kerple")
    ours("learned:max_positions=32").save_pretrained(base / "learned")
    bert = BertConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=VOCABULARY
    )
    BertLMHeadModel(bert).save_pretrained(base / "bert")
    text.tokens.astype("<u2").tofile(base / "text.bin")
    (base / "text.bin.xz").write_bytes(lzma.compress((base / "text.bin").read_bytes()))
    return base


# Against numbers by hand.


def by_hand(protocol: str, T: int, text, separate: bool) -> dict[int, tuple[int, int]]:
    """Token -> (first token of its context, row in its window), written from the definitions and not from the code."""
    spans = text.segments() if separate else [(0, len(text.tokens))]
    context = {}
    for a, b in spans:
        n = b - a - 1
        if protocol == "blocks" and not separate:
            n = n // 48 * 48
        for t in range(1, n + 1):  # the t-th token behind the first of the span
            if protocol == "blocks":
                start = (t - 1) // T * T
            elif protocol == "sliding":
                end = min(n, T if t <= T else T + math.ceil((t - T) / 4) * 4)
                start = max(0, end - T)
            else:
                ends = [e for e in range(48, n + 1, 12) if e - 6 < t <= e]
                if not ends:
                    continue
                start = ends[0] - T
            context[a + t] = (a + start, t - start - 1)
    return context


@pytest.mark.parametrize("documents", ["stream", "separate"])
@pytest.mark.parametrize("protocol", ["blocks", "sliding", "last"])
def test_perplexity_by_hand(protocol, documents, text):
    model = gpt2()

    @cache
    def loss(start: int, t: int) -> float:
        ids = torch.tensor(text.tokens[start:t].astype(np.int64))[None]
        with torch.no_grad():
            return -torch.log_softmax(model(ids).logits[0, -1].double(), -1)[int(text.tokens[t])].item()

    settings = Settings(LENGTHS, (protocol,), stride=4, last=6, every=12, documents=documents, batch_tokens=64)
    value = evaluate(model, text, settings)
    entry = value["protocols"][protocol]
    assert entry["same_tokens_at_every_length"]
    assert [row["length"] for row in entry["results"]] == list(LENGTHS)
    for row in entry["results"]:
        context = by_hand(protocol, row["length"], text, documents == "separate")
        losses = {t: loss(start, t) for t, (start, _) in context.items()}
        assert row["tokens"] == entry["scored"]["tokens"] == len(losses)
        assert row["loss"] == pytest.approx(np.mean(list(losses.values())), rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(np.mean(list(losses.values()))), rel=1e-5)
        assert row["mean_context"] == pytest.approx(np.mean([t - start for t, (start, _) in context.items()]))
        assert sum(row["cluster_loss"]) == pytest.approx(sum(losses.values()), rel=1e-5)
        if protocol == "blocks":
            at = np.array([r for _, r in context.values()])
            every = results.unpack(row["positions"]["loss_f32_base64"])
            expected = [
                np.mean([x for x, r in zip(losses.values(), at, strict=True) if r == i]) for i in sorted(set(at))
            ]
            np.testing.assert_allclose(every[sorted(set(at))], expected, rtol=1e-4)
            assert np.isnan(every[max(at) + 1 :]).all()
            bins = row["positions"]["bins"]
            assert bins["from"][0] == 1 and bins["to"][-1] == row["length"] and sum(bins["tokens"]) == row["tokens"]
            assert [a - 1 for a in bins["from"][1:]] == bins["to"][:-1]


def test_the_clusters_are_the_documents(text):
    value = evaluate(gpt2(), text, Settings((8,), ("sliding",)))
    entry = value["protocols"]["sliding"]
    sizes = [b - a for a, b in text.segments()]
    assert entry["clusters"]["tokens"] == [sizes[0] - 1, *sizes[1:]]
    assert entry["clusters"]["what"] == "11 documents"
    row = entry["results"][0]
    s, n = np.array(row["cluster_loss"]), np.array(entry["clusters"]["tokens"])
    m = s.sum() / n.sum()
    se = math.sqrt(11 / 10 * ((s - m * n) ** 2).sum()) / n.sum()
    assert row["loss_stderr"] == pytest.approx(se, rel=1e-4)
    assert row["loss_ci95"] == pytest.approx([m - 2.228139 * se, m + 2.228139 * se], rel=1e-4)
    assert row["ci95"] == pytest.approx(np.exp(row["loss_ci95"]), rel=1e-9)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(text):
    model = gpt2()
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    for entry in evaluate(model, text, Settings((8, 32), ("blocks", "sliding", "last")))["protocols"].values():
        for row in entry["results"]:
            assert row["perplexity"] == pytest.approx(VOCABULARY, rel=1e-5)
            assert row["ci95"] == pytest.approx([VOCABULARY, VOCABULARY], rel=1e-5)


def test_bos_replaces_the_first_token_of_each_window(text):
    model = gpt2()
    value = evaluate(model, text, Settings((48,), ("blocks",), bos=1))
    total = 0.0
    for start in range(0, 240, 48):
        ids = torch.tensor(text.tokens[start : start + 49].astype(np.int64))[None]
        fed = torch.cat([torch.ones(1, 1, dtype=torch.long), ids[:, 1:-1]], 1)
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(model(fed).logits[0], ids[0, 1:], reduction="sum").item()
    assert value["protocols"]["blocks"]["results"][0]["loss"] == pytest.approx(total / 240, rel=1e-5)


def test_student_t():
    for degrees, expected in ((1, 12.7062), (2, 4.30265), (9, 2.262157), (30, 2.042272), (1000, 1.962339)):
        assert statistics.student_t(degrees) == pytest.approx(expected, rel=2e-5)


def test_intervals_cover_the_truth():
    """Clusters of unequal size whose tokens share a shift: 95% of the intervals hold the true mean."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        counts = draw.integers(5, 60, 20)
        sums = counts * (3.0 + draw.normal(0, 0.3, 20)) + draw.normal(0, 1, 20) * np.sqrt(counts)
        mean = statistics.clustered_mean(sums, counts)
        held += mean.low <= 3.0 <= mean.high
    assert 0.91 < held / 300 < 0.98


def test_clusters_of_a_text_without_documents():
    starts, what = statistics.cluster_borders(np.array([0]), 1, 101)
    assert len(starts) == 32 and starts[0] == 1 and "equal stretches" in what
    starts, what = statistics.cluster_borders(np.arange(0, 10_000, 10), 1, 10_000)
    assert len(starts) == 256 and "1000 documents" in what
    assert statistics.clustered_mean(np.array([4.0]), np.array([2])).low is None


# The paths through a model.


# The fused one on a GPU; `make test` runs this test in Triton's interpreter too, whose bfloat16 product is wrong.
GPU = torch.cuda.is_available()
PATHS = [("blockwise", torch.float32)]
PATHS += [("fused", torch.float32)] if GPU or fused.interpreted() else []
PATHS += [("fused", torch.bfloat16)] if GPU else []


@pytest.mark.parametrize(("impl", "dtype"), PATHS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("encoding", ["kerple", "rope", "cable", "fire"])
def test_implementations_agree_with_the_dense_one(encoding, impl, dtype, text, monkeypatch):
    """At every position: off by at most what float32 rounds, or twice what the dense path in the same dtype is off."""
    monkeypatch.setattr(blockwise, "CELLS", 1 << 14)  # many blocks
    torch.manual_seed(0)
    config = RelPosConfig(
        encoding=encoding, num_hidden_layers=2, num_attention_heads=2, hidden_size=64, vocab_size=VOCABULARY,
        initializer_range=0.2,
    )  # fmt: skip
    model = RelPosForCausalLM(config).to("cuda" if GPU and impl == "fused" else "cpu")
    found = {}
    for name, kind in (("exact", torch.float32), ("reference", dtype), (impl, dtype)):
        model.to(kind).set_impl("reference" if name == "exact" else name)
        found[name] = evaluate(model, text, Settings((16, 200), ("blocks", "last")))["protocols"]
    rounding = 2e-4  # nats; the losses themselves are 5 to 15
    for at in (0, 1):
        exact, dense, other = (
            results.unpack(protocols["blocks"]["results"][at]["positions"]["loss_f32_base64"])
            for protocols in found.values()
        )
        assert abs(other - exact).max() < 2 * abs(dense - exact).max() + rounding
        exact, dense, other = (protocols["last"]["results"][at]["loss"] for protocols in found.values())
        assert abs(other - exact) < 2 * abs(dense - exact) + (rounding if dtype == torch.float32 else 0.02)


def test_chunked_logits_are_the_models_own(text, monkeypatch):
    monkeypatch.setattr("relpos.evaluation.scoring.CELLS", 5 * VOCABULARY)  # five rows at a time
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            final_logit_softcapping=2.0,
            initializer_range=0.8,
        )  # fmt: skip
    ).eval()
    for model, how in ((gpt2(), "hidden states in chunks"), (gemma, "soft cap 2.0")):
        scorer = Scorer(model)
        assert how in scorer.how
        ids = text.tokens[:34].astype(np.int64).reshape(2, 17)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids[:, :-1])).logits
        expected = torch.nn.functional.cross_entropy(
            logits[:, 3:].transpose(1, 2), torch.from_numpy(ids[:, 4:]), reduction="none"
        )
        np.testing.assert_allclose(scorer.losses(ids[:, :-1], ids[:, 1:], 3), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scorer.logits(ids[:, :-1], 3), logits[:, 3:], rtol=1e-4, atol=1e-5)
        scorer.how = "whole logits"
        np.testing.assert_allclose(scorer.losses(ids[:, :-1], ids[:, 1:], 3), expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was(text):
    model = gpt2().train()
    evaluate(model, text, Settings((8,), ("blocks",)))
    assert model.training


# Effective context.


def last_entry(*losses: float, noise: float = 0.01) -> dict:
    draw = np.random.default_rng(0)
    tokens = [100] * 12
    rows = []
    for i, loss in enumerate(losses):
        shifts = draw.normal(0, noise, 12)
        rows.append(
            {"length": 2**i, "status": "ok", "loss": loss, "cluster_loss": list(100 * (loss + shifts - shifts.mean()))}
        )
    return {"results": rows, "clusters": {"tokens": tokens}}


@pytest.mark.parametrize(
    ("losses", "length", "hurts"),
    [
        ((4.0, 3.9, 3.8, 3.7), 8, None),  # falls to the end
        ((4.0, 3.9, 3.9001, 3.9), 2, None),  # flat
        ((4.0, 3.9, 3.9, 5.0), 2, 8),  # hurts
        ((4.0, 4.5, 3.0), 1, 2),  # what helps behind the first that hurts does not count
        ((4.0, 3.5, 3.502, 3.53, 3.56), 2, 8),  # each step is small, the fall from the best is not
    ],
)
def test_effective_context(losses, length, hurts):
    found = effective_context(last_entry(*losses))
    assert (found["length"], found["first_that_hurts"]) == (length, hurts)


def test_rounding_is_no_effect():
    """Where a bias has faded out the lengths differ by a rounding, the same in every cluster."""
    found = effective_context(last_entry(4.0, 3.9, 3.9 + 6e-6, 3.9 - 6e-6, noise=1e-7))
    assert (found["length"], found["first_that_hurts"]) == (2, None)
    assert [step["verdict"] for step in found["steps"]] == ["helps", "unclear", "unclear"]
    assert effective_context(last_entry(4.0, 3.9, 3.9 + 6e-4, noise=1e-7))["first_that_hurts"] == 4


def test_effective_context_needs_the_last_protocol():
    assert effective_context(None)["length"] is None
    assert "fewer than two" in effective_context(last_entry(3.0))["reason"]


# Where texts come from.


def test_sources_hold_the_same_tokens(folder, text):
    plain = open_text(folder / "text.bin", eot=EOT)
    packed = open_text(folder / "text.bin.xz", eot=EOT)
    assert plain.about["fingerprint"] == packed.about["fingerprint"] == text.about["fingerprint"]
    assert list(plain.documents) == list(packed.documents) == list(text.documents)
    assert len(open_text(folder / "text.bin").documents) == 1
    assert len(open_text(folder / "text.bin", max_tokens=100).tokens) == 100


def test_prepared_folders_and_plain_text(tmp_path):
    words = " ".join(f"word{i}" for i in range(40))
    source = tmp_path / "source.txt"
    source.write_text("\0".join(f"{i}: {words}" for i in range(12)), encoding="utf-8")
    prepare(str(source), tmp_path / "bytes", "bytes", validation=0.5, workers=1)
    prepare(str(source), tmp_path / "bpe", "bpe:300", validation=0.5, workers=1)
    run = tmp_path / "run"
    ours("alibi", 320).save_pretrained(run)
    tokenizers.load("bytes").save(run)

    both = open_text(tmp_path / "bytes", split="all", model_folder=run)
    parts = [open_text(tmp_path / "bytes", split=split, model_folder=run) for split in ("train", "validation")]
    assert both.about["tokens"] == sum(part.about["tokens"] for part in parts)
    assert both.about["documents"] == 12 == sum(part.about["documents"] for part in parts)
    assert all(both.tokens[b - 1] == 256 for _, b in both.segments())
    assert len(open_text(tmp_path / "bytes", split="all", max_tokens=500).tokens) == 500

    direct = open_text(source, load_tokenizer(run))
    assert bytes(direct.tokens[: direct.documents[1] - 1].astype(np.uint8)).decode() == f"0: {words}"
    value = evaluate(
        load_model(run, device="cpu", dtype=torch.float32),
        direct,
        Settings((64,), ("sliding",)),
        tokenizer=load_tokenizer(run),
    )
    row, scored = value["protocols"]["sliding"]["results"][0], value["protocols"]["sliding"]["scored"]
    assert scored["bytes"] == scored["tokens"] - 12  # all but the ends of text
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * scored["tokens"] / scored["bytes"])

    with pytest.raises(UserError, match="another tokenizer"):
        open_text(tmp_path / "bpe", model_folder=run)
    with pytest.raises(UserError, match="no split 'test'.*validation"):
        open_text(tmp_path / "bytes", split="test")
    with pytest.raises(UserError, match="no tokenizer"):
        open_text(source)


# Bad input. The other models and lengths still finish.


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main([str(a) for a in arguments])
    return stop.value.code


def test_one_bad_model_does_not_stop_the_others(folder, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    code = command(
        "evaluate", folder / "bert", tmp_path / "nothing", folder / "missing", folder / "learned", folder / "kerple",
        "--data", folder / "text.bin", "--eot", EOT, "--lengths", "16,32,64", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 2
    said = capsys.readouterr()
    assert "bert: BertLMHeadModel is not causal" in said.err
    assert "nothing is no model: it has no config.json" in said.err
    assert "missing' with a model in it" in said.err
    assert "Traceback" not in said.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["kerple.json", "learned.json"]
    learned = results.read_json(tmp_path / "out" / "learned.json")
    for entry in learned["protocols"].values():
        assert [r["status"] for r in entry["results"]] == ["ok", "ok", "unsupported"]
        assert "ends at 32" in entry["results"][-1]["reason"]
    kerple = results.read_json(tmp_path / "out" / "kerple.json")
    assert kerple["model"]["encoding"] == "kerple" and kerple["model"]["train_length"] == 16
    assert kerple["protocols"]["blocks"]["scored"] == learned["protocols"]["blocks"]["scored"]


def test_a_dash_is_no_failure_but_a_short_text_is(folder, tmp_path, capsys):
    shared = ("--data", folder / "text.bin", "--protocol", "blocks")
    assert command("evaluate", folder / "gpt2", *shared, "--lengths", "16,64", "--out", tmp_path) == 0
    assert "ends at 32" in capsys.readouterr().err
    assert command("evaluate", folder / "gpt2", *shared, "--lengths", "16,1k", "--out", tmp_path / "short") == 2
    assert "the text has 265 tokens; a window of 1024 needs 1025" in capsys.readouterr().err
    rows = results.read_json(tmp_path / "short" / "gpt2.json")["protocols"]["blocks"]["results"]
    assert [r["status"] for r in rows] == ["ok", "too short"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc", "3 bytes: not a stream"),
        (np.array([1, 2, 99] * 30, "<u2").tobytes(), "token id 99 and the model's vocabulary ends at 60"),
        (np.array([1, 2, 3], "<u2").tobytes(), "the text has 3 tokens; a window of 16 needs 17"),
    ],
)
def test_bad_texts(content, message, folder, tmp_path, capsys):
    (tmp_path / "bad.bin").write_bytes(content)
    out = tmp_path / "out"
    assert command("evaluate", folder / "gpt2", "--data", tmp_path / "bad.bin", "--lengths", "16", "--out", out) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.bin"), "there is no text 'nowhere.bin'"),
        (("--lengths", "16,x"), "'x' is not a whole number"),
        (("--protocol", "block"), "no protocol 'block'. Did you mean 'blocks'"),
        (("--lengths", "16,32", "--stride", "20"), "stride=20 is more than the shortest length"),
        (("--documents", "apart"), "cannot be 'apart'"),
        (("--batch-tokens", "0"), "batch_tokens must be at least 1, not 0"),
        (("--dtype", "float12"), "no dtype 'float12'"),
        (("--impl", "blockwise"), "is not one: leave it out"),
    ],
)
def test_bad_options(arguments, message, folder, tmp_path, capsys):
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = {"--data": folder / "text.bin", "--lengths": "16", "--out": tmp_path / "out", **given}
    assert command("evaluate", folder / "gpt2", *[x for pair in options.items() for x in pair]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_thing_where_a_list_is_expected(folder, tmp_path):
    run = str(folder / "kerple")
    for call in (
        lambda: evaluate_folders(run, folder / "text.bin", tmp_path / "out"),
        lambda: passkeys.passkey_folders(run, tmp_path / "out"),
        lambda: compare.load(run),
        lambda: Settings(protocols=run).resolve(),
    ):
        with pytest.raises(UserError, match=rf"must be a list, of one too: \['{run}'\], not"):
            call()
    with pytest.raises(UserError, match="lengths must be a list"):
        Settings(64).resolve()


def test_a_damaged_xz_and_results_of_other_settings(folder, tmp_path):
    (tmp_path / "cut.bin.xz").write_bytes((folder / "text.bin.xz").read_bytes()[:60])
    with pytest.raises(UserError, match="not a whole xz"):
        open_text(tmp_path / "cut.bin.xz")
    runs = [str(folder / "gpt2")]
    first = evaluate_folders(runs, folder / "text.bin", tmp_path / "out", Settings((16,)), shown=False)[0]
    again = evaluate_folders(runs, folder / "text.bin", tmp_path / "out", Settings((16,)), shown=False)[0]
    assert (
        again.value == json.loads((tmp_path / "out" / "gpt2.json").read_text()) and first.error is again.error is None
    )
    other = evaluate_folders(runs, folder / "text.bin", tmp_path / "out", Settings((8,)), shown=False)[0]
    assert "--overwrite replaces it" in other.error


def test_a_loss_that_is_no_number_is_reported(text):
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[20:] = float("nan")
    rows = evaluate(model, text, Settings((16, 32), ("blocks",)))["protocols"]["blocks"]["results"]
    assert rows[0]["status"] == "ok"
    assert rows[1]["status"] == "failed" and "not a finite number" in rows[1]["reason"]


# Killed, resumed, shared.


def stripped(path: Path) -> dict:
    """A result without what may differ between two runs of the same thing."""
    value = results.read_json(path)
    for key in ("created", "command", "processes"):
        value.pop(key)
    for entry in value["protocols"].values():
        for row in entry["results"]:
            row.pop("seconds", None)
    return value


def start(*arguments: object, processes: int = 1) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "relpos_cli", "evaluate", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def one_thread():
    """As torchrun gives its processes: sums of several threads may end in another digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_two_processes_equal_one_and_a_killed_run_resumes(one_thread, folder, tmp_path):
    """One batch per window and a stride of one: 900 batches, slow enough to be killed in the middle."""
    options = (
        folder / "kerple", folder / "learned", "--data", folder / "text.bin", "--eot", EOT, "--lengths", "16,64",
        "--protocol", "blocks,sliding,last", "--stride", "1", "--last", "5", "--batch-tokens", "1", "--out",
    )  # fmt: skip
    pair = start(*options, tmp_path / "two", processes=2)
    killed = start(*options, tmp_path / "killed")
    folder_of_parts = tmp_path / "killed" / "kerple.json.partial"
    deadline = time.monotonic() + 120
    while len(list(folder_of_parts.glob("*.npy"))) < 30:
        assert killed.poll() is None and time.monotonic() < deadline, killed.stderr.read()
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    parts = len(list(folder_of_parts.glob("*.npy")))
    assert parts >= 30 and not (tmp_path / "killed" / "kerple.json").exists()
    (folder_of_parts / "blocks-16-000000.npy").write_bytes(b"cut off")  # as after a full disk: computed again

    assert command("evaluate", *options, tmp_path / "one") == 0
    assert command("evaluate", *options, tmp_path / "killed") == 0
    _, said = pair.communicate(timeout=180)
    assert pair.returncode == 0, said
    for name in ("kerple.json", "learned.json"):
        one = stripped(tmp_path / "one" / name)
        assert stripped(tmp_path / "killed" / name) == one
        assert stripped(tmp_path / "two" / name) == one
        assert results.read_json(tmp_path / "two" / name)["processes"] == 2
    assert not list(tmp_path.glob("*/*.partial"))


def test_what_failed_is_tried_again(byte_run, tmp_path, capsys, monkeypatch):
    """And nothing else: the lines of the other lengths stay as they are."""
    (np.arange(1000) % 256).astype("<u2").tofile(tmp_path / "text.bin")
    given = {
        "run.json": ("evaluate", byte_run, "--data", tmp_path / "text.bin", "--lengths", "64,256,400"),
        "run.passkey.json": ("passkey", byte_run, "--lengths", "256,400", "--depths", "0,1", "--keys", "1"),
    }
    asked, full = [], [256]

    def busy(self, length: int) -> None:
        asked.append(length)
        if any(abs(length - T) <= 1 for T in full):
            raise MemoryError

    monkeypatch.setattr(Scorer, "check", busy)

    def run(name: str, *arguments: object) -> tuple[int, list[dict]]:
        status = command(*given[name], "--out", tmp_path / "out", *arguments)
        value = results.read_json(tmp_path / "out" / name)
        entries = value["protocols"].values() if "protocols" in value else [value]
        return status, [row for entry in entries for row in entry["results"]]

    for name in given:
        full[:] = [64, 256, 400]
        assert run(name)[0] == 2  # nothing at all was measured
        full[:] = [256]
        status, before = run(name)
        assert status == 2 and {row["length"] for row in before if row["status"] == "failed"} == {256}
        full.clear()
        asked.clear()
        status, after = run(name)
        assert status == 0 and asked and not {64, 399, 400} & set(asked)
        assert "tried again" in capsys.readouterr().err
        for old, new in zip(before, after, strict=True):
            assert new == old if old["status"] == "ok" else new["status"] == "ok"
        asked.clear()
        assert run(name) == (0, after) and not asked
        fresh = run(name, "--overwrite")[1]
        for row in (*after, *fresh):
            row.pop("seconds", None)
        assert fresh == after


def test_resuming_computes_only_what_is_missing(text, tmp_path, monkeypatch):
    settings = Settings((8, 16), ("blocks",), batch_tokens=16)
    plain = Scorer.losses
    calls = []

    def counted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    monkeypatch.setattr(Scorer, "losses", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(gpt2(), text, settings, out=tmp_path / "r.json")
    evaluate(gpt2(), text, settings, out=tmp_path / "r.json")
    batches = sum(len(protocol_room.windows("blocks", T, text, settings.resolve(text)).batches(16)) for T in (8, 16))
    assert len(calls) == batches + 1
    # Parts of another model are thrown away.
    calls.clear()
    (tmp_path / "r.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        evaluate(gpt2(), text, settings, out=tmp_path / "r.json")
    evaluate(gpt2(48), text, settings, out=tmp_path / "r.json")
    assert len(calls) == batches + 20


# Tables and plots.


def test_compare_on_stored_files(tmp_path, capsys):
    """Files written by the version that first had this format stay readable."""
    assert command("compare", STORED, "--out", tmp_path) == 0
    table = (tmp_path / "comparison.md").read_text()
    for protocol in ("blocks", "last"):
        for T in (16, 32, 64):
            cells = []
            for name in ("kerple", "learned"):
                row = compare.row_of(results.read_json(STORED / f"{name}.json"), protocol, T)
                cells.append(f"{row['perplexity']:.2f}" if row["status"] == "ok" else "-")
            line = f"| {T} | {cells[0]} | {cells[1]} |"
            assert line in table.replace("**", ""), line
    assert "learned:max_positions=32 at 64: the model's table of learned positions ends at 32 tokens" in table
    assert "| T | kerple | learned:max_positions=32 |" in table
    assert "Effective context" in table and "Passkey" in table and "Warning" not in table

    lines = (tmp_path / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 3 and lines[0].startswith("label,model,encoding")
    assert sum("unsupported" in line for line in lines) == 2
    latex = (tmp_path / "comparison.tex").read_text()
    assert latex.count(r"\begin{tabular}{rrr}") == 2 and r"learned:max\_positions=32" in latex
    assert "64 & " in latex and r" & -- \\" in latex
    for name in ("perplexity", "loss-by-position", "passkey"):
        for suffix, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
            assert (tmp_path / f"{name}.{suffix}").read_bytes().startswith(magic)


def test_compare_marks_what_cannot_be_told_apart(text):
    same, other = (
        evaluate(m, text, Settings((16,), ("blocks",)), name=n) for m, n in ((gpt2(), "a"), (ours("kerple"), "b"))
    )
    near = json.loads(json.dumps(same))
    row = near["protocols"]["blocks"]["results"][0]
    row["cluster_loss"] = [x + (1e-3 if i % 2 else -1e-3) for i, x in enumerate(row["cluster_loss"])]
    row["loss"] += 1e-6
    worse = json.loads(json.dumps(same))
    row = worse["protocols"]["blocks"]["results"][0]
    row["cluster_loss"] = [x * 1.01 for x in row["cluster_loss"]]
    row["loss"] *= 1.01
    comparison = compare.Comparison([("a", same), ("near", near), ("worse", worse)])
    assert compare.best_of(comparison, "blocks", 16) == {"a", "near"}
    assert compare.best_of(compare.Comparison([("b", other)]), "blocks", 16) == set()


def test_compare_warns_and_rejects(tmp_path, capsys):
    value = results.read_json(STORED / "kerple.json")
    value["data"]["fingerprint"] = "sha256:other"
    results.write_json(tmp_path / "other.json", value)
    results.write_json(tmp_path / "newer.json", {**value, "format_version": 99})
    (tmp_path / "broken.json").write_text("{")
    code = command(
        "compare", STORED / "kerple.json", tmp_path / "other.json", tmp_path / "newer.json", tmp_path / "broken.json",
        "--labels", "one,two", "--out", tmp_path / "out", "--format", "svg",
    )  # fmt: skip
    assert code == 2
    said = capsys.readouterr().err
    assert "different texts" in said and "format version 99" in said and "broken.json is not a readable JSON" in said
    assert "**Warning.** The columns were scored on different texts" in (tmp_path / "out" / "comparison.md").read_text()
    assert command("compare", tmp_path / "broken.json", "--out", tmp_path / "none") == 2
    assert command("compare", tmp_path / "nowhere.json", "--out", tmp_path / "none") == 2
    capsys.readouterr()
    for part in ("model", "interval", "protocols"):
        results.write_json(tmp_path / "cut.json", {key: what for key, what in value.items() if key != part})
        assert command("compare", tmp_path / "cut.json", "--out", tmp_path / "none") == 2
        assert f"cut.json is no whole result: {part} is not there" in capsys.readouterr().err
    for path in ("effective_context", "model.parameters", "protocols.blocks.scored.tokens"):
        cut = json.loads(json.dumps(value))
        *outer, last = path.split(".")
        inner = cut
        for key in outer:
            inner = inner[key]
        del inner[last]
        results.write_json(tmp_path / "cut.json", cut)
        assert command("compare", tmp_path / "cut.json", "--out", tmp_path / "none") == 2
        assert f"{path.removeprefix('protocols.')} is not there" in capsys.readouterr().err
    cut = json.loads(json.dumps(value))
    del cut["protocols"]["blocks"]["results"][0]["perplexity"]
    for wrong in (cut, {**value, "protocols": []}):
        results.write_json(tmp_path / "cut.json", wrong)
        assert command("compare", tmp_path / "cut.json", "--out", tmp_path / "none") == 2
        assert "is no whole result" in capsys.readouterr().err
    value["protocols"]["blocks"]["results"][0].pop("status")
    results.write_json(tmp_path / "cut.json", value)
    assert command("compare", tmp_path / "cut.json", "--out", tmp_path / "none") == 2
    assert "blocks.results: rows with length and status is not there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_tokenizers_are_compared_by_bits_per_byte():
    one, two = (results.read_json(STORED / "kerple.json") for _ in range(2))
    for value, bits in ((one, 1.5), (two, 2.5)):
        value["data"] |= {"fingerprint": f"sha256:{bits}", "file_sha256": "the same"}
        value["protocols"]["blocks"]["scored"]["fingerprint"] = f"sha256:{bits}"
        value["protocols"]["blocks"]["results"][0]["bits_per_byte"] = bits
    comparison = compare.Comparison([("one", one), ("two", two)])
    said = compare._warnings(comparison)
    assert len(said) == 1 and "different tokens" in said[0] and "bits per byte, in comparison.csv, can" in said[0]
    lines = [line.split(",") for line in compare.csv_table(comparison).splitlines()]
    at = lines[0].index("bits_per_byte")
    assert [line[at] for line in lines[1:] if line[at]] == ["1.5", "2.5"]


def test_no_two_columns_have_one_label(tmp_path, capsys):
    (tmp_path / "again").mkdir()
    shutil.copy(STORED / "kerple.json", tmp_path / "again")
    files = [STORED / "kerple.json", tmp_path / "again" / "kerple.json", STORED / "learned.json"]
    names = [name for name, _ in compare.load(files).perplexity]
    assert len(set(names)) == 3 and names[2] == "learned:max_positions=32"
    assert command("compare", *files, "--labels", "x,x,y", "--out", tmp_path / "out") == 2
    assert "the label 'x' is given twice" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert command("compare", *files, "--labels", "x|1,x|2,y", "--out", tmp_path / "out", "--format", "svg") == 0
    rows = [line for line in (tmp_path / "out" / "comparison.md").read_text().splitlines() if "x|1" in line]
    assert rows == []  # escaped wherever it stands in a table


def test_settings_that_would_count_tokens_twice():
    with pytest.raises(UserError, match="every=10 is less than last=50"):
        Settings((64, 200), ("last",), last=50, every=10).resolve()


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "kerple").mkdir(parents=True)
    (tmp_path / "runs" / "kerple" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="there is no folder 'runs/kerpel' .* Did you mean 'runs/kerple'"):
        load_model("runs/kerpel", device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(UserError, match="nothing can be computed on 'meta'"):
        pick_device("meta")


def test_curves_show_every_model_with_its_interval():
    loaded = compare.load([STORED])
    figure = curves.perplexity(loaded.perplexity)
    panels = figure.axes
    assert [ax.get_title().split(":")[0] for ax in panels] == ["blocks", "last"]
    for ax in panels:
        assert ax.get_xscale() == "log" and ax.get_xlabel() == "window length T (tokens)"
        for (_, value), drawn in zip(loaded.perplexity, ax.containers, strict=True):
            rows = [r for r in value["protocols"][ax.get_title().split(":")[0]]["results"] if r["status"] == "ok"]
            assert drawn.lines[0].get_xdata().tolist() == [r["length"] for r in rows]
            np.testing.assert_allclose(drawn.lines[0].get_ydata(), [r["perplexity"] for r in rows])
            ends = [path.vertices[:, 1].tolist() for path in drawn.lines[2][0].get_paths()]
            np.testing.assert_allclose(ends, [r["ci95"] for r in rows])
    ax = curves.loss_by_position(loaded.perplexity).axes[0]
    labels = [line.get_label() for line in ax.lines if not line.get_label().startswith("_")]
    assert labels == ["kerple", "learned:max_positions=32 (to 32)"]


def test_positions_come_from_the_shortest_windows_that_reach_them(monkeypatch):
    monkeypatch.setattr(curves, "LEAST", 1)  # no bins put together
    text = make_text(np.random.default_rng(0).integers(1, VOCABULARY, 16 * 64 + 1))
    value = evaluate(ours("alibi"), text, Settings((16, 64), ("blocks",)))
    short, long = (row["positions"] for row in value["protocols"]["blocks"]["results"])
    line, dots = curves.loss_by_position([("a", value)]).axes[0].lines[:2]
    beyond = [loss for start, loss in zip(long["bins"]["from"], long["bins"]["loss"], strict=True) if start >= 16]
    np.testing.assert_allclose(line.get_ydata(), short["bins"]["loss"] + beyond)
    every = np.concatenate([results.unpack(short["loss_f32_base64"]), results.unpack(long["loss_f32_base64"])[16:]])
    np.testing.assert_allclose(dots.get_ydata(), every, rtol=1e-6)  # 64 positions, a dot each


# Passkey.


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("passkey") / "run"
    ours("alibi", 320).save_pretrained(run)
    tokenizers.load("bytes").save(run)
    return run


def test_prompts_have_exact_lengths_and_hold_the_key_where_they_say(byte_run):
    tokenizer = load_tokenizer(byte_run)
    prompts = passkeys.Prompts(tokenizer)
    assert prompts.spelling == " {}"
    places = []
    for depth in (0.0, 0.5, 1.0):
        ids = prompts.build(600, depth, "71432", offset=3)
        assert len(ids) == 600
        said = bytes(ids.astype(np.uint8)).decode()
        assert said.startswith(passkeys.INTRODUCTION) and said.endswith("The pass key is 7 1 4 3 2")
        assert said.count("7 1 4 3 2") == 3
        places.append(said.index("7 1 4 3 2"))
    room = 600 - prompts.shortest
    assert places[1] - places[0] == round(room / 2) and places[2] - places[0] == room
    with pytest.raises(UserError, match=f"at least {prompts.shortest} tokens"):
        prompts.build(100, 0.0, "71432")
    grid = passkeys.Grid((600,), (0.5,), keys=4, seed=1)
    ids, keys = passkeys.prompts_of_cell(prompts, grid, 600, 0.5)
    again, same = passkeys.prompts_of_cell(prompts, grid, 600, 0.5)
    assert keys == same and (ids == again).all() and len(set(keys)) == 4
    assert passkeys.prompts_of_cell(prompts, passkeys.Grid((600,), (0.5,), 4, 2), 600, 0.5)[1] != keys


def test_passkey_likelihood_and_greedy_by_brute_force(byte_run, monkeypatch):
    """With two digits there are a hundred keys: score each as a text of its own."""
    monkeypatch.setattr(passkeys, "DIGITS", 2)
    model = load_model(byte_run, device="cpu", dtype=torch.float32)
    prompts = passkeys.Prompts(load_tokenizer(byte_run))
    ids = prompts.build(300, 0.3, "52")[None]
    found = dict(zip(passkeys.MEASURES, passkeys.score(Scorer(model), prompts, ids, ["52"])[:, 0], strict=True))
    context = ids[0, : -prompts.answer_length]
    everyone = np.stack([np.append(context, [32, 48 + a, 32, 48 + b]) for a in range(10) for b in range(10)])
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.from_numpy(everyone)).logits.double(), -1).numpy()
    # Among numbers only: the spaces are given, and at each digit nothing but digits counts.
    steps = []
    for at in (-4, -2):
        digits = logp[:, at, 48:58]
        own = logp[np.arange(100), at, everyone[:, at + 1]]
        steps.append(own - np.log(np.exp(digits).sum(-1)))
    total = steps[0] + steps[1]
    assert np.exp(total).sum() == pytest.approx(1)
    assert found["log_likelihood"] == pytest.approx(total[52], rel=1e-4)
    first, second = np.argmax(logp[52, -4, 48:58]), np.argmax(logp[52, -2, 48:58])
    assert found["digits_first_of_ten"] == ((first == 5) + (second == 2)) / 2
    greedy = context
    with torch.no_grad():
        for _ in range(4):
            greedy = np.append(greedy, int(model(torch.from_numpy(greedy)[None]).logits[0, -1].argmax()))
    assert found["greedy_key"] == float((greedy[-4:] == ids[0, -4:]).all())


class Copier:
    """Stands for a model that knows `share` of the digits."""

    def __init__(self, wrong_digit: int | None):
        self.wrong = wrong_digit

    def logits(self, ids: np.ndarray, first: int) -> np.ndarray:
        out = np.full((1, ids.shape[1] - first, 320), -20.0, np.float32)
        key = bytes(ids[0].astype(np.uint8)).split(b"The pass key is")[1][:10]
        for row, byte in enumerate(key):
            out[0, row, byte if self.wrong is None or row != 2 * self.wrong + 1 else 300] = 0.0
        return out


def test_passkey_of_a_model_that_knows(byte_run):
    prompts = passkeys.Prompts(load_tokenizer(byte_run))
    ids = prompts.build(400, 0.5, "71432")[None]
    known = passkeys.score(Copier(None), prompts, ids, ["71432"])[:, 0]
    np.testing.assert_allclose(known, [0, 1, 1, 1], atol=1e-4)
    partly = passkeys.score(Copier(2), prompts, ids, ["71432"])[:, 0]
    np.testing.assert_allclose(partly[[0, 2, 3]], [-math.log(10), 0.8, 0], atol=1e-4)


def test_prompts_read_together_score_as_alone(byte_run, monkeypatch):
    scorer = Scorer(load_model(byte_run, device="cpu", dtype=torch.float32))
    prompts = passkeys.Prompts(load_tokenizer(byte_run))
    ids, keys = passkeys.prompts_of_cell(prompts, passkeys.Grid((300,), (0.5,), keys=5), 300, 0.5)
    alone = np.concatenate([passkeys.score(scorer, prompts, ids[i : i + 1], keys[i : i + 1]) for i in range(5)], 1)
    monkeypatch.setattr(passkeys, "BATCH_TOKENS", 2 * 300)  # two, two and one
    np.testing.assert_allclose(passkeys.score(scorer, prompts, ids, keys), alone, rtol=1e-5)
    assert len(set(alone[0])) == 5  # the right one at the right place


def test_passkey_command(byte_run, folder, tmp_path, capsys):
    options = ("--lengths", "256,400", "--depths", "0,0.5,1", "--keys", "2", "--out", tmp_path)
    assert command("passkey", byte_run, folder / "gpt2", *options) == 0 + 2
    said = capsys.readouterr()
    assert "has no tokenizer in its folder" in said.err
    value = results.read_json(tmp_path / "run.passkey.json")
    assert [r["status"] for r in value["results"]] == ["ok", "ok"]
    assert (tmp_path / "run.passkey.png").read_bytes().startswith(b"\x89PNG")
    assert value["results"][0]["log_likelihood"] == pytest.approx(
        np.mean([c["log_likelihood"] for c in value["results"][0]["cells"]]), abs=1e-5
    )
    assert command("passkey", byte_run, *options, "--seed", "1") == 2
    assert "--overwrite replaces it" in capsys.readouterr().err


def test_a_length_without_room_for_the_prompt_is_said_before_any_work(byte_run, folder, tmp_path, capsys, monkeypatch):
    shortest = passkeys.Prompts(load_tokenizer(byte_run)).shortest
    options = ("--depths", "0", "--keys", "1", "--out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("relpos.evaluation.folders.load_model", None)  # a call would be a TypeError
        assert command("passkey", folder / "gpt2", byte_run, "--lengths", f"100,{shortest - 1},400", *options) == 2
    said = capsys.readouterr()
    assert f"--lengths 100,{shortest - 1}: a passkey prompt needs at least {shortest} tokens" in said.err
    assert f"tokenizer of {byte_run}" in said.err and said.out == "" and not (tmp_path / "out").exists()
    assert command("passkey", byte_run, "--lengths", shortest, *options) == 0
    assert results.read_json(tmp_path / "out" / "run.passkey.json")["results"][0]["status"] == "ok"


def test_of_a_run_that_has_not_ended_the_last_checkpoint_is_measured(byte_run, tmp_path, capsys, monkeypatch):
    from relpos.evaluation import harness

    run = tmp_path / "young"
    for step in (20, 100, 120):
        shutil.copytree(byte_run, run / f"checkpoint-{step}")
    (run / "checkpoint-120" / "checkpoint.json").write_text('{"files": {"model.safetensors": 1}}')  # cut off
    (np.arange(300) % 256).astype("<u2").tofile(tmp_path / "text.bin")
    said = f"{run} has not ended, or has lost its config.json: its last checkpoint is measured, checkpoint-100\n"
    shared = ("--out", tmp_path / "out", "--lengths")
    assert command("evaluate", run, "--data", tmp_path / "text.bin", *shared, 64) == 0
    assert capsys.readouterr().err.startswith(said)
    assert command("passkey", run, *shared, 400, "--depths", "0", "--keys", "1") == 0
    assert capsys.readouterr().err.startswith(said)
    for kind in ("json", "passkey.json"):
        assert results.read_json(tmp_path / "out" / f"young-checkpoint-100.{kind}")["model"]["path"] == "checkpoint-100"
    with monkeypatch.context() as patch:
        patch.setattr(harness, "_library", MagicMock())
        patch.setattr(harness, "load_model", MagicMock(side_effect=UserError("enough")))
        assert command("harness", run, "--tasks", harness.__file__) == 2
        assert harness.load_model.call_args.args == (str(run / "checkpoint-100"),)
    assert capsys.readouterr().err.startswith(said)


# The harness.


def test_the_harness_is_asked_for_by_name_or_gets_no_cap(byte_run):
    from relpos.evaluation import harness

    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(UserError, match=r"pip install 'relpos\[eval\]'"):
            harness.harness(str(byte_run), ["lambada_openai"])
        return
    model = load_model(byte_run, device="cpu", dtype=torch.float32)
    assert harness.adapter(model, load_tokenizer(byte_run)).max_length == harness.UNCAPPED
    assert harness.adapter(model, load_tokenizer(byte_run), max_length=77).max_length == 77
    assert harness.adapter(gpt2(64), load_tokenizer(byte_run)).max_length == 64
