"""Copying the weights of stock models into ours, name by name, with account of what is new and what is left over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from relpos.errors import UserError

logger = logging.getLogger(__name__)


def source_model(source: str | Path | PreTrainedModel, kind: str, auto: str) -> PreTrainedModel:
    """A transformers model of the type `kind`, given or loaded from a folder or a name on the hub."""
    if not isinstance(source, PreTrainedModel):
        if not isinstance(source, (str, Path)):
            raise UserError(f"a {kind} model, or the folder or name of one, is wanted, not {source!r}")
        if missing_folder(source):
            raise UserError(f"there is no folder {str(source)!r} to load a {kind} model from")
        try:
            source = getattr(transformers, auto).from_pretrained(source)
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"no model can be loaded from {str(source)!r}: {first}") from error
    if source.config.model_type != kind:
        raise UserError(f"this takes the weights of a {kind} model, not of a {source.config.model_type}")
    return source


def with_overrides(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model whose weights are taken over, with what a caller wants otherwise. What would leave
    weights without a place, or places without weights, cannot be changed."""
    kept = {"bias": True, **settings}
    for name in ("bias", "num_hidden_layers"):
        if overrides.get(name, kept[name]) != kept[name]:
            raise UserError(f"{name} cannot be overridden when weights are taken over: it is {kept[name]}")
    return {**settings, **overrides}


def missing_folder(path: Any) -> bool:
    """Whether a path that does not exist was meant as a folder, and not as a name on the hub."""
    text, parent = str(path), Path(path).parent
    return not Path(path).exists() and (
        isinstance(path, Path)
        or text.startswith((".", "/", "~"))
        or text.count("/") > 1
        or ("/" in text and parent.exists())
    )


class Copy:
    """Copies tensors of a state dict into a model; `done()` settles the account."""

    def __init__(self, model: Any, source: dict[str, Tensor]):
        self.model, self.source = model, source
        self.left = set(source)
        self.filled: set[str] = set()

    @torch.no_grad()
    def __call__(self, name: str, *froms: str, transpose: bool = False) -> None:
        """Fill the parameter `name` with the rows of `froms`, one below the other."""
        value = torch.cat([self.source[old] for old in froms])
        value = value.T if transpose else value
        parameter = self.model.get_parameter(name)
        if parameter.shape != value.shape:
            raise UserError(
                f"{froms[0]} is {list(value.shape)} and {name} is {list(parameter.shape)}: this size cannot be "
                "overridden when weights are taken over"
            )
        parameter.copy_(value)
        self.filled.add(name)
        self.left -= set(froms)

    def positions(self, old: str) -> None:
        """Fill the table of the encoding that has one, if any."""
        for number, encoding in enumerate(self.model.base_model.encodings):
            if getattr(encoding, "max_positions", None) is not None:
                name = self.model.base_model_prefix + f".encodings.{number}.table"
                if self.model.get_parameter(name).shape == self.source[old].shape:
                    self(name, old)

    def done(self) -> Any:
        model = self.model
        tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
        names = [name for name, _ in model.named_parameters()]
        model.new_weights = [name for name in names if name not in self.filled and name not in tied]
        model.unused_weights = sorted(self.left)
        model.tie_weights()
        if model.new_weights or model.unused_weights:
            logger.warning(
                "newly drawn: %s; left behind: %s",
                ", ".join(model.new_weights) or "nothing",
                ", ".join(model.unused_weights) or "nothing",
            )
        return model.eval()


__all__ = ["Copy", "source_model"]
