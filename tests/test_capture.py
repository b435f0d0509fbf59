"""Captures against what the models themselves compute, the capture file, and mistakes."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers

import relpos
from relpos import capture, encodings, terms
from relpos.capture import families
from relpos.capture.model import TEXT, capture_run
from relpos.data import tokenizer as tokenizers
from relpos.errors import UserError
from relpos.models import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM

LENGTH = 40
SMALL = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}


def ids(vocab: int = 100, n: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(1))


def ours(encoding: str, cls=RelPosForCausalLM, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    return cls(RelPosConfig(**SMALL, encoding=encoding, **more)).eval()


def plain(weights: torch.Tensor) -> torch.Tensor:
    """A map as a model gives its weights: zero where nothing is seen."""
    return weights.masked_fill(weights.isneginf(), 0)


# Our models.


@pytest.mark.parametrize("encoding", [*encodings.names(), "dape:version=2,base=cable", "kerple:share=false"])
def test_our_weights_are_the_models(encoding):
    model = ours(encoding)
    made = capture.from_model(model, tokens=ids(), length=LENGTH, layers="all")
    with torch.no_grad():
        attentions = model(ids()[None], output_attentions=True).attentions
    for layer, expected in enumerate(attentions):
        torch.testing.assert_close(plain(made.map("weights", layer)), expected[0], atol=2e-6, rtol=1e-5)


def test_our_encoder():
    model = ours("alibi", RelPosForMaskedLM)
    made = capture.from_model(model, tokens=ids(), length=LENGTH)
    with torch.no_grad():
        expected = model(ids()[None], output_attentions=True).attentions[-1][0]
    torch.testing.assert_close(made.map("weights"), expected, atol=2e-6, rtol=1e-5)
    assert not made.map("bias").isneginf().any()  # it sees both ways


def test_grouped_query_heads():
    model = ours("rope", num_key_value_heads=2)
    made = capture.from_model(model, tokens=ids(), length=LENGTH)
    with torch.no_grad():
        expected = model(ids()[None], output_attentions=True).attentions[-1][0]
    torch.testing.assert_close(plain(made.map("weights")), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", ["kerple", "alibi", "t5", "fire", "sandwich"])
def test_bias_of_a_spec_is_bias_matrix(spec):
    made = capture.from_spec(spec, length=33)
    assert torch.equal(made.map("bias"), relpos.bias_matrix(made.encoding(0), 33))


def test_bias_that_reads_the_text_is_bias_matrix():
    """Two ways to the same numbers: the capture's terms, and the module with the hidden state it read."""
    model = ours("cable")
    seen = {}
    block = model.base_model.layers[-1].attention
    hook = block.register_forward_pre_hook(lambda m, args, kw: seen.update(hidden=args[0]), with_kwargs=True)
    made = capture.from_model(model, tokens=ids(), length=LENGTH)
    hook.remove()
    expected = relpos.bias_matrix(model.base_model.encodings[-1], LENGTH, seen["hidden"])[0]
    torch.testing.assert_close(made.map("bias"), expected, atol=1e-6, rtol=1e-6)


def test_a_model_comes_back_as_it_was():
    model = ours("kerple").train()
    capture.from_model(model, tokens=ids(), length=LENGTH)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())


def test_layers_that_were_not_captured_come_from_the_parameters(tmp_path):
    model = ours("kerple:share=false")
    path = capture.from_model(model, tokens=ids(), length=LENGTH, layers="last").save(tmp_path / "k.safetensors")
    held = capture.load(path)
    assert list(held.layers) == [1]
    expected = relpos.bias_matrix(model.base_model.encodings[0], 64)
    torch.testing.assert_close(held.map("bias", 0, length=64), expected)
    with pytest.raises(UserError, match="no q and k for layer 0"):
        held.map("scores", 0)


def test_layers_that_read_the_text_must_be_captured(tmp_path):
    path = capture.from_model(ours("cable"), tokens=ids(), length=LENGTH).save(tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="--layers all"):
        capture.load(path).map("bias", 0)
    with pytest.raises(UserError, match="made with 40 tokens"):
        capture.load(path).map("bias", -1, length=41)


