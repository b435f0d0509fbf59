"""What every model here is: initial values, loading and its mistakes, settings, and what a call may ask to see."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init

from relpos.encodings import Encoding
from relpos.errors import UserError
from relpos.files import settings_of
from relpos.models.cache import adopt
from relpos.models.config import RelPosConfig, check_impl
from relpos.models.convert import missing_folder
from relpos.models.layers import MLP, Attention
from relpos.models.loss import IGNORE
from relpos.terms import whole


def embedded(model: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Token embeddings [B, T, hidden_size], looked up or given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("pass input_ids or inputs_embeds, one of them")
    what = "input_ids" if inputs_embeds is None else "inputs_embeds"
    given = input_ids if inputs_embeds is None else inputs_embeds
    if not isinstance(given, Tensor):
        raise UserError(f"{what} must be a tensor, not {type(given).__name__}")
    if whole(given) != (inputs_embeds is None):
        raise UserError(f"{what} must be {'tokens' if inputs_embeds is None else 'vectors'}, not {given.dtype}")
    given = given if inputs_embeds is None else given[..., 0]
    if given.dim() != 2 or given.shape[1] == 0:
        raise UserError(f"the input must be [batch, tokens] with at least one token; it is {list(given.shape)}")
    if input_ids is not None:
        hint = ": is the text from another tokenizer?"
        check_range("token", input_ids, model.config.vocab_size, "the vocabulary", hint)
        input_ids = input_ids.int() if input_ids.dtype not in (torch.int32, torch.int64) else input_ids
    hidden = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    if hidden.shape[-1] != model.config.hidden_size:
        raise UserError(f"inputs_embeds have {hidden.shape[-1]} features and the model {model.config.hidden_size}")
    return hidden


def check_range(what: str, given: Tensor, size: int, table: str, hint: str = "") -> None:
    # On a CPU a look at the values is cheap, and better than "index out of range in self".
    if given.device.type != "cpu" or given.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(x) for x in given.aminmax())
    if low < 0 or high >= size:
        raise UserError(f"{what} {low if low < 0 else high} is outside {table} of {size}{hint}")


def checked_labels(labels: Tensor | None, hidden: Tensor, size: int) -> Tensor | None:
    """Labels as int64, of the shape of the tokens, IGNORE or inside the vocabulary."""
    if labels is None:
        return None
    if tuple(labels.shape) != tuple(hidden.shape[:2]):
        raise UserError(f"labels must be [batch, tokens] = {list(hidden.shape[:2])}, not {list(labels.shape)}")
    if not whole(labels):
        raise UserError(f"labels must be whole numbers, those of tokens, not {labels.dtype}")
    labels = labels.long()
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        hint = f"; {IGNORE} marks those that do not count"
        check_range("label", labels[labels != IGNORE], size, "the vocabulary", hint)
    return labels


@dataclass
class Trace:
    """The layers' outputs that a caller asked to see."""

    hidden_states: list[Tensor] | None
    attentions: list[Tensor] | None

    @classmethod
    def of(cls, hidden_states: bool, attentions: bool) -> Trace:
        return cls([] if hidden_states else None, [] if attentions else None)

    def add(self, hidden: Tensor | None = None, weights: Tensor | None = None) -> None:
        if self.hidden_states is not None and hidden is not None:
            self.hidden_states.append(hidden)
        if self.attentions is not None and weights is not None:
            self.attentions.append(weights)

    def results(self) -> dict[str, tuple[Tensor, ...] | None]:
        return {
            "hidden_states": None if self.hidden_states is None else tuple(self.hidden_states),
            "attentions": None if self.attentions is None else tuple(self.attentions),
        }


class RelPosPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and settings of every model here."""

    config_class = RelPosConfig
    config: RelPosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    accepts_loss_kwargs = True  # tells the Trainer to hand over num_items_in_batch
    new_weights: list[str] = []  # names of weights that were not in what the model was made from
    unused_weights: list[str] = []  # names of weights there that this model has no place for

    # Initial values.

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Encoding):
            # An encoding may write values without transformers' guard, so what a checkpoint gave is put back.
            loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            module.reset_parameters()
            for parameter, value in loaded:
                parameter.copy_(value)
            return
        super()._init_weights(module)
        if isinstance(module, (Attention, MLP)) and self.scaled_residuals:
            # GPT-2: the residual stream adds up two outputs per layer.
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.out.weight, std=std)

    scaled_residuals = False

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside transformers the parent takes a module without direct parameters as initialised, and would
        # so never call the reset_parameters of an encoding made of linear layers.
        super()._initialize_weights(module, is_custom_code=False)

    # Loading.

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`; what is wrong with a checkpoint is one clear message. Only safetensors are
        read. With another `encoding=` than the checkpoint's, the encodings are drawn anew (`model.new_weights`) and the
        saved ones left behind (`model.unused_weights`); any other weight that the checkpoint lacks is an error."""
        kwargs.setdefault("use_safetensors", True)
        saved = _check_folder(cls, path, kwargs.get("subfolder") or "").get("encoding")
        wanted = kwargs.pop("encoding", None)
        config = kwargs.get("config")
        if wanted is None and isinstance(config, RelPosConfig):
            wanted = config.encoding  # the Auto classes have already put it there
        if saved is not None and wanted not in (None, saved):
            if isinstance(config, RelPosConfig):
                kwargs["config"] = copy.deepcopy(config)
                kwargs["config"].encoding = saved
            model = cls.from_pretrained(path, *args, **kwargs).with_encoding(wanted)
            info = {"missing_keys": set(model.new_weights), "unexpected_keys": set(model.unused_weights)}
            return (model, {**info, "mismatched_keys": set(), "error_msgs": []}) if output_loading_info else model
        try:
            model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        except UserError:
            raise
        except SafetensorError as error:
            raise UserError(
                f"a weight file in {str(path)!r} is corrupt ({error}): it was cut off or overwritten. Copy or save it "
                "again"
            ) from None
        except (OSError, RuntimeError, KeyError, json.JSONDecodeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if "ignore_mismatched_sizes" in reason:
                reason = "its weights have other shapes than its config.json says (listed above)"
            here = "" if Path(path).exists() else ", and there is no folder of that name"
            raise UserError(f"the checkpoint {str(path)!r} cannot be loaded: {reason}{here}") from error
        lost = sorted(info["missing_keys"])
        if lost:
            raise UserError(
                f"the checkpoint {str(path)!r} lacks {len(lost)} weights that its config.json asks for, such as "
                f"{lost[0]!r}: it is incomplete, or its config.json was edited"
            )
        model.unused_weights = sorted(info["unexpected_keys"])
        return (model, info) if output_loading_info else model

    def with_encoding(self, encoding: str | list[str]) -> Any:
        """A copy of this model with other encodings, freshly drawn: everything else is kept. `new_weights` names what
        is new and `unused_weights` what was left behind."""
        config = copy.deepcopy(self.config)
        config.encoding = encoding
        model = type(self)(config).to(device=self.device, dtype=self.dtype).train(self.training)
        old = re.compile(r"(model\.)?encodings\.")
        kept = {name: value for name, value in self.state_dict().items() if not old.match(name)}
        model.new_weights = sorted(model.load_state_dict(kept, strict=False).missing_keys)
        model.unused_weights = sorted(set(self.state_dict()) - set(kept))
        model.generation_config = copy.deepcopy(getattr(self, "generation_config", None))
        return model

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise UserError(
                "use_reentrant=True cannot carry gradients to what the layers share; leave it out or set it to False"
            )
        kwargs["gradient_checkpointing_kwargs"] = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        super().gradient_checkpointing_enable(**kwargs)

    # Settings.

    def set_impl(self, impl: str) -> None:
        """Say how attention is computed: `auto`, `reference`, `blockwise` or `fused`."""
        self.config.impl = check_impl(impl)

    def encoding_of(self, layer: int) -> Encoding:
        """The encoding of a layer; negative numbers count from the last."""
        encodings = self.base_model.encodings
        return encodings[encodings.of_layer[layer]]

    def _dtype_of_scores(self) -> torch.dtype:
        """What q and k will be computed in."""
        weight = self.base_model.layers[0].attention.qkv.weight
        kind = weight.device.type
        auto = kind != "meta" and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if auto else weight.dtype

    def _trace(self, hidden_states: bool | None, attentions: bool | None) -> Trace:
        """With the config's choice where the call made none."""
        return Trace.of(
            self.config.output_hidden_states if hidden_states is None else hidden_states,
            self.config.output_attentions if attentions is None else attentions,
        )

    def _as_dict(self, return_dict: bool | None) -> bool:
        return self.config.return_dict if return_dict is None else return_dict

    def _skips_logits(self, skip: bool | None) -> bool:
        """Whether a call with labels computes the loss alone: as asked, as configured, or in training only."""
        skip = self.config.skip_logits if skip is None else skip
        return self.training if skip is None else skip

    def _cache(self, cache: Cache | None) -> Cache | None:
        return None if cache is None else adopt(cache, self.config.num_hidden_layers)


def _check_folder(cls: type[PreTrainedModel], path: Any, subfolder: str) -> dict[str, Any]:
    """The config of a local folder, {} for a name on the hub. Finds the common mistakes before transformers does, which
    looks for a missing folder on the hub."""
    if not isinstance(path, (str, Path)):
        return {}
    folder = Path(path) / subfolder
    if not folder.exists():
        if missing_folder(path) or Path(path).exists():
            raise UserError(f"there is no checkpoint folder {str(folder)!r}")
        return {}
    if folder.is_file():
        raise UserError(f"{str(folder)!r} is a file; give the folder that holds it and config.json")
    settings = settings_of(folder)
    kind = settings.get("model_type")
    if kind != cls.config_class.model_type:
        raise UserError(
            f"{str(path)!r} holds a model of type {kind!r}, and {cls.__name__} loads {cls.config_class.model_type!r}; "
            "AutoModelForCausalLM and AutoModelForMaskedLM pick the class by the type, and from_gpt2 and from_bert "
            "take those models' weights"
        )
    if not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise UserError(f"{str(path)!r} has no .safetensors file with weights; it holds {found}")
    return settings


__all__ = ["RelPosPreTrainedModel", "Trace", "embedded"]
