"""The decoder family: GPT-2 (pre-LN blocks, GELU, output tied to the embedding) with any encoding in place of `wpe`.

With stock GPT-2 weights and the `learned` encoding it gives GPT-2's logits (`from_gpt2`). Dropout is 0 by default and
there is none inside attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from relpos.errors import UserError
from relpos.models.base import RelPosPreTrainedModel, checked_labels, embedded
from relpos.models.compiled import plain
from relpos.models.config import RelPosConfig
from relpos.models.convert import Copy, source_model, with_overrides
from relpos.models.layers import MLP, Attention
from relpos.models.loss import chunked_loss, plain_loss, shifted, token_losses
from relpos.models.norm import Owing, add_norm, owing
from relpos.models.positions import Encodings, Plan, layout_of

TOKENS = 1024  # whose logits `token_losses` holds at once where the head is no plain one


class GPTBlock(GradientCheckpointingLayer):
    def __init__(self, config: RelPosConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Tensor,
        plan: Plan,
        past_key_values: Cache | None = None,
        need_weights: bool = False,
        more: Owing | None = None,
        apart: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Owing, Tensor | None]:
        """The residual stream and attention's weights. If `apart`, what the feed-forward layer adds to the stream comes
        by itself, before the weights: the next block takes it as `more`, and adds it with its first norm."""
        drops = self.training and self.dropout.p > 0
        parts = plain(self.attention, Attention) and plain(self.mlp, MLP) and plain(self.dropout, nn.Dropout)
        owes = torch.compiler.is_compiling() and parts and not drops
        hidden, normed = add_norm(hidden, more, self.attention_norm)
        if owes:
            merged, weights = self.attention.heads(normed, plan, past_key_values, need_weights)
            more = owing(self.attention.out, merged)
        else:
            out, weights = self.attention(normed, plan, past_key_values, need_weights)
            more = Owing(self.dropout(out))
        hidden, normed = add_norm(hidden, more, self.mlp_norm)
        if owes:
            more = owing(self.mlp.out, self.mlp.features(normed))
        else:
            more = Owing(self.dropout(self.mlp(normed)))
        return (hidden, more, weights) if apart else (hidden + more.paid(), weights)


class RelPosGPT(RelPosPreTrainedModel):
    scaled_residuals = True
    _no_split_modules = ["GPTBlock"]


class RelPosModel(RelPosGPT):
    """The decoder without its output layer."""

    def __init__(self, config: RelPosConfig):
        config.settle()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encodings = Encodings(config, causal=True)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(GPTBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        """`attention_mask` [B, past + T] marks real tokens, and positions count them; `position_ids` [B, T] override
        that; `cu_seqlens` are the borders of documents packed into one row."""
        hidden = embedded(self, input_ids, inputs_embeds)
        if use_cache is None:
            wanted = self.config.use_cache and not self.training and cu_seqlens is None
            use_cache = wanted or past_key_values is not None
        if use_cache and self.gradient_checkpointing and self.training:
            raise UserError("gradient checkpointing runs a layer twice and would fill the cache twice: use_cache=False")
        cache = self._cache((DynamicCache() if past_key_values is None else past_key_values) if use_cache else None)
        if past_key_values is not None and not use_cache:
            raise UserError("past_key_values are given but use_cache is False")
        layout = layout_of(
            hidden,
            causal=True,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
        )
        plans = self.encodings.plans(layout, self._dtype_of_scores())
        hidden = self.dropout(self.encodings.embed(hidden, layout))
        trace = self._trace(output_hidden_states, output_attentions)
        trace.add(hidden)
        # Who looks at a block finds the whole stream behind it, and checkpointing keeps one tensor of each.
        watched = trace.hidden_states is not None or not all(plain(block, GPTBlock) for block in self.layers)
        apart = torch.compiler.is_compiling() and not watched and not (self.gradient_checkpointing and self.training)
        more = None
        for number, (block, plan) in enumerate(zip(self.layers, plans, strict=True), 1):
            last = number == len(self.layers)
            sums = {"more": more, "apart": not last} if apart else {}
            need = trace.attentions is not None
            hidden, *rest, weights = block(hidden, plan, past_key_values=cache, need_weights=need, **sums)
            more = rest[0] if rest else None
            trace.add(None if last else hidden, weights)
        hidden = self.norm(hidden)
        trace.add(hidden)
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, **trace.results())
        return output if self._as_dict(return_dict) else output.to_tuple()


class RelPosForCausalLM(RelPosGPT, GenerationMixin):
    """The decoder with its output layer: trains, generates, loads and saves as any model of transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosConfig):
        config.settle()
        super().__init__(config)
        self.model = RelPosModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T, V], and the loss with `labels` [B, T] (shifted here; -100 does not count, nor does the step
        from one packed document to the next).

        The loss is float32, the mean over the tokens that count, or their sum divided by `num_items_in_batch`. With
        labels, `skip_logits=True` leaves the logits out (`logits=None`) and never holds them; False returns them; None,
        the default, asks `config.skip_logits` and, if that is None too, skips them in training mode only.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        targets = None
        labels = checked_labels(labels, hidden, self.config.vocab_size)
        if labels is not None:
            documents = None
            if cu_seqlens is not None:
                documents = layout_of(hidden, causal=True, cu_seqlens=cu_seqlens).documents()
            targets = shifted(labels, documents)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss = logits = None
        # A head that is no plain Linear (an adapter, a quantised one) computes more than its weight says.
        if targets is not None and self._skips_logits(skip_logits) and type(self.lm_head) is nn.Linear:
            loss = chunked_loss(hidden, self.lm_head.weight, self.lm_head.bias, targets, num_items_in_batch)
        elif targets is not None:
            logits = self.lm_head(hidden)
            loss = plain_loss(logits, targets, num_items_in_batch)
            logits = logits[:, kept]
        else:
            logits = self.lm_head(hidden[:, kept])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if self._as_dict(return_dict) else output.to_tuple()

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Loss of every token given those before it, float32 [B, T - 1], without ever holding all logits."""
        hidden = self.model(input_ids, use_cache=False, **inputs).last_hidden_state[:, :-1]
        targets = input_ids[:, 1:]
        if type(self.lm_head) is nn.Linear:
            return token_losses(hidden, self.lm_head.weight, self.lm_head.bias, targets)
        pairs = zip(hidden.split(TOKENS, 1), targets.long().split(TOKENS, 1), strict=True)
        logits = ((self.lm_head(h).float().transpose(1, 2), t) for h, t in pairs)
        return torch.cat([F.cross_entropy(x, t, reduction="none") for x, t in logits], 1)

    # Generation.

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: we count positions from the mask ourselves. Positions that a user gives to `generate` are used."""
        return None

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        # generate makes a mask of ones where nobody gave one. Outside the compiled forward we may look, once a text or
        # piece of it: what is generated, one token after the other, is no padding.
        mask, cache = inputs.get("attention_mask"), inputs.get("past_key_values")
        if mask is not None:
            new = next(x for x in (inputs.get("inputs_embeds"), inputs.get("input_ids")) if x is not None)
            look = is_first_iteration or new.shape[1] > 1 or not hasattr(cache, "unpadded")
            unpadded = bool(mask.all()) if look else cache.unpadded
            if cache is not None:
                cache.unpadded = unpadded
            inputs["attention_mask"] = None if unpadded else mask
        return inputs

    # GPT-2's weights.

    @classmethod
    def from_gpt2(
        cls, source: str | Path | PreTrainedModel, encoding: str | list[str] | None = None, **overrides: Any
    ) -> RelPosForCausalLM:
        """A model with the weights of a GPT-2: a `GPT2LMHeadModel`, or a folder or name to load one from.

        With no `encoding` its positions are kept and its logits reproduced. With another encoding everything else is
        kept; `model.new_weights` names what is freshly drawn and `model.unused_weights` what was left behind.
        """
        gpt2 = source_model(source, "gpt2", "AutoModelForCausalLM")
        theirs = gpt2.config
        if not {"transformer.wte.weight", "lm_head.weight"} <= set(gpt2.state_dict()):
            raise UserError(f"{type(gpt2).__name__} has no head for words: give a GPT2LMHeadModel")
        if theirs.scale_attn_by_inverse_layer_idx or theirs.add_cross_attention:
            raise UserError("a GPT-2 with scale_attn_by_inverse_layer_idx or cross-attention has no counterpart here")
        settings: dict[str, Any] = dict(
            vocab_size=theirs.vocab_size,
            hidden_size=theirs.n_embd,
            num_hidden_layers=theirs.n_layer,
            num_attention_heads=theirs.n_head,
            intermediate_size=theirs.n_inner,
            hidden_act=theirs.activation_function,
            layer_norm_eps=theirs.layer_norm_epsilon,
            initializer_range=theirs.initializer_range,
            scale=None if theirs.scale_attn_weights else 1.0,
            tie_word_embeddings=theirs.tie_word_embeddings,
            train_length=theirs.n_positions,
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
        )
        encoding = f"learned:max_positions={theirs.n_positions}" if encoding is None else encoding
        settings = with_overrides(settings, RelPosConfig.by_field(overrides))
        model = cls(RelPosConfig(encoding=encoding, **settings))
        copy = Copy(model, gpt2.state_dict())
        copy("model.embed_tokens.weight", "transformer.wte.weight")
        copy.positions("transformer.wpe.weight")
        for i in range(theirs.n_layer):
            ours, old = f"model.layers.{i}", f"transformer.h.{i}"
            for new_name, old_name in (
                ("attention_norm", "ln_1"),
                ("mlp_norm", "ln_2"),
                ("attention.qkv", "attn.c_attn"),
                ("attention.out", "attn.c_proj"),
                ("mlp.inner", "mlp.c_fc"),
                ("mlp.out", "mlp.c_proj"),
            ):
                # GPT-2's Conv1D keeps its matrices as [in, out].
                copy(f"{ours}.{new_name}.weight", f"{old}.{old_name}.weight", transpose="norm" not in new_name)
                copy(f"{ours}.{new_name}.bias", f"{old}.{old_name}.bias")
        copy("model.norm.weight", "transformer.ln_f.weight")
        copy("model.norm.bias", "transformer.ln_f.bias")
        copy("lm_head.weight", "lm_head.weight")
        return copy.done()


__all__ = ["RelPosForCausalLM", "RelPosModel"]
