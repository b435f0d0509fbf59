"""What position says in one forward pass: where the tokens are, and what each layer's encoding makes of it.

The model owns the encodings (distinct modules and, per layer, the number of one of them), so sharing saves cleanly, and
hands each layer a `Plan`. What depends on position alone is computed once per module; what depends on the layer's input
is computed in the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils.generic import maybe_autocast

from relpos.encodings import Encoding
from relpos.errors import UserError
from relpos.models.cache import RelPosCacheLayer
from relpos.models.config import RelPosConfig
from relpos.terms import Context, Layout, Rotation, Term, check_borders, check_devices, whole


def layout_of(
    tokens: Tensor,
    *,
    causal: bool,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache: Cache | None = None,
) -> Layout:
    """The layout of the new tokens [B, T, ...] behind what the cache holds. Updates the cache's positions and its
    `first_length`. Reads no value of a tensor on a GPU."""
    B, T = tokens.shape[:2]
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
    for what, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise UserError(f"{what} must be a tensor, not {type(x).__name__}")
    check_devices("the model's input", tokens.device, **given)
    past = 0 if cache is None else cache.get_seq_length()
    Tk = past + T
    if attention_mask is not None and tuple(attention_mask.shape) != (B, Tk):
        where = f" ({past} cached and {T} new)" if past else ""
        raise UserError(
            f"attention_mask must be [batch, keys] = [{B}, {Tk}]{where}, 1 for real tokens; it is "
            f"{list(attention_mask.shape)}"
        )
    if cu_seqlens is not None:
        check_borders(cu_seqlens, T)
        if B != 1:
            raise UserError(f"cu_seqlens packs documents into one row: the batch must be 1, not {B}")
        if attention_mask is not None or position_ids is not None or cache is not None:
            raise UserError("cu_seqlens says where documents begin and end: pass no mask, positions or cache with it")
    mask = None if attention_mask is None else _real(attention_mask)
    positions = _positions(position_ids, mask, B, T, past, cache, tokens.device)
    first = None
    if cache is not None:
        head = cache.layers[0]
        if head.first_length is None:
            head.first_length = Tk
        first = head.first_length
    return Layout(
        Tq=T,
        Tk=Tk,
        device=tokens.device,
        causal=causal,
        key_padding_mask=mask,
        cu_seqlens=cu_seqlens,
        positions=positions,
        first_length=first,
    )


def _real(mask: Tensor) -> Tensor:
    """Which tokens are real. A mask that is added to scores has 0 for these, where ours has 1."""
    if mask.is_floating_point() and mask.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool(((mask != 0) & (mask != 1)).any()):
            raise UserError("attention_mask must be 1 for real tokens and 0 for padding; this one holds other numbers")
    return mask.bool()


def _positions(
    given: Tensor | None, mask: Tensor | None, B: int, T: int, past: int, cache: Cache | None, device: torch.device
) -> Tensor | None:
    """Explicit positions of all keys [1 or B, past + T]; None where positions are simply counted."""
    head = None if cache is None else cache.layers[0]
    # A call that was refused may have left more of them than there are keys.
    known = head.positions[:, :past] if past and head is not None and head.positions is not None else None
    if given is None and known is None:
        return None
    if given is None:
        assert known is not None
        given = known[:, -1:] + torch.arange(1, T + 1, device=device)
    given = given[None] if given.dim() == 1 else given
    if not whole(given):
        raise UserError(f"position_ids must be whole numbers, not {given.dtype}: for others there is rope:scaling=")
    if given.dim() != 2 or given.shape[0] not in (1, B) or given.shape[1] not in (T, past + T):
        raise UserError(f"position_ids must be [{B}, {T}], one for each new token; they are {list(given.shape)}")
    if given.shape[1] == T and past:
        if known is None:
            known = Layout(past, past, device, key_padding_mask=None if mask is None else mask[:, :past]).k_positions()
        given = torch.cat([known.expand(B, -1), given.expand(B, -1)], -1)
    if head is not None:
        head.positions = given.expand(B, -1)
    return given


@dataclass(frozen=True)
class Plan:
    """One encoding in one forward pass. `terms` is None where they depend on the layer's input."""

    encoding: Encoding
    layout: Layout
    dtype: torch.dtype
    rotation: Rotation | None = None
    terms: list[Term] | None = None

    def for_layer(self, hidden: Tensor, cache: RelPosCacheLayer | None) -> tuple[Rotation | None, list[Term]]:
        """Rotation and terms for a layer with the input `hidden` [B, T, hidden_size], which its cache takes note of."""
        if self.terms is not None:
            return self.rotation, self.terms
        past = None if cache is None else cache.state
        state = self.encoding.key_state(hidden, self.layout, past)
        if cache is not None:
            state = cache.add_state(state)
        context = Context(self.layout, hidden, state, self.dtype)
        return self.encoding.rotate(context), self.encoding.terms(context)


class Encodings(nn.ModuleList):
    """The distinct encodings of a model; `of_layer[i]` is the number of layer i's.

    Layers with the same spec hold one module where the encoding says `share`, where it has nothing to train, and where
    it acts on the model's input, of which there is only one.
    """

    def __init__(self, config: RelPosConfig, causal: bool):
        super().__init__()
        self.of_layer: list[int] = []
        one_token = Layout(Tq=1, Tk=1, device=torch.device("cpu"), causal=causal)
        shared: dict[str, int] = {}
        for spec in config.layer_encodings():
            if spec not in shared:
                encoding = config.build(spec)
                encoding.checks(one_token, torch.float32)  # better now than at the first batch
                at_input = type(encoding).embed is not Encoding.embed
                number = len(self)
                self.append(encoding)
                if not (encoding.share or at_input or encoding.parameter_count() == 0):
                    self.of_layer.append(number)
                    continue
                shared[spec] = number
            self.of_layer.append(shared[spec])

    def _each(self) -> list[Encoding]:
        return [encoding for encoding in self if isinstance(encoding, Encoding)]

    def embed(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Token embeddings [B, T, hidden_size] plus every encoding's vector."""
        positions = layout.q_positions()
        for encoding in self._each():
            vector = encoding.embed(positions)
            if vector is not None:
                tokens = tokens + vector.to(tokens.dtype)
        return tokens

    def plans(self, layout: Layout, dtype: torch.dtype) -> list[Plan]:
        """A plan for each layer. `dtype` is that of q and k."""
        wide = torch.promote_types(dtype, torch.float32)
        plans = []
        for encoding in self._each():
            encoding.checks(layout, dtype)
            if encoding.content:
                plans.append(Plan(encoding, layout, wide))
                continue
            # Autocast would round what the encoding multiplies, positions among it, to bfloat16.
            with maybe_autocast(layout.device.type, enabled=False):
                context = Context(layout, dtype=wide)
                plans.append(Plan(encoding, layout, wide, encoding.rotate(context), encoding.terms(context)))
        return [plans[number] for number in self.of_layer]


__all__ = ["Encodings", "Plan", "layout_of"]
