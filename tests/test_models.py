"""Every encoding inside both model families: decoding, padding, packing, precision, compilation."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor
from transformers import DynamicCache

from relpos import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM, UserError
from relpos.models.cache import RelPosCacheLayer, adopt
from relpos.terms import Layout

V, T = 61, 23
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec)
BOTH_WAYS = pytest.mark.parametrize("case", [c for c in CASES if c.bidirectional], ids=lambda case: case.spec)
# One of each name and kind: where every option would cost seconds.
OPTIONS = ("form=", "scaling=", "version=")
KINDS = {"".join([c.name, *(o for o in c.spec.split(",") if any(x in o for x in OPTIONS))]): c for c in CASES[::-1]}


def shaken(model: Any, by: float = 0.1) -> Any:
    """Move every parameter away from its initial value, where many formulas are zero or equal."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.3 if "encodings" in name else by) * torch.randn_like(parameter))
    return model.eval()


def gpt(spec: str | list[str], heads: int = 4, layers: int = 2, **settings: Any) -> RelPosForCausalLM:
    torch.manual_seed(0)
    config = RelPosConfig(vocab_size=V, hidden_size=8 * heads, heads=heads, layers=layers, encoding=spec, **settings)
    return shaken(RelPosForCausalLM(config))


def bert(spec: str) -> RelPosForMaskedLM:
    torch.manual_seed(0)
    return shaken(RelPosForMaskedLM(RelPosConfig(vocab_size=V, hidden_size=96, heads=12, layers=2, encoding=spec)))


def tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def begun(model: RelPosForCausalLM, first_length: int) -> DynamicCache:
    """An empty cache that believes its first call had so many tokens."""
    cache = adopt(DynamicCache(), model.config.num_hidden_layers)
    cache.layers[0].first_length = first_length
    return cache


