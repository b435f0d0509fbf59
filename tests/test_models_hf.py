"""The models among the tools of Hugging Face: configs, stock weights, loading, the Trainer, and users' mistakes."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from relpos import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM, UserError, encodings
from relpos.models import SIZES, RelPosEncoder, RelPosEncoderConfig, RelPosModel

V = 61


def config(spec: Any = "alibi", **settings: Any) -> RelPosConfig:
    return RelPosConfig(**{**dict(vocab_size=V, hidden_size=48, heads=12, layers=2, encoding=spec), **settings})


def gpt(spec: Any = "alibi", **settings: Any) -> RelPosForCausalLM:
    torch.manual_seed(0)
    return RelPosForCausalLM(config(spec, **settings)).eval()


def shake(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


IDS = torch.randint(0, V, (2, 33), generator=torch.Generator().manual_seed(2))


# The config.


def test_sizes() -> None:
    counts = {
        "nano": (4, 12, 32),
        "tiny": (6, 8, 64),
        "small": (12, 12, 64),
        "medium": (24, 16, 64),
        "large": (36, 20, 64),
    }
    assert set(SIZES) == set(counts)
    assert RelPosConfig.preset("nano", layers=2, heads=6).layer_encodings() == ["alibi"] * 2
    for size, expected in counts.items():
        c = RelPosConfig.preset(size, encoding="cable")
        assert (c.layers, c.heads, c.head_dim) == expected
        assert c.train_length == (512 if size == "nano" else 1024)
        assert c.vocab_size % 64 == 0 and (c.vocab_size == 50304 or size == "nano")
    with torch.device("meta"):
        small = RelPosForCausalLM(RelPosConfig.preset("small", encoding="learned"))
    assert sum(p.numel() for p in small.parameters()) == 124_475_904  # GPT-2's 124,439,808 and 47 more words


def test_a_config_survives_saving(tmp_path: Path) -> None:
    c = config(["t5", "cable"], impl="blockwise", train_length=99, num_key_value_heads=4)
    c.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "impl" not in saved and saved["model_type"] == "relpos"
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is RelPosConfig and loaded.impl == "auto"
    assert loaded.encoding == ["t5", "cable"] and loaded.train_length == 99 and loaded.kv_heads == 4
    assert loaded.layers == loaded.num_hidden_layers == 2
    assert AutoConfig.from_pretrained(tmp_path, impl="reference").impl == "reference"


def test_a_length_cap_exists_only_with_a_table() -> None:
    for case in CASES:
        c = config(case.spec, hidden_size=96, train_length=512)
        assert hasattr(c, "max_position_embeddings") == (case.embed is not None and bool(case.parameters)), case.spec
        assert not hasattr(c, "n_positions")
    c = config("learned:max_positions=77")
    assert c.max_position_embeddings == 77
    c.encoding = "rope"
    c.settle()
    assert not hasattr(c, "max_position_embeddings")


@torch.no_grad()
def test_rope_settings_in_both_spellings() -> None:
    """Against the frequencies that transformers computes from the same settings."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    v5 = config("rope", hidden_size=96, rope_parameters={**scaling, "rope_theta": 500.0})
    old = {"type": "yarn", **{key: value for key, value in scaling.items() if key != "rope_type"}}
    v4 = config("rope", hidden_size=96, rope_scaling=old, rope_theta=500.0)
    for c in (v4, v5):
        llama = LlamaConfig(hidden_size=96, num_attention_heads=12, rope_parameters={**scaling, "rope_theta": 500.0})
        theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](llama, "cpu")
        ours = c.build(c.encoding)
        torch.testing.assert_close(torch.tensor(ours.yarn()), theirs)
        assert ours.attention_factor() == pytest.approx(factor)
        assert not hasattr(c, "rope_scaling") and not hasattr(c, "rope_parameters")
    lists = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    mixed = config(["rope", "alibi"], rope_parameters=lists)
    assert mixed.build(mixed.encoding[0]).long_factor == (2.0, 3.0) and mixed.encoding[1] == "alibi"
    assert config("rope", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}).build("rope").base == 10000
    with pytest.raises(UserError, match="no layer has encoding='rope'"):
        config("alibi", rope_theta=500.0)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_settings_that_are_no_dict(name: str) -> None:
    for wrong in ("yarn", ["yarn"], 8, True, "", [("factor", 8.0)]):
        with pytest.raises(UserError) as caught:
            config("rope", **{name: wrong})
        said = str(caught.value)
        assert said.startswith(f"{name} must be a dict such as ") and f"not {wrong!r};" in said
    given, named = {"rope_type": "yarn", "factor": 8.0}, "rope:scaling=yarn,factor=8"  # what the message suggests
    assert str(given) in said and named in said
    made, same = config("rope", **{name: given}), config(named)
    assert made.build(made.encoding).yarn() == same.build(same.encoding).yarn()
    assert config("rope", **{name: None}).encoding == config("rope", **{name: {}}).encoding == "rope"


