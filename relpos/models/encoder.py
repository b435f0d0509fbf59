"""The encoder family: BERT (post-LN blocks, token types, the masked-word head) with any encoding in place of its table.

With stock BERT weights and the `learned` encoding it gives BERT's logits (`from_bert`). Attention sees both directions;
an encoding without a bidirectional form is an error. There is no pooler and no next-sentence head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from relpos.errors import UserError
from relpos.models.base import RelPosPreTrainedModel, check_range, checked_labels, embedded
from relpos.models.config import RelPosConfig, RelPosEncoderConfig
from relpos.models.convert import Copy, source_model, with_overrides
from relpos.models.layers import MLP, Attention, activation
from relpos.models.loss import chunked_loss, plain_loss
from relpos.models.positions import Encodings, Plan, layout_of


class EncoderBlock(GradientCheckpointingLayer):
    def __init__(self, config: RelPosConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, plan: Plan, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        out, weights = self.attention(hidden, plan, need_weights=need_weights)
        hidden = self.attention_norm(hidden + self.dropout(out))
        return self.mlp_norm(hidden + self.dropout(self.mlp(hidden))), weights


class RelPosBERT(RelPosPreTrainedModel):
    config_class = RelPosEncoderConfig
    config: RelPosEncoderConfig
    _no_split_modules = ["EncoderBlock"]


class RelPosEncoder(RelPosBERT):
    """The encoder without its head."""

    def __init__(self, config: RelPosConfig):
        config = RelPosEncoderConfig.of(config)
        config.settle()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.encodings = Encodings(config, causal=False)
        self.embed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple:
        """`attention_mask` [B, T] marks real tokens; `cu_seqlens` are the borders of documents packed into one row."""
        hidden = embedded(self, input_ids, inputs_embeds)
        layout = layout_of(
            hidden, causal=False, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens
        )
        plans = self.encodings.plans(layout, self._dtype_of_scores())
        if token_type_ids is not None:
            if tuple(token_type_ids.shape) != tuple(hidden.shape[:2]):
                shapes = f"{list(hidden.shape[:2])}, not {list(token_type_ids.shape)}"
                raise UserError(f"token_type_ids must be [batch, tokens] = {shapes}")
            check_range("token type", token_type_ids, self.config.type_vocab_size, "the token types")
        types = self.embed_types.weight[0] if token_type_ids is None else self.embed_types(token_type_ids)
        hidden = self.dropout(self.embed_norm(self.encodings.embed(hidden + types, layout)))
        trace = self._trace(output_hidden_states, output_attentions)
        trace.add(hidden)
        for block, plan in zip(self.layers, plans, strict=True):
            hidden, weights = block(hidden, plan, need_weights=trace.attentions is not None)
            trace.add(hidden, weights)
        output = BaseModelOutput(last_hidden_state=hidden, **trace.results())
        return output if self._as_dict(return_dict) else output.to_tuple()


class RelPosForMaskedLM(RelPosBERT):
    """The encoder with BERT's head for masked words."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RelPosConfig):
        config = RelPosEncoderConfig.of(config)
        config.settle()
        super().__init__(config)
        self.model = RelPosEncoder(config)
        self.head_dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.head_act = activation(config.hidden_act)
        self.head_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple:
        """Logits [B, T, V], and the loss with `labels` [B, T], -100 for tokens that do not count. The loss and
        `skip_logits` are as in `RelPosForCausalLM.forward`, without the shift."""
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = self.head_norm(self.head_act(self.head_dense(outputs.last_hidden_state)))
        labels = checked_labels(labels, hidden, self.config.vocab_size)
        loss = logits = None
        if labels is not None and self._skips_logits(skip_logits) and type(self.lm_head) is nn.Linear:
            loss = chunked_loss(hidden, self.lm_head.weight, self.lm_head.bias, labels, num_items_in_batch)
        else:
            logits = self.lm_head(hidden)
            if labels is not None:
                loss = plain_loss(logits, labels, num_items_in_batch)
        output = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
        return output if self._as_dict(return_dict) else output.to_tuple()

    @classmethod
    def from_bert(
        cls, source: str | Path | PreTrainedModel, encoding: str | list[str] | None = None, **overrides: Any
    ) -> RelPosForMaskedLM:
        """A model with the weights of a BERT: a `BertForMaskedLM` or `BertForPreTraining`, or a folder or name to load
        one from. `encoding`, `new_weights` and `unused_weights` as in `RelPosForCausalLM.from_gpt2`."""
        bert = source_model(source, "bert", "AutoModelForMaskedLM")
        theirs, state = bert.config, bert.state_dict()
        if theirs.is_decoder or theirs.add_cross_attention:
            raise UserError("a BERT used as a decoder or with cross-attention has no counterpart here")
        if "cls.predictions.bias" not in state:
            raise UserError(f"{type(bert).__name__} has no head for masked words: give a BertForMaskedLM")
        settings: dict[str, Any] = dict(
            vocab_size=theirs.vocab_size,
            hidden_size=theirs.hidden_size,
            num_hidden_layers=theirs.num_hidden_layers,
            num_attention_heads=theirs.num_attention_heads,
            intermediate_size=theirs.intermediate_size,
            hidden_act=theirs.hidden_act,
            layer_norm_eps=theirs.layer_norm_eps,
            initializer_range=theirs.initializer_range,
            type_vocab_size=theirs.type_vocab_size,
            tie_word_embeddings=theirs.tie_word_embeddings,
            train_length=theirs.max_position_embeddings,
            pad_token_id=theirs.pad_token_id,
        )
        encoding = f"learned:max_positions={theirs.max_position_embeddings}" if encoding is None else encoding
        settings = with_overrides(settings, RelPosEncoderConfig.by_field(overrides))
        model = cls(RelPosEncoderConfig(encoding=encoding, **settings))
        copy = Copy(model, state)

        def both(new: str, *old: str) -> None:
            for part in ("weight", "bias"):
                copy(f"{new}.{part}", *(f"{name}.{part}" for name in old))

        copy("model.embed_tokens.weight", "bert.embeddings.word_embeddings.weight")
        copy("model.embed_types.weight", "bert.embeddings.token_type_embeddings.weight")
        copy.positions("bert.embeddings.position_embeddings.weight")
        both("model.embed_norm", "bert.embeddings.LayerNorm")
        for i in range(theirs.num_hidden_layers):
            ours, old = f"model.layers.{i}", f"bert.encoder.layer.{i}"
            both(f"{ours}.attention.qkv", *(f"{old}.attention.self.{part}" for part in ("query", "key", "value")))
            both(f"{ours}.attention.out", f"{old}.attention.output.dense")
            both(f"{ours}.attention_norm", f"{old}.attention.output.LayerNorm")
            both(f"{ours}.mlp.inner", f"{old}.intermediate.dense")
            both(f"{ours}.mlp.out", f"{old}.output.dense")
            both(f"{ours}.mlp_norm", f"{old}.output.LayerNorm")
        both("head_dense", "cls.predictions.transform.dense")
        both("head_norm", "cls.predictions.transform.LayerNorm")
        copy("lm_head.weight", "cls.predictions.decoder.weight")
        # The decoder's own is what BERT adds; where the output is tied to the embedding, both are one.
        own, other = "cls.predictions.decoder.bias", "cls.predictions.bias"
        copy("lm_head.bias", own if own in state else other)
        copy.left -= {own, other}
        return copy.done()


__all__ = ["RelPosEncoder", "RelPosForMaskedLM"]