def decode(
    model: RelPosForCausalLM,
    ids: Tensor,
    sizes: list[int],
    cache: DynamicCache | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits of all tokens, fed in chunks of the given sizes."""
    cache = DynamicCache() if cache is None else cache
    out, start = [], 0
    for size in sizes:
        stop = start + size
        part = None if mask is None else mask[:, :stop]
        out.append(model(ids[:, start:stop], attention_mask=part, past_key_values=cache).logits)
        start = stop
    assert start == ids.shape[1] and cache.get_seq_length() == start
    return torch.cat(out, 1)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@EACH
@torch.no_grad()
def test_a_prompt_in_pieces_keeps_its_mask(case: Case) -> None:
    """What is padding is not all told by the first piece."""
    model, ids = gpt(case.spec), tokens(1, 12)
    mask = torch.ones_like(ids)
    mask[0, 7:9] = 0
    asked = dict(attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    whole, pieces = (
        model.generate(ids, **asked, output_logits=True, prefill_chunk_size=size).logits for size in (None, 4)
    )
    if not case.by_length:
        close(torch.stack(pieces), torch.stack(whole))


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    model, ids = gpt("learned:max_positions=10"), tokens(1, 8)
    last = []
    for refused in (False, True):
        cache = DynamicCache()
        model(ids[:, :4], past_key_values=cache, position_ids=torch.arange(4)[None])
        if refused:
            with pytest.raises(UserError, match="needs 11"):
                model(ids[:, 4:], past_key_values=cache, position_ids=torch.arange(7, 11)[None])
        last.append(model(ids[:, 4:6], past_key_values=cache, position_ids=torch.arange(4, 6)[None]).logits)
    close(*last)


@torch.no_grad()
def test_padding_takes_no_places_of_a_table() -> None:
    model, ids = gpt("learned:max_positions=10"), tokens(1, 16)
    mask = torch.ones_like(ids)
    mask[:, :6] = 0
    close(model(ids, attention_mask=mask).logits[:, 6:], model(ids[:, 6:]).logits)
    mask[:, 5] = 1
    with pytest.raises(UserError, match="needs 11"):
        model(ids, attention_mask=mask)


@EACH
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass(case: Case) -> None:
    model, ids = gpt(case.spec, heads=12), tokens(2, T)
    chunks = [7, 1, 9, 1, 5]
    # Scalings that depend on the length take it from the first call: here 7 tokens, whatever the later calls are.
    full = model(ids, past_key_values=begun(model, 7)).logits
    close(decode(model, ids, chunks), full)
    close(decode(model, ids, [1] * T, begun(model, 7)), full)
    if not case.by_length:
        close(model(ids, use_cache=False).logits, full)
        close(decode(model, ids, [1] * T), full)
    else:
        assert not torch.allclose(model(ids).logits, full, atol=1e-3), "the length should matter"


@EACH
@torch.no_grad()
def test_a_left_padded_row_equals_the_unpadded_one(case: Case) -> None:
    model, ids = gpt(case.spec), tokens(2, T)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, :6] = 0
    out = model(ids, attention_mask=mask).logits
    close(out[1:, 6:], model(ids[1:, 6:]).logits)
    close(out[:1], model(ids[:1]).logits)
    assert torch.isfinite(out).all()
    if not case.by_length:  # the cache begins with 8 tokens of which row 1 has 2
        close(decode(model, ids, [8, 1, 1, 6, 7], mask=mask)[mask.bool()], out[mask.bool()])


@EACH
@torch.no_grad()
def test_packed_documents_equal_separate_ones(case: Case) -> None:
    model, ids = gpt(case.spec), tokens(1, T)
    borders = torch.tensor([0, 5, 6, 17, T])
    packed = model(ids, cu_seqlens=borders, labels=ids)
    losses = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist()):
        alone = model(ids[:, start:stop], labels=ids[:, start:stop])
        close(packed.logits[:, start:stop], alone.logits)
        losses.append(alone.loss * (stop - start - 1))
    close(packed.loss, sum(losses) / (T - 4))


@EACH
def test_the_gradient_reaches_every_parameter_of_the_encoding(case: Case) -> None:
    model, ids = gpt(case.spec).train(), tokens(2, T)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.model.encodings.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@EACH
@torch.no_grad()
def test_saving_and_loading_changes_no_bit(case: Case, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = gpt(case.spec), tokens(2, T)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is RelPosForCausalLM and loaded.config.encoding == case.spec
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    # A copy: weights mapped from the file lie unaligned in memory, and a matmul may round by that.
    assert torch.equal(copy.deepcopy(loaded)(ids).logits, model(ids).logits)


@BOTH_WAYS
@torch.no_grad()
def test_the_encoder_sees_both_directions_and_no_padding(case: Case) -> None:
    model, ids = bert(case.spec), tokens(2, T)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 15:] = 0
    out = model(ids, attention_mask=mask).logits
    close(out[:1, 3:], model(ids[:1, 3:]).logits)
    close(out[1:, :15], model(ids[1:, :15]).logits)
    changed = ids.clone()
    changed[1, 14] = (ids[1, 14] + 1) % V
    assert not torch.allclose(model(changed, attention_mask=mask).logits[1, 0], out[1, 0], atol=1e-6)


def tensors(thing: Any) -> list[Tensor]:
    """All tensors in a nest of dataclasses and lists."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, (list, tuple)):
        return [x for item in thing for x in tensors(item)]
    if is_dataclass(thing):
        return [x for field in fields(thing) for x in tensors(getattr(thing, field.name))]
    return []


@EACH
@torch.no_grad()
def test_position_stays_float32_in_a_bfloat16_model(case: Case) -> None:
    model, ids = gpt(case.spec).bfloat16(), tokens(2, T)
    layout = Layout(Tq=T, Tk=T, device=ids.device)
    hidden = torch.randn(2, T, 32).bfloat16()
    for plan in model.model.encodings.plans(layout, torch.bfloat16):
        for x in tensors(plan.for_layer(hidden, None)):
            assert x.dtype == torch.float32 or not x.is_floating_point()
    cache = DynamicCache()
    out = model(ids, past_key_values=cache).logits
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    stateful = model.encoding_of(0).stateful
    for layer in cache.layers:
        assert layer.keys.dtype == torch.bfloat16
        assert (layer.state.dtype == torch.float32) if stateful else (layer.state is None)


@torch.no_grad()
def test_a_running_sum_does_not_stall_in_bfloat16() -> None:
    """Steps of 0.7 added up in bfloat16 stop at 256; so would positions."""
    model = gpt("cable:form=softplus", layers=1).bfloat16()
    cache = DynamicCache()
    for start in range(0, 600, 200):
        model(tokens(1, 200, seed=start), past_key_values=cache)
    steps = cache.layers[0].state.diff(dim=-1)
    assert steps.min() > 0 and steps.max() < 8 and cache.layers[0].state.max() > 400
    assert len(steps.unique()) > 500


@pytest.mark.parametrize("case", [c for c in CASES if not c.content], ids=lambda case: case.spec)
@torch.no_grad()
def test_autocast_leaves_positions_alone(case: Case) -> None:
    encodings = gpt(case.spec).model.encodings
    layout = Layout(Tq=T, Tk=T, device=torch.device("cpu"))
    plain = encodings.plans(layout, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = encodings.plans(layout, torch.float32)
    for a, b in zip(plain, auto, strict=True):
        for x, y in zip(tensors([a.rotation, a.terms]), tensors([b.rotation, b.terms]), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("case", KINDS.values(), ids=lambda case: case.spec)
def test_it_compiles_without_a_break(case: Case) -> None:
    torch._dynamo.reset()
    model, ids = gpt(case.spec, layers=1).train(), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, attention_mask=mask, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name], 1e-5)


def test_it_compiles_with_checkpointing_autocast_and_packing() -> None:
    torch._dynamo.reset()
    model, ids = gpt("cable", layers=1).train(), tokens(1, 20)
    model.gradient_checkpointing_enable()
    borders = torch.tensor([0, 5, 20, 20], dtype=torch.int32)  # as the data loader gives them: padded at the end
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (model, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(ids, labels=ids, cu_seqlens=borders).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-5)


def test_one_compiled_graph_serves_all_lengths() -> None:
    torch._dynamo.reset()
    model = gpt("alibi", layers=1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (9, 12, 16):
        ids = tokens(2, length)
        close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_it_compiles_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config, "compile_threads", 1)
    torch._dynamo.reset()
    model, ids = gpt("cable", layers=1), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


# Generation.


@pytest.mark.parametrize("case", [c for c in KINDS.values() if not c.by_length], ids=lambda case: case.spec)
def test_beam_search_with_the_cache_equals_it_without(case: Case) -> None:
    model, ids = gpt(case.spec), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    asked = dict(attention_mask=mask, num_beams=3, max_new_tokens=6, do_sample=False)
    out = model.generate(ids, **asked)
    assert torch.equal(out, model.generate(ids, use_cache=False, **asked))
    alone = model.generate(ids[1:, 3:], **{**asked, "attention_mask": None})
    assert torch.equal(out[1:, 3:], alone)


@pytest.mark.parametrize("spec", ["cable", "rope", "learned"])
def test_greedy_and_sampled_generation(spec: str) -> None:
    model, ids = gpt(spec, heads=12), tokens(2, 5)
    with torch.no_grad():
        expected = ids
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        sampled.append(model.generate(ids, max_new_tokens=8, do_sample=True, use_cache=use_cache))
    assert torch.equal(*sampled)
    several = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert several.shape == (6, 9)
    counted = model.generate(ids, max_new_tokens=8, do_sample=False, position_ids=torch.arange(5).expand(2, -1))
    assert torch.equal(counted, expected)


@torch.no_grad()
def test_explicit_positions_are_kept_with_the_cache() -> None:
    model, ids = gpt("kerple"), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 7, 8, 9, 30, 31, 32], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    full = model(ids, position_ids=positions).logits
    assert not torch.allclose(full[0], model(ids).logits[0], atol=1e-4)
    close(full[1], model(ids).logits[1])  # only differences matter
    cache = DynamicCache()
    parts = []
    for part in (slice(0, 4), slice(4, 7)):
        parts.append(model(ids[:, part], position_ids=positions[:, part], past_key_values=cache).logits)
    parts.append(model(ids[:, 7:], past_key_values=cache).logits)  # goes on counting
    close(torch.cat(parts, 1), full)