def test_an_encoding_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steep.py"
    file.write_text(
        "from relpos.encodings.base import DistanceEncoding\n"
        "class Steep(DistanceEncoding):\n"
        "    def __init__(self, *, heads, head_dim, hidden_size, by: float = 1.0, share: bool = False):\n"
        "        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)\n"
        "        self.by = by\n"
        "    def by_distance(self, d):\n"
        "        return -self.by * d.abs().expand(self.heads, *d.shape)\n"
    )
    with pytest.raises(UserError, match="never imports code"):
        RelPosConfig(encoding=f"{file}:by=2")
    known = dict(encodings._registered)
    monkeypatch.setattr(encodings, "_registered", known)
    c = RelPosConfig.preset("nano", encoding=f"{file}:by=2")
    assert c.encoding == "steep:by=2.0" or c.encoding == "steep:by=2"
    RelPosForCausalLM(c)(IDS)
    assert (
        RelPosConfig.preset("nano", encoding=f"dape:version=2,base={file}:by=2").encoding
        == "dape:version=2,base=steep:by=2"
    )


# Stock weights.


def stock_gpt2(**settings: Any) -> GPT2LMHeadModel:
    sizes = dict(vocab_size=V, n_embd=48, n_layer=2, n_head=12, n_positions=40, bos_token_id=0, eos_token_id=0)
    return shake(GPT2LMHeadModel(GPT2Config(**{**sizes, **settings})))


def stock_bert(**settings: Any) -> BertForMaskedLM:
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=12, intermediate_size=96)
    return shake(BertForMaskedLM(BertConfig(vocab_size=V, max_position_embeddings=40, **sizes, **settings)))


