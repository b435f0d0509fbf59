"""Models of transformers that are not ours: where their attention is, and what position does in it.

q and k are taken where the model has finished with them (projected, normalised, rotated), at the asked layers only;
everything runs through torch's fused attention as usual. Two ways in:

- models on transformers' attention interface hand q, k, the scaling and any position bias to an attention function:
  ours notes them down and passes them on (T5, GPT-2, Llama, Qwen, Mistral, BERT, Inkling);
- BLOOM, MPT and Falcon compute attention inside their module: a hook on it projects q and k a second time.

The bias comes from the model's own tensors and is stored as one of our terms, never as a formula of its own:

| family  | term      | remarks                                                                                       |
|---------|-----------|-----------------------------------------------------------------------------------------------|
| T5      | Distance  | first row and column of its position bias; layers count through the encoder, then the decoder |
| BLOOM   | Slope     | the model adds `m j`; `-m (i - j)` differs by a constant in each row, which softmax drops     |
| MPT     | Slope     | the same                                                                                      |
| Falcon  | Potential | with ALiBi: slopes and products rounded to bfloat16, then divided by sqrt(D), as Falcon does; |
|         |           | once, as in its default path (its eager path in transformers 5.17 adds the bias twice)        |
| Inkling | Bank      | its factor that grows with ln n is part of r                                                  |
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.capture.record import Layer
from relpos.errors import UserError
from relpos.terms import Bank, Distance, Potential, Slope, Term

IMPLEMENTATION = "relpos_capture"

Sink = Callable[[nn.Module, Tensor, Tensor, float, dict[str, Any]], None]
_sink: ContextVar[Sink | None] = ContextVar("relpos_capture", default=None)


@dataclass(frozen=True)
class Family:
    title: str
    modules: Callable[[Any], list[nn.Module]]  # the attention of every layer
    terms: Callable[[nn.Module, dict[str, Any], int], list[Term]] | None = None  # of a layer, from its call
    project: Callable[[nn.Module, tuple, dict[str, Any]], tuple[Tensor, Tensor, float]] | None = (
        None  # off the interface
    )
    limit: Callable[[Any], int] | None = None  # the longest text it can read, from its config
    positional: bool = False  # the bias does not depend on the text


def _no_terms(module: nn.Module, call: dict[str, Any], length: int) -> list[Term]:
    return []


# T5.


def _t5_modules(model: Any) -> list[nn.Module]:
    stacks = [getattr(model, name) for name in ("encoder", "decoder") if getattr(model, name, None) is not None]
    return [block.layer[0].SelfAttention for stack in stacks for block in stack.block]


def _t5_terms(module: nn.Module, call: dict[str, Any], length: int) -> list[Term]:
    bias = call["position_bias"][0].float()  # [H, T, T], and it depends on i - j alone
    past, future = bias[:, :, 0], bias[:, 0, :]  # d = 0 .. T-1 and d = 0 .. -(T-1)
    return [Distance(torch.cat([future.flip(-1)[:, :-1], past], -1), length - 1)]


# ALiBi.


def _bloom_project(module: Any, args: tuple, call: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    q, k, _ = module._reshape(module.query_key_value(args[0]))
    return q, k, module.inv_norm_factor


def _bloom_terms(module: Any, call: dict[str, Any], length: int) -> list[Term]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # The bias at position 1, in float32: the model's own is in its dtype.
    return [Slope(build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)[:, 0, 1])]


def _mpt_project(module: Any, args: tuple, call: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    mixed = module.Wqkv(args[0])
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, _ = (x.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    return q, k, module.softmax_scale


def _mpt_terms(module: Any, call: dict[str, Any], length: int) -> list[Term]:
    bias = call["position_bias"]  # [H, 1, max_seq_len]; the last column is distance 0
    if bias.shape[-1] < 2:
        return [Slope(torch.zeros(bias.shape[0]))]
    return [Slope(-bias[:, 0, -2].float())]


def _falcon_project(module: Any, args: tuple, call: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    q, k, _ = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(args[0])))
    if call.get("alibi") is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        q, k = apply_rotary_pos_emb(q, k, *call["position_embeddings"])
    return q, k, module.inv_norm_factor


def _falcon_terms(module: Any, call: dict[str, Any], length: int) -> list[Term]:
    alibi = call.get("alibi")
    if alibi is None:
        return []
    potential = (alibi.float() * module.inv_norm_factor).view(1, module.num_heads, -1)
    return [Potential(potential, potential)]


# Inkling.


def _inkling_modules(model: Any) -> list[nn.Module]:
    return [layer.self_attn for layer in getattr(model, "language_model", model).layers]


def _inkling_terms(module: Any, call: dict[str, Any], length: int) -> list[Term]:
    r = module.r_proj(call["hidden_states"]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2).float()  # [1,H,T,R]
    floor = module.config.log_scaling_n_floor
    if not module.is_sliding and floor is not None:
        n = torch.arange(1, length + 1, device=r.device).float()
        r = r * (1 + module.config.log_scaling_alpha * torch.log((n / floor).clamp(min=1)))[:, None]
    return [Bank(r, module.rel_logits_proj.proj.float())]


def _layers(path: str) -> Callable[[Any], list[nn.Module]]:
    """Modules at `stack.*.rest` of a model."""
    stack, _, rest = path.partition(".*.")

    def modules(model: Any) -> list[nn.Module]:
        return [layer.get_submodule(rest) for layer in model.get_submodule(stack)]

    return modules


_T5 = Family("T5", _t5_modules, _t5_terms, positional=True)
_LLAMA_LIKE = _layers("layers.*.self_attn")
_BERT_LIKE = _layers("encoder.layer.*.attention.self")
FAMILIES: dict[str, Family] = {
    "t5": _T5,
    "mt5": Family("mT5", _t5_modules, _t5_terms, positional=True),
    "umt5": Family("UMT5", _t5_modules, _t5_terms, positional=True),
    "bloom": Family("BLOOM", _layers("h.*.self_attention"), _bloom_terms, _bloom_project, positional=True),
    "mpt": Family(
        "MPT", _layers("blocks.*.attn"), _mpt_terms, _mpt_project, limit=lambda c: c.max_seq_len, positional=True
    ),
    "falcon": Family("Falcon", _layers("h.*.self_attention"), _falcon_terms, _falcon_project),
    "gpt2": Family("GPT-2", _layers("h.*.attn"), limit=lambda c: c.n_positions),
    "llama": Family("Llama", _LLAMA_LIKE),
    "mistral": Family("Mistral", _LLAMA_LIKE),
    "qwen2": Family("Qwen2", _LLAMA_LIKE),
    "qwen3": Family("Qwen3", _LLAMA_LIKE),
    "bert": Family("BERT", _BERT_LIKE, limit=lambda c: c.max_position_embeddings),
    "electra": Family("ELECTRA", _BERT_LIKE, limit=lambda c: c.max_position_embeddings),
    # RoBERTa's positions begin behind its padding index.
    "roberta": Family("RoBERTa", _BERT_LIKE, limit=lambda c: c.max_position_embeddings - c.pad_token_id - 1),
    "inkling_text": Family("Inkling", _inkling_modules, _inkling_terms),
    "inkling_mm_model": Family("Inkling", _inkling_modules, _inkling_terms),
}


def family_of(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise UserError(
            f"models of type {model_type!r} are not supported. Supported: relpos' own models and {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


# Recording.


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function for transformers that notes what it is given and lets torch's run."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sink = _sink.get()
    if sink is not None:
        scaling = call.get("scaling")
        sink(module, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling, call)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **call)


@contextlib.contextmanager
def _through_interface(model: Any, sink: Sink) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    # sdpa's own leaves a causal mask out and relies on the module to say so, which not every model does (UMT5).
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    # Encoder and decoder of one model may each have a copy of the configuration.
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "model_type")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    token = _sink.set(sink)
    try:
        for config in configs.values():
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        _sink.reset(token)
        for key, config in configs.items():
            config._attn_implementation = before[key]


def record(model: Any, tokens: Tensor, wanted: list[int]) -> dict[int, Layer]:
    """Run the model on tokens [T] and keep what the wanted layers saw of position."""
    family = family_of(model.config.model_type)
    modules = family.modules(model)
    numbers = {modules[number]: number for number in wanted}
    length = len(tokens)
    layers: dict[int, Layer] = {}
    inputs: dict[nn.Module, dict[str, Any]] = {}

    def sink(module: nn.Module, q: Tensor, k: Tensor, scale: float, call: dict[str, Any]) -> None:
        if module not in numbers or q.shape[2] != k.shape[2] or q.shape[2] != length:
            return
        terms = (family.terms or _no_terms)(module, {**call, **inputs.get(module, {})}, length)
        causal = bool(getattr(module, "is_decoder", False) or getattr(module, "is_causal", True))
        window = call.get("sliding_window")
        window = window if window is not None and window < length else None
        layers[numbers[module]] = Layer(terms, q[0].float(), k[0].float(), float(scale), window, causal)

    def note(module: nn.Module, args: tuple, call: dict[str, Any]) -> None:
        hidden = args[0] if args else call["hidden_states"]
        if family.project is None:
            inputs[module] = {"hidden_states": hidden}
        else:
            sink(module, *family.project(module, (hidden,), call), call)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in numbers]
    device = next(model.parameters()).device
    ids = tokens.to(device=device, dtype=torch.long)[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    else:
        given["use_cache"] = False
    way = contextlib.nullcontext() if family.project else _through_interface(model, sink)
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), way:
            model(**given)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {number: to_cpu(layers[number]) for number in wanted}


def to_cpu(layer: Layer) -> Layer:
    def moved(term: Term) -> Term:
        fields = {f.name: getattr(term, f.name) for f in dataclasses.fields(term)}
        tensors: Any = {key: value.cpu() for key, value in fields.items() if isinstance(value, Tensor)}
        return dataclasses.replace(term, **tensors)

    return dataclasses.replace(
        layer,
        terms=[moved(term) for term in layer.terms],
        q=None if layer.q is None else layer.q.cpu(),
        k=None if layer.k is None else layer.k.cpu(),
    )