@pytest.mark.parametrize("spec", ["cable", "rope"])
@torch.no_grad()
def test_everything_in_the_cache_moves_together(spec: str) -> None:
    model, ids = gpt(spec), tokens(3, 12)

    def go_on(cache: DynamicCache, rows: list[int], start: int = 8) -> None:
        out = model(ids[rows, start:], past_key_values=cache).logits
        close(out, model(ids[rows]).logits[:, start:])

    def filled() -> DynamicCache:
        cache = DynamicCache()
        positions = torch.arange(8).expand(3, -1)
        model(ids[:, :8], position_ids=positions, past_key_values=cache)
        return cache

    cache = filled()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    go_on(cache, [2, 0, 0])
    cache = filled()
    cache.batch_repeat_interleave(2)
    go_on(cache, [0, 0, 1, 1, 2, 2])
    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    go_on(cache, [1])
    cache = filled()
    cache.crop(-3)
    go_on(cache, [0, 1, 2], start=5)
    cache = filled()
    cache.reset()
    assert cache.get_seq_length() == 0
    go_on(cache, [0, 1, 2], start=0)
    assert all(isinstance(layer, RelPosCacheLayer) for layer in cache.layers)


# The pieces of a model.


def test_encodings_are_shared_where_they_say_so() -> None:
    def names(spec: str | list[str], layers: int = 3) -> tuple[int, list[int]]:
        encodings = gpt(spec, layers=layers).model.encodings
        return len(encodings), encodings.of_layer

    assert names("kerple") == (1, [0, 0, 0])
    assert names("kerple:share=false") == (3, [0, 1, 2])
    assert names("cable") == (3, [0, 1, 2])
    assert names("cable:share=true") == (1, [0, 0, 0])
    assert names("alibi") == (1, [0, 0, 0])  # nothing to train
    assert names("learned") == (1, [0, 0, 0])  # there is one input
    assert names(["kerple", "cable", "kerple"]) == (2, [0, 1, 0])