@pytest.mark.parametrize("settings", [{}, {"scale_attn_weights": False}, {"n_inner": 80, "tie_word_embeddings": False}])
@torch.no_grad()
def test_from_gpt2_gives_its_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    gpt2 = stock_gpt2(**settings)
    model = RelPosForCausalLM.from_gpt2(gpt2)
    torch.testing.assert_close(model(IDS).logits, gpt2(IDS).logits, rtol=1e-4, atol=1e-5)
    assert model.new_weights == [] and model.unused_weights == []
    assert model.config.max_position_embeddings == 40
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs = gpt2(IDS, attention_mask=mask, position_ids=positions).logits
    ours = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-5)
    asked = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(IDS, **asked), gpt2.generate(IDS, **asked))
    gpt2.save_pretrained(tmp_path)
    torch.testing.assert_close(RelPosForCausalLM.from_gpt2(tmp_path)(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_from_bert_gives_its_logits(tmp_path: Path) -> None:
    stock = stock_bert()
    model = RelPosForMaskedLM.from_bert(stock)
    mask = torch.ones_like(IDS)
    mask[1, 20:] = 0
    given = dict(input_ids=IDS, attention_mask=mask, token_type_ids=(IDS > 30).long())
    torch.testing.assert_close(
        model(**given).logits[mask.bool()], stock(**given).logits[mask.bool()], rtol=1e-4, atol=1e-5
    )
    assert model.new_weights == [] and model.unused_weights == []
    labels = IDS.masked_fill(IDS % 3 > 0, -100)
    torch.testing.assert_close(model(IDS, labels=labels).loss, stock(IDS, labels=labels).loss)
    stock.save_pretrained(tmp_path)
    torch.testing.assert_close(RelPosForMaskedLM.from_bert(tmp_path)(**given).logits, model(**given).logits)
    untied = stock_bert(tie_word_embeddings=False)  # its output has a bias of its own
    model = RelPosForMaskedLM.from_bert(untied)
    torch.testing.assert_close(model(IDS).logits, untied(IDS).logits, rtol=1e-4, atol=1e-5)
    assert model.new_weights == [] and model.unused_weights == []


def test_labels_of_any_integer_dtype_and_texts_of_one_token() -> None:
    model = gpt().eval()
    for dtype in (torch.int32, torch.int16):
        assert model(IDS, labels=IDS.to(dtype)).loss == model(IDS, labels=IDS).loss
    assert model.token_losses(IDS[:, :1]).shape == (2, 0)
    for dtype in (torch.uint8, torch.int16):
        assert torch.equal(model(IDS.to(dtype)).logits, model(IDS).logits)


@torch.no_grad()
def test_token_losses_of_a_head_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base, self.more, self.weight, self.bias = base, nn.Linear(48, V), base.weight, base.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.more(x)

    monkeypatch.setattr("relpos.models.gpt.TOKENS", 7)
    model = shake(gpt())
    model.lm_head = Adapted(model.lm_head)
    expected = nn.functional.cross_entropy(model(IDS).logits[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none")
    torch.testing.assert_close(model.token_losses(IDS), expected)
    assert model.token_losses(IDS[:, :1]).shape == (2, 0)


def test_another_encoding_in_place_of_the_stock_one() -> None:
    model = RelPosForCausalLM.from_gpt2(stock_gpt2(), encoding="kerple")
    assert model.new_weights == ["model.encodings.0.p", "model.encodings.0.a"]
    assert model.unused_weights == ["transformer.wpe.weight"]
    assert torch.isfinite(model(IDS.repeat(1, 3)).logits).all()  # longer than the table was
    model = RelPosForMaskedLM.from_bert(stock_bert(), encoding="rope")
    assert model.new_weights == [] and model.unused_weights == ["bert.embeddings.position_embeddings.weight"]
    with pytest.raises(UserError, match="gpt2"):
        RelPosForCausalLM.from_gpt2(stock_bert())
    with pytest.raises(UserError, match="inverse"):
        RelPosForCausalLM.from_gpt2(stock_gpt2(scale_attn_by_inverse_layer_idx=True))


# Initial values, loading and saving.


def test_gpt2_initialisation() -> None:
    torch.manual_seed(0)
    model = RelPosForCausalLM(RelPosConfig(vocab_size=500, hidden_size=192, heads=12, layers=8, encoding="alibi"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / 4 if ".out." in name else 0.02
            assert abs(parameter.std() / expected - 1) < 0.05, name
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("case", [c for c in CASES if c.parameters or c.parameters is None], ids=lambda c: c.spec)
def test_initial_values_are_the_encodings_own(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model draws what `reset_parameters` draws, and a loaded one nothing."""
    kind = encodings.get(case.name)

    def sevens(self: nn.Module) -> None:
        with torch.no_grad():  # on purpose not through torch.nn.init, which transformers guards
            for parameter in self.parameters():
                parameter.fill_(7.0)

    monkeypatch.setattr(kind, "reset_parameters", sevens)
    model = gpt(case.spec, hidden_size=96)
    drawn = dict(model.model.encodings.named_parameters())
    assert all((p == 7).all() for p in drawn.values())
    shake(model).save_pretrained(tmp_path)
    loaded = RelPosForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.model.encodings.named_parameters():
        assert torch.equal(parameter, drawn[name])


@torch.no_grad()
def test_auto_classes_pick_the_family(tmp_path: Path) -> None:
    decoder, encoder = gpt("cable"), RelPosForMaskedLM(config("cable")).eval()
    assert type(encoder.config) is RelPosEncoderConfig and encoder.config.hidden_act == "gelu"
    assert RelPosForMaskedLM(config(hidden_act="relu", impl="blockwise")).config.hidden_act == "relu"
    decoder.save_pretrained(tmp_path / "d")
    encoder.save_pretrained(tmp_path / "e")
    assert type(AutoModel.from_pretrained(tmp_path / "d")) is RelPosModel
    assert type(AutoModel.from_pretrained(tmp_path / "e")) is RelPosEncoder
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "e")
    assert type(loaded) is RelPosForMaskedLM and torch.equal(copy.deepcopy(loaded)(IDS).logits, encoder(IDS).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert type(AutoModelForCausalLM.from_config(config("fire"))) is RelPosForCausalLM
    with pytest.raises(UserError, match="relpos_encoder"):
        RelPosForCausalLM.from_pretrained(tmp_path / "e")
    assert decoder.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "d", attn_implementation="sdpa")


@torch.no_grad()
def test_shards_and_sharing_load_back(tmp_path: Path) -> None:
    model = shake(gpt(["t5", "cable", "t5"], layers=3))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(copy.deepcopy(loaded)(IDS).logits, model(IDS).logits)
    assert loaded.encoding_of(0) is loaded.encoding_of(-1) and len(loaded.model.encodings) == 2
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_checkpoint_with_another_encoding(tmp_path: Path) -> None:
    model = shake(gpt("t5:form=clipped,clip=4"))
    model.save_pretrained(tmp_path)
    # The same parameter names and shapes, and still another encoding: nothing of the old one may leak.
    for load in (AutoModelForCausalLM, RelPosForCausalLM):
        other = load.from_pretrained(tmp_path, encoding="t5:form=clipped,clip=4,scale=2")
        assert other.new_weights == other.unused_weights == ["model.encodings.0.table", "model.encodings.1.table"]
        assert other.config.encoding == "t5:form=clipped,clip=4,scale=2"
        assert other.encoding_of(0).table.std() < 0.05 < model.encoding_of(0).table.std()
        assert torch.equal(other.model.layers[1].mlp.out.weight, model.model.layers[1].mlp.out.weight)
    assert model.with_encoding("fire")(IDS).logits.shape == (2, 33, V)


@torch.no_grad()
def test_the_vocabulary_can_grow(tmp_path: Path) -> None:
    for model in (shake(gpt("cable")), shake(RelPosForMaskedLM(config("cable")))):
        before = model(IDS).logits
        model.resize_token_embeddings(70)
        assert model.config.vocab_size == 70
        after = model(IDS).logits
        torch.testing.assert_close(after[..., :V], before)
        model.save_pretrained(tmp_path)
        assert torch.equal(copy.deepcopy(type(model).from_pretrained(tmp_path))(IDS).logits, after)


def test_the_page_about_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 5
    stock_gpt2().save_pretrained(tmp_path / "my-gpt2")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/models.md", "exec"), names)


# The Trainer.


class Counting(torch.utils.data.Dataset):
    """Runs of consecutive numbers: the next token is certain."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + 3 * i) % V
        return {"input_ids": ids, "labels": ids.clone()}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **settings
    )


@pytest.mark.parametrize("kind", [RelPosForCausalLM, RelPosForMaskedLM])
def test_the_trainer_trains_it(kind: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(config("cable", hidden_size=64, heads=4))
    settings = dict(max_steps=40, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=10)
    trainer = Trainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=2, gradient_checkpointing=True, **settings),
        train_dataset=Counting(),
        eval_dataset=Counting(),
        compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1)[:, :-1] == p.label_ids[:, 1:]).mean())},
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert 3.5 < before["eval_loss"] < 4.7 and after["eval_loss"] < 0.5
    if kind is RelPosForCausalLM:
        assert after["eval_right"] > 0.9
    trainer.save_model(str(tmp_path / "out"))
    loaded = kind.from_pretrained(tmp_path / "out").eval()
    ids = Counting()[5]["input_ids"][None]
    model.eval()
    assert torch.equal(copy.deepcopy(loaded)(ids).logits, model(ids).logits)


def test_accumulated_steps_count_tokens_not_batches(tmp_path: Path) -> None:
    """With num_items_in_batch two unequal halves give the gradient of the whole; without it they would not."""
    model = gpt("alibi").train()
    whole = IDS[:, :16]
    labels = whole.clone()
    labels[0, :12] = -100
    model(whole, labels=labels).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    items = (labels[:, 1:] != -100).sum()
    for row in (0, 1):
        model(whole[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=items).loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-5, atol=1e-7)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Counting())
    assert trainer.model_accepts_loss_kwargs and trainer._loss_shifts_labels


# What users get wrong.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: config(hidden_size=100), "12 heads do not divide a width of 100; 4, 5, 10"),
        (lambda: config("alibbi"), "Did you mean 'alibi'"),
        (lambda: config("alibi:slope=1"), "Did you mean 'slopes'"),
        (lambda: config(["alibi"] * 3), "3 encodings and there are 2 layers"),
        (lambda: config(7), "not 7"),
        (lambda: config(num_key_value_heads=5), "5 key heads"),
        (lambda: config(impl="fats"), "Known: auto, reference, blockwise, fused"),
        (lambda: config(train_length=0), "train_length"),
        (lambda: config(format_version=99), "newer relpos"),
        (lambda: config(max_position_embeddings=9), "no table"),
        (lambda: config("learned", max_position_embeddings=9), "1024 rows"),
        (lambda: gpt(hidden_act="gelo"), "Did you mean 'gelu'"),
        (lambda: RelPosConfig.preset("smal"), "Did you mean 'small'"),
        (lambda: RelPosConfig.preset("nano", dropuot=0.1), "Did you mean 'dropout'"),
        (lambda: RelPosForMaskedLM(config("fox")), "causal"),
        (lambda: gpt().set_impl("quick"), "Known: auto"),
        (lambda: gpt(impl="fused")(IDS), "cannot run here"),
        (lambda: gpt("learned:max_positions=8")(IDS), "8 positions and the text needs 33"),
        (lambda: gpt("learned:max_positions=8").generate(IDS[:, :6], max_new_tokens=4), "needs 9"),
        (lambda: gpt()(IDS, attention_mask=torch.ones(2, 32)), r"\[2, 33\]"),
        (lambda: gpt()(IDS, labels=IDS[:, 1:]), r"\[2, 33\], not \[2, 32\]"),
        (lambda: gpt()(IDS, position_ids=torch.arange(9)), r"\[2, 33\]"),
        (lambda: gpt()(IDS, cu_seqlens=torch.tensor([0, 33])), "batch must be 1"),
        (lambda: gpt()(), "input_ids or inputs_embeds"),
        (lambda: gpt()(IDS[0]), r"\[batch, tokens\].*\[33\]"),
        (lambda: gpt()(IDS[:, :0]), "at least one token"),
        (lambda: gpt()(IDS + V), f"is outside the vocabulary of {V}"),
        (lambda: gpt()(IDS.tolist()), "input_ids must be a tensor, not list"),
        (lambda: gpt()(IDS.float()), "input_ids must be tokens, not torch.float32"),
        (lambda: gpt()(IDS, attention_mask=[[1] * 33] * 2), "attention_mask must be a tensor, not list"),
        (lambda: gpt()(IDS, attention_mask=torch.zeros(2, 33) - 1e9), "1 for real tokens and 0 for padding"),
        (lambda: gpt()(IDS[:1], cu_seqlens=[0, 33]), "cu_seqlens must be a tensor, not list"),
        (lambda: gpt()(IDS, attention_mask=torch.ones(2, 33, device="meta")), "attention_mask is on meta"),
        (lambda: gpt()(inputs_embeds=torch.zeros(2, 3, 40)), "40 features and the model 48"),
        (lambda: gpt().generate(IDS, cache_implementation="static", max_new_tokens=2), "DynamicCache"),
        (lambda: gpt().gradient_checkpointing_enable({"use_reentrant": True}), "use_reentrant"),
        (lambda: RelPosForCausalLM.from_pretrained("./nowhere"), "no checkpoint folder"),
        (lambda: RelPosForCausalLM.from_pretrained("tests/nowhere"), "no checkpoint folder"),
        (lambda: RelPosForCausalLM.from_gpt2("./nowhere"), "nowhere"),
        (lambda: RelPosForCausalLM.from_gpt2(None), "is wanted, not None"),
        (lambda: RelPosForCausalLM.from_gpt2(stock_gpt2().transformer), "GPT2Model has no head for words"),
        (lambda: RelPosForCausalLM.from_gpt2(stock_gpt2(), layers=1), "num_hidden_layers cannot be overridden"),
        (lambda: RelPosForCausalLM.from_gpt2(stock_gpt2(), bias=False), "bias cannot be overridden"),
        (lambda: RelPosForCausalLM.from_gpt2(stock_gpt2(), dropuot=0.1), "Did you mean 'dropout'"),
        (lambda: RelPosForMaskedLM.from_bert(stock_bert(), num_hidden_layers=1), "cannot be overridden"),
        (lambda: gpt()(IDS, labels=IDS + V), f"is outside the vocabulary of {V}; -100 marks"),
        (lambda: gpt()(IDS, labels=IDS.float()), "labels must be whole numbers"),
        (lambda: gpt("rope")(IDS, position_ids=torch.arange(33) / 2), "position_ids must be whole numbers"),
        (lambda: gpt("learned")(IDS, position_ids=torch.arange(33) - 5), "from 0 on, not -5"),
        (lambda: RelPosForMaskedLM(config())(IDS, token_type_ids=IDS + 2), "is outside the token types of 2"),
        (lambda: RelPosForMaskedLM(config())(IDS, token_type_ids=IDS[:, 1:]), r"\[2, 33\], not \[2, 32\]"),
    ],
)
def test_a_mistake_gets_one_clear_message(wrong: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        wrong()


def cut(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(5000)


def edit(**changes: Any) -> Any:
    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return act


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "corrupt"),
        (lambda f: (f / "model.safetensors").write_bytes(b"hello"), "corrupt"),
        (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file.*config.json"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text('{"a":'), "not valid JSON"),
        (lambda f: shutil.rmtree(f), "no checkpoint folder"),
        (edit(format_version=2), "newer relpos"),
        (edit(num_hidden_layers=3), "lacks 12 weights"),
        (edit(hidden_size=96), "other shapes"),
        (edit(encoding="mine"), "no encoding 'mine'"),
        (edit(encoding="./mine.py"), "never imports code"),
        (edit(model_type="gpt2"), "from_gpt2"),
    ],
)
def test_a_damaged_checkpoint_gets_one_clear_message(damage: Any, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gpt().save_pretrained(folder)
    damage(folder)
    with pytest.raises(UserError, match=says):
        RelPosForCausalLM.from_pretrained(folder)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    model = gpt()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
