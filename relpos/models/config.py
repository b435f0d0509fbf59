"""The configuration of both families, and their sizes.

The positional encoding is one string (or one per layer), `"rope:scaling=yarn,factor=8"`; the encoding knows its
options. `train_length` records what a model was trained at and caps nothing; `max_position_embeddings`, which other
tools take as a cap, exists only where an encoding holds a table that really ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from relpos.attention import IMPLEMENTATIONS
from relpos.encodings import Encoding, build, by_name, get
from relpos.errors import UserError, nearest

FORMAT_VERSION = 1  # of config.json; raised when an older relpos would misread it


@dataclass(frozen=True)
class Size:
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    vocab_size: int = 50304  # GPT-2's 50,257 padded to a multiple of 128
    train_length: int = 1024
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    pad_token_id: int | None = None


# tiny to large: the CABLE paper's table and GPT-2's. nano is for laptops: 256 bytes, then end of text (256), padding
# (257) and mask (258), in a table padded to a multiple of 64.
SIZES = {
    "nano": Size(4, 12, 384, vocab_size=320, train_length=512, bos_token_id=256, eos_token_id=256, pad_token_id=257),
    "tiny": Size(6, 8, 512),
    "small": Size(12, 12, 768),
    "medium": Size(24, 16, 1024),
    "large": Size(36, 20, 1280),
}


class RelPosConfig(PreTrainedConfig):
    """A GPT-2-like decoder (`RelPosForCausalLM`). The defaults are GPT-2 Small.

    `impl` says how attention is computed (`auto`, `reference`, `blockwise`, `fused`) and is not saved: it belongs to
    the machine, not to the weights. `skip_logits` says whether a call with labels leaves the logits out and computes
    the loss without ever holding them; None means: in training only.
    """

    model_type = "relpos"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"layers": "num_hidden_layers", "heads": "num_attention_heads"}

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None  # None: as many as query heads
    intermediate_size: int | None = None  # None: 4 * hidden_size
    encoding: str | list[str] = "alibi"
    train_length: int | None = None
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0  # after the embedding and on the residual paths; attention itself has none
    bias: bool = True
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    skip_logits: bool | None = None
    impl: str = "auto"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.format_version, int) or self.format_version > FORMAT_VERSION:
            raise UserError(
                f"this config was written by a newer relpos: its format is {self.format_version}, and this version "
                f"reads up to {FORMAT_VERSION}. Upgrade relpos to load it"
            )
        table = kwargs.pop("max_position_embeddings", None)
        rope: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):  # v5's and v4's name for the same thing
            given = kwargs.pop(key, None)
            if not isinstance(given, (dict, type(None))):
                raise UserError(
                    f"{key} must be a dict such as {{'rope_type': 'yarn', 'factor': 8.0}}, not {given!r}; "
                    "encoding='rope:scaling=yarn,factor=8' says the same"
                )
            rope |= given or {}
        rope |= {key: kwargs.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in kwargs}
        super().__post_init__(**kwargs)
        if rope:
            self._take_rope(rope)
        self.settle(table)

    def settle(self, table: int | None = None) -> None:
        """Raise UserError for sizes that do not fit together, and set what follows from the rest. A model calls it
        again: `from_pretrained(folder, encoding=...)` changes fields of a finished config."""
        self._check()
        self._take_table(table)

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a positive whole number, not {value!r}")
        for name in ("num_key_value_heads", "intermediate_size", "train_length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name} must be a positive whole number, or None, not {value!r}")
        if not isinstance(self.initializer_range, (int, float)) or not self.initializer_range >= 0:
            raise UserError(f"initializer_range must be 0 or more, not {self.initializer_range!r}")
        if self.hidden_size % self.num_attention_heads:
            fits = [h for h in range(1, self.hidden_size + 1) if self.hidden_size % h == 0]
            close = sorted(fits, key=lambda h: abs(h - self.num_attention_heads))[:3]
            raise UserError(
                f"{self.num_attention_heads} heads do not divide a width of {self.hidden_size}; "
                f"{', '.join(map(str, sorted(close)))} heads would"
            )
        if self.num_attention_heads % self.kv_heads:
            raise UserError(
                f"{self.num_attention_heads} query heads cannot share {self.kv_heads} key heads: "
                "num_key_value_heads must divide num_attention_heads"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be in [0, 1), not {self.dropout!r}")
        check_impl(self.impl)
        self.layer_encodings()

    def _take_rope(self, settings: dict[str, Any]) -> None:
        """Put Hugging Face's rope settings into the spec of every layer that has a rope without options."""
        rope = cast(Any, get("rope"))
        specs = self.layer_encodings()
        if rope.name not in specs:
            raise UserError(
                f"rope settings {settings} are given and no layer has encoding={rope.name!r} to take them; the "
                f"encoding is {self.encoding!r}"
            )
        taken = [rope.spec_of(settings) if spec == rope.name else spec for spec in specs]
        self.encoding = taken[0] if isinstance(self.encoding, str) else taken

    def _take_table(self, given: int | None) -> None:
        """Set `max_position_embeddings` where an encoding has a table, and only there."""
        with torch.device("meta"):  # to ask, not to keep
            encodings = [self.build(spec) for spec in dict.fromkeys(self.layer_encodings())]
        tables: list[int | None] = [getattr(encoding, "max_positions", None) for encoding in encodings]
        lengths = [length for length in tables if length is not None]
        self.__dict__.pop("max_position_embeddings", None)
        if lengths:
            self.max_position_embeddings = min(lengths)
        if given is not None and given != (min(lengths) if lengths else None):
            has = f"its table has {min(lengths)} rows" if lengths else "it has no table, so no length ends it"
            raise UserError(
                f"max_position_embeddings={given} does not fit encoding={self.encoding!r}: {has}. A table's length "
                "is an option of its encoding; train_length records a length without capping anything"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def inner_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def layer_encodings(self) -> list[str]:
        """The encoding of each layer."""
        if isinstance(self.encoding, str):
            return [self.encoding] * self.num_hidden_layers
        specs = list(self.encoding) if isinstance(self.encoding, (list, tuple)) else []
        if not specs or not all(isinstance(spec, str) for spec in specs):
            raise UserError(f"encoding is a string, or a list with a string for each layer, not {self.encoding!r}")
        if len(specs) != self.num_hidden_layers:
            raise UserError(
                f"encoding lists {len(specs)} encodings and there are {self.num_hidden_layers} layers: "
                "give one for each layer, or one string for all"
            )
        return specs

    def build(self, spec: str) -> Encoding:
        """An encoding of this geometry with undrawn parameters. A config may come from a checkpoint, so no file that it
        names is imported."""
        return build(
            spec,
            heads=self.num_attention_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            reset=False,
            allow_file=False,
        )

    @classmethod
    def by_field(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Settings under the names of fields. The constructor itself, as all of transformers, takes any name."""
        known = [field.name for field in fields(cls)] + list(cls.attribute_map)
        for name in given:
            if name not in known:
                raise UserError(f"a config has no field {name!r}.{nearest(name, known)}")
        return {cls.attribute_map.get(name, name): value for name, value in given.items()}

    @classmethod
    def preset(cls, size: str, encoding: str | list[str] = "alibi", **overrides: Any) -> RelPosConfig:
        """A config of size `nano`, `tiny`, `small`, `medium` or `large`. Here, in a call of your own, an encoding may
        be a file (`"./mine.py:opt=1"`): it is imported, and the config holds its name."""
        if size not in SIZES:
            raise UserError(f"there is no size {size!r}.{nearest(str(size), SIZES)}")
        overrides = cls.by_field(overrides)
        specs = [encoding] if isinstance(encoding, str) else list(encoding)
        named = [by_name(spec) for spec in specs]
        settings: dict[str, Any] = {**asdict(SIZES[size]), **overrides}
        return cls(encoding=named[0] if isinstance(encoding, str) else named, **settings)

    def to_dict(self) -> dict[str, Any]:
        saved = super().to_dict()
        saved.pop("impl", None)
        return saved


class RelPosEncoderConfig(RelPosConfig):
    """A BERT-like encoder (`RelPosForMaskedLM`)."""

    model_type = "relpos_encoder"
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 2

    @classmethod
    def of(cls, config: RelPosConfig) -> RelPosEncoderConfig:
        """The same sizes for an encoder, so that one preset serves both families."""
        if isinstance(config, cls):
            return config
        settings = config.to_dict()
        for key in ("model_type", "transformers_version", "architectures"):
            settings.pop(key, None)
        for key in ("hidden_act", "layer_norm_eps"):  # BERT's defaults are not GPT-2's
            if settings[key] == getattr(RelPosConfig, key):
                del settings[key]
        return cls(**settings, impl=config.impl)


def check_impl(impl: str) -> str:
    if impl not in IMPLEMENTATIONS:
        raise UserError(f"there is no implementation {impl!r}.{nearest(str(impl), IMPLEMENTATIONS)}")
    return impl


__all__ = ["FORMAT_VERSION", "RelPosConfig", "RelPosEncoderConfig", "SIZES", "Size", "check_impl"]