def test_rows_and_shorter_lengths_are_parts_of_the_whole():
    made = capture.from_model(ours("dape:version=2,base=kerple"), tokens=ids(), length=LENGTH)
    for kind in capture.KINDS:
        whole = made.map(kind)
        blocks = torch.cat([cells for _, cells in made.rows(kind, step=7)], 1)
        torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(made.map(kind, length=17), whole[:, :17, :17], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(made.map(kind, heads=[4, 1]), whole[[4, 1]], atol=1e-6, rtol=1e-6)


def test_masked_cells_are_minus_infinity_in_every_map():
    made = capture.from_model(ours("cable"), tokens=ids(), length=LENGTH)
    above = torch.ones(LENGTH, LENGTH).triu(1).bool()
    for kind in capture.KINDS:
        cells = made.map(kind)
        assert bool(cells[:, above].isneginf().all()) and bool(cells[:, ~above].isfinite().all())


# The Hugging Face families.

WIDE = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = {**WIDE, "intermediate_size": 64, "num_key_value_heads": 2}
BERT = {**WIDE, "intermediate_size": 64, "max_position_embeddings": 66}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
INKLING = {
    **LLAMA, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 9, "d_rel": 4, "rel_extent": 16, "log_scaling_n_floor": 8, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "layer_types": ["hybrid", "hybrid_sliding"],
}  # fmt: skip
FAMILIES = {
    "t5": ("T5", T5),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", T5),
    "bloom": ("Bloom", {"vocab_size": 100, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "mpt": ("Mpt", {"vocab_size": 100, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}),
    "falcon alibi": ("Falcon", {**WIDE, "alibi": True}),
    "falcon rope": ("Falcon", {**WIDE, "alibi": False}),
    "falcon new": ("Falcon", {**WIDE, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gpt2": ("GPT2", {"vocab_size": 100, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, **NO_IDS}),
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", {**LLAMA, "head_dim": 8, "sliding_window": 9}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 8}),
    "bert": ("Bert", BERT),
    "electra": ("Electra", {**BERT, "embedding_size": 48}),
    "roberta": ("Roberta", BERT),
    "inkling_text": ("InklingText", INKLING),
}
ADDITIVE = {"t5", "mt5", "umt5", "bloom", "mpt", "falcon alibi", "inkling_text"}


def foreign(name: str) -> torch.nn.Module:
    """A small random model with weights large enough that attention is far from uniform."""
    stem, settings = FAMILIES[name]
    config = getattr(transformers, f"{stem}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def own_attentions(model: torch.nn.Module) -> list[torch.Tensor]:
    given = {"decoder_input_ids": ids()[None]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(input_ids=ids()[None], output_attentions=True, **given)
    if model.config.is_encoder_decoder:
        return [*out.encoder_attentions, *out.decoder_attentions]
    return list(out.attentions)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "falcon alibi"])
def test_family_against_its_own_eager_attention(name):
    model = foreign(name)
    before = model.config._attn_implementation
    made = capture.from_model(model, tokens=ids(), length=LENGTH, layers="all")
    assert model.config._attn_implementation == before
    expected = own_attentions(model)
    assert made.num_layers == len(expected)
    for layer, own in enumerate(expected):
        torch.testing.assert_close(plain(made.map("weights", layer)), own[0], atol=2e-6, rtol=1e-4)
    assert made.default_kind() == ("bias" if name in ADDITIVE else "scores")


def test_falcon_with_alibi_against_its_default_attention():
    """Its eager path in transformers 5.17 adds the bias twice, so its default path is the measure."""
    model = foreign("falcon alibi")
    model.config._attn_implementation = "sdpa"
    attention = model.h[-1].self_attention
    seen = {}
    hooks = [
        attention.query_key_value.register_forward_hook(lambda m, a, out: seen.update(qkv=out)),
        attention.dense.register_forward_pre_hook(lambda m, args: seen.update(out=args[0])),
    ]
    made = capture.from_model(model, tokens=ids(), length=LENGTH)
    for hook in hooks:
        hook.remove()
    value = attention._split_heads(seen["qkv"])[2][0].transpose(0, 1)  # [1, T, D], one key head
    expected = (plain(made.map("weights")) @ value).transpose(0, 1).flatten(1)
    torch.testing.assert_close(expected, seen["out"][0], atol=1e-5, rtol=1e-4)


def test_t5_bias_is_its_own_compute_bias():
    model = foreign("t5")
    made = capture.from_model(model, tokens=ids(), length=LENGTH, layers="all")
    for layer, stack in ((1, model.encoder), (3, model.decoder)):
        own = stack.block[0].layer[0].SelfAttention.compute_bias(LENGTH, LENGTH)[0].detach()
        cells = made.map("bias", layer)
        seen = ~cells.isneginf()
        torch.testing.assert_close(cells[seen], own[seen])
    assert not made.map("bias", 1).isneginf().any() and made.map("bias", 3).isneginf().any()


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_alibi_families_draw_our_alibi(name):
    made = capture.from_model(foreign(name), tokens=ids(), length=LENGTH)
    torch.testing.assert_close(made.map("bias"), relpos.bias_matrix(encodings.build("alibi", heads=6), LENGTH))


def test_positional_bias_needs_no_text():
    made = capture.from_model(foreign("t5"), length=LENGTH)
    assert made.tokens is None and "no text" in made.provenance["note"] and not made.has_content()
    assert made.map("bias").shape == (4, LENGTH, LENGTH)


def test_every_family_is_tested():
    assert {name.split()[0] for name in FAMILIES} | {"inkling_mm_model"} == set(families.FAMILIES)


def test_from_a_folder_with_a_tokenizer(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 300})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizers.load("bytes").save(tmp_path)
    made = capture.from_model(tmp_path, length=64)
    text = TEXT.read_text(encoding="utf-8")
    assert made.tokens.tolist() == list(text.encode()[:64]) and "".join(made.pieces) == text[:64]
    assert made.name == tmp_path.name and made.default_kind() == "scores"


# The file.


def test_save_and_load_keep_everything(tmp_path):
    made = capture.from_model(ours("dape:version=2,base=cable"), tokens=ids(), length=LENGTH, layers="all")
    held = capture.load(made.save(tmp_path / "a.safetensors"))
    for kind in capture.KINDS:
        for layer in (0, 1):
            assert torch.equal(held.map(kind, layer), made.map(kind, layer))
    assert held.provenance == made.provenance and held.tokens.tolist() == ids().tolist()
    small = capture.load(made.save(tmp_path / "b.safetensors", half=True))
    torch.testing.assert_close(small.map("bias")[:, 5:, :5], made.map("bias")[:, 5:, :5], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("spec", ["kerple", "kerple:form=power", "cable:form=kernel", "t5"])
def test_plain_fields_are_kept(spec, tmp_path):
    made = capture.from_model(ours(spec), tokens=ids(), length=LENGTH)
    held = capture.load(made.save(tmp_path / "a.safetensors"))
    bias = made.map("bias")
    assert torch.equal(held.map("bias"), bias) and torch.equal(held.map("bias", heads=[1])[0], bias[1])


def test_a_table_that_is_added_to_the_embeddings_is_not_held(tmp_path):
    made = capture.from_model(ours("learned"), tokens=ids(), length=LENGTH)
    held = capture.load(made.save(tmp_path / "a.safetensors"))
    assert not held.parameters and not held.has_bias() and torch.equal(held.map("scores"), made.map("scores"))


def test_an_encoding_with_nothing_to_store(tmp_path):
    made = capture.from_spec("rope", length=8)
    assert torch.equal(capture.load(made.save(tmp_path / "r.safetensors")).map("scores"), made.map("scores"))


def test_content_is_kept_only_where_asked_or_needed(tmp_path):
    kept = {
        spec: capture.from_model(ours(spec), tokens=ids(), length=LENGTH, content=False).has_content()
        for spec in ("kerple", "cable", "rope", "dape")
    }
    assert kept == {"kerple": False, "cable": False, "rope": True, "dape": True}


def rewrite(path, **metadata):
    """The file with other metadata: a safetensors file is a length, a JSON header and bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return path


def test_files_that_cannot_be_read(tmp_path):
    good = capture.from_spec("kerple", length=16).save(tmp_path / "good.safetensors")
    data = good.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(data[:-20])
    with pytest.raises(UserError, match="truncated"):
        capture.load(cut)
    cut.write_bytes(b"")
    with pytest.raises(UserError, match="truncated"):
        capture.load(cut)
    with pytest.raises(UserError, match="version 2.*reads up to 1"):
        capture.load(rewrite(capture.from_spec("kerple", length=16).save(tmp_path / "new.safetensors"), version="2"))
    with pytest.raises(UserError, match="no capture"):
        capture.load(rewrite(capture.from_spec("kerple", length=16).save(tmp_path / "no.safetensors"), format="pt"))
    with pytest.raises(UserError, match="damaged"):
        capture.load(rewrite(capture.from_spec("kerple", length=16).save(tmp_path / "bad.safetensors"), header="{}"))
    with pytest.raises(UserError, match="no file"):
        capture.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(UserError, match="cannot write"):
        capture.load(good).save("/proc/relpos/x.safetensors")
    with pytest.raises(UserError, match="cannot write"):  # a file in place of the folder
        capture.load(good).save(good / "x.safetensors")


# Mistakes.


def run_folder(tmp_path, encoding: str = "kerple"):
    ours(encoding).save_pretrained(tmp_path)
    tokenizers.load("bytes").save(tmp_path)
    return tmp_path


def test_headers_that_no_capture_has(tmp_path):
    data = capture.from_spec("kerple", length=16).save(tmp_path / "made.safetensors").read_bytes()
    outer = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    header = json.loads(outer["__metadata__"]["header"])
    changes = [
        ("layers", []), ("heads", "x"), ("length", "x"), ("modules", []), ("modules", [99]), ("specs", "kerple"),
        ("provenance", []), ("pieces", 1), ("num_layers", 0),
    ]  # fmt: skip
    for wrong in ["x", 5, [], *({**header, key: value} for key, value in changes)]:
        made = capture.from_spec("kerple", length=16).save(tmp_path / "wrong.safetensors")
        with pytest.raises(UserError, match="is a damaged capture"):
            capture.load(rewrite(made, header=json.dumps(wrong)))
    made = capture.from_spec("kerple", length=16).save(tmp_path / "wrong.safetensors")
    with pytest.raises(UserError, match="version \u00b2"):
        capture.load(rewrite(made, version="\u00b2"))


def test_half_keeps_what_float16_cannot_hold(tmp_path):
    held = capture.from_model(ours("rope"), tokens=ids(n=400), length=400, content=True)
    layer = held.layers[max(held.layers)]
    layer.k = layer.k * 1e6
    again = capture.load(held.save(tmp_path / "half.safetensors", half=True))
    kept = again.layers[max(held.layers)]
    assert kept.q.dtype == torch.float16 and torch.equal(kept.k, layer.k)
    with pytest.raises(UserError, match="no Python file"):
        held.save(tmp_path / "half.py")


def test_layers_that_differ_in_heads_without_content():
    layers = {0: capture.Layer([terms.Slope(torch.ones(6))]), 1: capture.Layer([terms.Slope(torch.ones(2))])}
    held = capture.Capture("mixed", "mixed", heads=6, length=8, num_layers=2, layers=layers)
    assert [held.map("bias", layer).shape[0] for layer in (0, 1)] == [6, 2]


def test_where_a_capture_goes_is_checked_before_the_work(tmp_path):
    """There is no such model either: that would be said next."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file' is no folder"):
        capture_run(tmp_path / "nowhere", tmp_path / "file" / "x.safetensors")


def test_bad_input(tmp_path):
    folder = run_folder(tmp_path / "run")
    short = tmp_path / "short.txt"
    short.write_text("eleven char")
    with pytest.raises(UserError, match=r"short.txt has 11 tokens.*the length is 512.*--length 11"):
        capture.from_model(folder, text=short)
    with pytest.raises(UserError, match="no layer 7: the model has 2"):
        capture.from_model(folder, layers=[7], length=16)
    with pytest.raises(UserError, match="no text file"):
        capture.from_model(folder, text=tmp_path / "none.txt")
    with pytest.raises(UserError, match="there is no folder"):
        capture.from_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="config.json"):
        capture.from_model(tmp_path)
    with pytest.raises(UserError, match="between 1 and 16384"):
        capture.from_model(folder, length=20000)
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        capture.from_model(folder, tokens=[9999] * 16, length=16)
    with pytest.raises(UserError, match="pass tokens="):
        capture.from_model(ours("cable"))


def test_unsupported_architecture_says_which_are(tmp_path):
    transformers.OPTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'opt' are not supported.*t5.*bloom.*llama.*bert"):
        capture.from_model(tmp_path)


def test_a_table_that_ends(tmp_path):
    with pytest.raises(UserError, match="ends at 64 tokens"):
        capture.from_model(foreign("gpt2"), tokens=ids(n=80), length=80)


def test_corrupt_weights(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    with pytest.raises(UserError):
        capture.from_model(folder, length=16)


def test_what_a_run_says_about_itself_is_kept(tmp_path):
    folder = run_folder(tmp_path / "run")
    told = {
        "settings": {"size": "nano", "seed": 3}, "spread": {"length": 512}, "tokens_per_step": 1024, "steps": 70,
        "data": {"folder": "/somewhere/books", "tokenizer": {"name": "bytes"}}, "validation_loss": 2.0,
        "git": {"commit": "0123456789abcdef", "changed": False},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(told))
    facts = capture.from_model(folder, length=32).provenance
    assert facts["steps"] == "70" and facts["perplexity"].startswith("7.39") and facts["commit"] == "0123456789"
    assert facts["data"] == "books (bytes tokens)" and "/somewhere" not in json.dumps(facts)


def test_a_checkpoint_says_its_own_step(tmp_path):
    folder = run_folder(tmp_path / "run" / "checkpoint-40")
    told = {
        "settings": {"size": "nano", "seed": 3}, "spread": {"length": 512}, "tokens_per_step": 1024, "steps": 70,
        "data": {"folder": "books", "tokenizer": {"name": "bytes"}}, "validation_loss": 2.0, "git": None,
    }  # fmt: skip
    (folder.parent / "run.json").write_text(json.dumps(told))
    (folder.parent / "validation.jsonl").write_text('{"step": 40, "loss": 1.0}\n{"step": 70, "loss": 2.0}\n')
    facts = capture.from_model(folder, length=32).provenance
    assert facts["steps"] == "40 of 70" and facts["perplexity"].startswith("2.72")


def test_the_command(tmp_path, capsys):
    import relpos_cli

    folder = run_folder(tmp_path / "run", "cable")
    text = tmp_path / "words.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    out = tmp_path / "deep" / "run.safetensors"
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(
            ["capture", str(folder), "--text", str(text), "--layers", "all", "--length", "64", "--out", str(out)]
        )
    assert stop.value.code == 0 and "layers 0, 1 (0 to 1)" in capsys.readouterr().out
    held = capture.load(out)
    assert held.length == 64 and held.provenance["text"] == "words.txt" and set(held.layers) == {0, 1}
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["capture", str(folder), "--layers", "first", "--out", str(out)])
    assert stop.value.code == 2 and "'last', 'all' or numbers" in capsys.readouterr().err


def test_the_command_shows_how_far_it_is(tmp_path, monkeypatch):
    import relpos_cli
    from relpos.data.progress import Progress

    told: list[tuple[float, str]] = []
    monkeypatch.setattr(Progress, "__call__", lambda self, *news: told.append(news) if self.shown else None)
    monkeypatch.setattr(capture.Capture, "save", lambda self, path, half: told.append("saved"))
    run_folder(tmp_path / "ours")
    foreign("t5").save_pretrained(tmp_path / "foreign")  # two layers in each of its stacks
    for name, layers in (("ours", 2), ("foreign", 4)):
        told.clear()
        with pytest.raises(SystemExit) as stop:
            relpos_cli.main(["capture", str(tmp_path / name), "--length", "48", "--out", str(tmp_path / "x")])
        steps = [(n / layers, f"layer {n + 1} of {layers}") for n in range(layers)]
        assert stop.value.code == 0 and told == [(0.0, "reading the model"), *steps, (1.0, "writing"), "saved"]