def test_terms_of_position_alone_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt("kerple", layers=4)
    kind = type(model.model.encodings[0])
    built = []
    original = kind.terms
    monkeypatch.setattr(kind, "terms", lambda self, ctx: built.append(1) or original(self, ctx))
    model(tokens(2, 9))
    assert len(built) == 1


@torch.no_grad()
def test_grouped_query_heads() -> None:
    model, ids = gpt("cable", heads=4, num_key_value_heads=2), tokens(2, T)
    assert model.model.layers[0].attention.qkv.out_features == 8 * (4 + 2 + 2)
    cache = DynamicCache()
    full = model(ids, past_key_values=cache).logits
    assert cache.layers[0].keys.shape[1] == 2
    close(decode(model, ids, [5, 1, 17]), full)


@torch.no_grad()
def test_attentions_and_hidden_states() -> None:
    model, ids = gpt("cable"), tokens(2, T)
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2 and out.attentions[0].shape == (2, 4, T, T)
    close(out.attentions[1].sum(-1), torch.ones(2, 4, T))
    assert out.attentions[0].triu(1).abs().max() == 0
    assert len(out.hidden_states) == 3
    close(model.lm_head(out.hidden_states[-1]), out.logits)
    model.set_impl("blockwise")
    close(model(ids).logits, out.logits)
    with pytest.raises(UserError, match="reference"):
        model(ids, output_attentions=True)
    model.set_impl("reference")
    close(model(ids, output_attentions=True).attentions[0], out.attentions[0])
    encoder = bert("alibi")
    out = encoder(ids, output_attentions=True, output_hidden_states=True, return_dict=False)
    assert len(out) == 3 and len(out[1]) == 3 and out[2][0].shape == (2, 12, T, T)


@pytest.mark.parametrize("spec", ["kerple", "fire", "cable", "dape:version=2,base=cable", "learned"])
def test_gradient_checkpointing_gives_the_same_gradients(spec: str) -> None:
    model, ids = gpt(spec).train(), tokens(2, T)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name], 1e-6)


@pytest.mark.parametrize("spec", ["alibi", "cable", "rope", "dape"])
def test_bfloat16_autocast_trains(spec: str) -> None:
    model, ids = gpt(spec).train(), tokens(2, T)
    plain = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = model(ids, labels=ids).loss
    auto.backward()
    assert auto.dtype == torch.float32 and abs(auto - plain) < 0.05
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())
