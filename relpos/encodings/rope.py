"""RoPE: q_i and k_j turned by `i w_t` and `j w_t` in pairs of features, `w_t = base^(-2t/D)` (https://arxiv.org/abs/2104.09864).

Layouts: `half` pairs features (t, t + D/2), as GPT-NeoX and Hugging Face's Llama; `interleaved` pairs (2t, 2t + 1), as
RoFormer, Meta's Llama and GPT-J. `sign=-1` turns the other way (nanochat, GRAPE): the same scores from other weights.
`partial` turns the first part of the features only, with frequencies over that part.

Scalings for texts longer than the training length L = `original_max_position_embeddings`, by Hugging Face's names:
- `linear` (position interpolation): `w / factor`;
- `dynamic` (NTK): the base grows by `(factor n / L - factor + 1)^(D/(D-2))` once n, the length, passes L;
- `yarn` (https://arxiv.org/abs/2309.00071): pairs that turn more than `beta_fast` times within L keep `w`, pairs below
  `beta_slow` take `w / factor`, a ramp between; cosines and sines times `0.1 ln(factor) + 1`;
- `llama3`: the same idea on wavelengths, between L / `high_freq_factor` and L / `low_freq_factor`;
- `longrope` (https://arxiv.org/abs/2402.13753): `w_t / short_factor[t]` up to L, `long_factor` beyond, and cosines and
  sines times `sqrt(1 + ln(factor) / ln(L))`.

`dynamic` and `longrope` take n from the call that begins a cache and keep it, so cached keys stay right; Hugging Face
recomputes as the text grows and leaves the cached keys behind. n counts real tokens, per row and per packed document,
so a padded or packed text gets the numbers it gets alone. Frequencies are never stored: a buffer would be rounded by
`.bfloat16()`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from relpos.encodings.base import Encoding, constant
from relpos.terms import Context, Layout, Rotation

# Which options a scaling reads; `factor` is required wherever it is read, except by longrope with an attention_factor.
READS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}


class RoPE(Encoding):
    title = "RoPE"
    formula = "q_i . R((i - j) w) k_j, w_t = base^(-2t/D)"
    paper = "https://arxiv.org/abs/2104.09864"
    additive = False

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        hidden_size: int,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        partial: float = 1.0,
        sign: Literal[1, -1] = 1,
        scaling: Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"] = "none",
        factor: float | None = None,
        original_max_position_embeddings: int = 1024,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        short_factor: tuple[float, ...] | None = None,
        long_factor: tuple[float, ...] | None = None,
        share: bool = False,
    ):
        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)
        self.base, self.layout, self.partial, self.sign, self.scaling = base, layout, partial, sign, scaling
        self.factor, self.original = factor or 1.0, original_max_position_embeddings
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        self.mscale, self.mscale_all_dim, self.given_attention_factor = mscale, mscale_all_dim, attention_factor
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        self.short_factor, self.long_factor = short_factor or (), long_factor or ()
        self.dim = int(head_dim * partial)  # turned features
        if scaling != "none":
            self.formula += f", scaled as {scaling} does"

        self.require(base > 1, f"base must be above 1, not {base}")
        self.require(0 < partial <= 1, f"partial is a fraction above 0 and at most 1, not {partial}")
        self.require(
            self.dim >= 2 and self.dim % 2 == 0,
            f"it turns pairs of features, so head_dim * partial must be even and above 0, not {head_dim} * {partial}",
        )
        # A factor that nothing reads would leave plain RoPE under another name.
        given = {
            "factor": factor is not None,
            "original_max_position_embeddings": original_max_position_embeddings != 1024,
            "beta_fast": beta_fast != 32,
            "beta_slow": beta_slow != 1,
            "mscale": mscale is not None,
            "mscale_all_dim": mscale_all_dim is not None,
            "attention_factor": attention_factor is not None,
            "truncate": not truncate,
            "low_freq_factor": low_freq_factor != 1,
            "high_freq_factor": high_freq_factor != 4,
            "short_factor": short_factor is not None,
            "long_factor": long_factor is not None,
        }
        for key in [key for key, is_given in given.items() if is_given]:
            users = [name for name, reads in READS.items() if key in reads]
            self.require(
                key in READS[scaling], f"{key} means nothing with scaling={scaling}; it is read by {', '.join(users)}"
            )
        if scaling == "longrope":
            for key, values in (("short_factor", short_factor), ("long_factor", long_factor)):
                self.require(
                    values is not None and len(values) == self.dim // 2 and min(values) > 0,
                    f"scaling=longrope needs {key}, {self.dim // 2} positive numbers with ; between them",
                )
            self.require(
                factor is not None or attention_factor is not None, "scaling=longrope needs factor or attention_factor"
            )
        elif scaling != "none":
            self.require(factor is not None, f"scaling={scaling} needs factor: rope:scaling={scaling},factor=8")
        self.require(factor is None or factor >= 1, f"factor must be at least 1, not {factor}")
        self.require(
            attention_factor is None or attention_factor > 0,
            f"attention_factor must be above 0, not {attention_factor}",
        )
        self.require(self.original >= 2, f"original_max_position_embeddings must be at least 2, not {self.original}")
        self.require(
            beta_fast >= beta_slow > 0,
            f"beta_fast={beta_fast} must be at least beta_slow={beta_slow}, and that above 0",
        )
        self.require(
            high_freq_factor > low_freq_factor > 0,
            f"high_freq_factor={high_freq_factor} must be above low_freq_factor={low_freq_factor}, and that above 0",
        )
        self.require(scaling != "dynamic" or self.dim > 2, "scaling=dynamic needs more than two turned features")

    def plain(self) -> list[float]:
        return [self.base ** (-2 * t / self.dim) for t in range(self.dim // 2)]

    def yarn(self) -> list[float]:
        def turns_at(turns: float) -> float:
            """The pair, as a real number, that turns so often within the training length."""
            return self.dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = turns_at(self.beta_fast), turns_at(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The cap is dim - 1 although pairs end at dim / 2 - 1, as in the authors' code and Hugging Face.
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = [min(max((t - low) / (high - low), 0), 1) for t in range(self.dim // 2)]
        return [w / self.factor * r + w * (1 - r) for w, r in zip(self.plain(), ramp, strict=True)]

    def llama3(self) -> list[float]:
        out = []
        for w in self.plain():
            turns = self.original * w / (2 * math.pi)  # within the training length
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = min(max(keep, 0), 1)
            out.append(w * ((1 - keep) / self.factor + keep))
        return out

    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by; the scores get its square."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.factor <= 1:
            return 1.0
        if self.scaling == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

        def temper(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1

        if self.mscale and self.mscale_all_dim:
            return temper(self.mscale) / temper(self.mscale_all_dim)
        return temper(1)

    def lengths(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Length of each key's text when its cache began, [1 or B, 1 or Tk, 1]."""
        n = layout.length
        if layout.positions is not None:
            found = layout.positions[:, :n].amax(-1, keepdim=True) + 1
        elif layout.cu_seqlens is not None:
            documents = layout.documents()
            assert documents is not None
            found = layout.cu_seqlens.diff()[documents - 1]
        elif layout.key_padding_mask is not None:
            found = layout.key_padding_mask[:, :n].sum(-1, keepdim=True)
        else:
            found = torch.full((1, 1), n, device=layout.device)
        return found[..., None].to(dtype)

    def frequencies(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """[1 or B, 1 or Tk, R]."""

        def tensor(values: list[float]) -> Tensor:
            return constant(values, dtype, layout.device)[None, None]

        plain = self.plain()
        if self.scaling == "linear":
            return tensor([w / self.factor for w in plain])
        if self.scaling == "yarn":
            return tensor(self.yarn())
        if self.scaling == "llama3":
            return tensor(self.llama3())
        if self.scaling == "dynamic":
            n = self.lengths(layout, dtype).clamp(min=self.original)
            growth = self.factor * n / self.original - (self.factor - 1)
            # base'^(-2t/D) with base' = base * growth^(D/(D-2))
            return tensor(plain) * growth ** tensor([-2 * t / (self.dim - 2) for t in range(self.dim // 2)])
        if self.scaling == "longrope":
            short = tensor([w / f for w, f in zip(plain, self.short_factor, strict=True)])
            long = tensor([w / f for w, f in zip(plain, self.long_factor, strict=True)])
            return torch.where(self.lengths(layout, dtype) > self.original, long, short)
        return tensor(plain)

    def rotate(self, ctx: Context) -> Rotation:
        layout = ctx.layout
        angles = layout.k_positions()[..., None].to(ctx.dtype) * self.frequencies(layout, ctx.dtype)
        factor = self.attention_factor()
        cos, sin = angles.cos() * factor, angles.sin() * (factor * self.sign)
        # [B, Tk, R] -> the rows of the queries
        q_cos, q_sin = (layout.at_queries(x.transpose(1, 2)).transpose(1, 2) for x in (cos, sin))
        return Rotation(q_cos, q_sin, cos, sin, interleaved=self.layout == "interleaved")

    @classmethod
    def spec_of(cls, settings: dict[str, Any]) -> str:
        """The spec for Hugging Face's settings: `rope_parameters` (v5), or `rope_scaling` and `rope_theta` (v4)."""
        names = {"rope_theta": "base", "rope_type": "scaling", "type": "scaling", "partial_rotary_factor": "partial"}
        words: dict[Any, str] = {"default": "none", True: "true", False: "false"}
        options: dict[str, str] = {}
        for key, value in settings.items():
            if value is None:
                continue
            if isinstance(value, (list, tuple)):
                text = ";".join(map(repr, value))
            else:
                text = words[value] if isinstance(value, (bool, str)) and value in words else str(value)
            options[names.get(key, key)] = text
        return "rope:" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "rope"
