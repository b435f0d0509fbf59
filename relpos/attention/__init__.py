"""Attention with any encoding. `encoding` says what, `impl` says how.

- `attention(q, k, v, encoding, ...)`: the whole path, from unrotated q and k.
- `attend(q, k, v, terms, layout, ...)`: the core, for callers that rotate and cache keys themselves (the models).
- `explain(q, k, v, encoding, ...)`: which implementation `attention` would run, and why.
- `bias_matrix(encoding, length, ...)`: the additive part as a dense matrix, to look at.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relpos.attention import blockwise, cpu, fused, reference, rotary
from relpos.encodings import Encoding, build
from relpos.errors import UserError, nearest, too_large
from relpos.terms import Context, Layout, Rotation, Term, check_borders, check_devices, whole

IMPLEMENTATIONS = ("auto", "reference", "blockwise", "fused")
DENSE_CELLS = 1 << 23  # up to so many score cells the dense reference is the faster of the two on a CPU


def choose(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Term],
    layout: Layout,
    *,
    rescores: bool = False,
    return_weights: bool = False,
) -> tuple[str, str]:
    """The implementation that will run and why. An explicit `impl` never falls back: what it cannot do is an error."""
    if impl not in IMPLEMENTATIONS:
        raise UserError(f"there is no implementation {impl!r}.{nearest(str(impl), IMPLEMENTATIONS)}")
    if impl == "reference":
        return impl, "asked for"
    if return_weights:
        if impl != "auto":
            raise UserError(f"impl={impl!r} never holds the weights; use impl='reference' or 'auto' to see them")
        return "reference", "the weights were asked for"
    if impl == "blockwise":
        if fused.transformed():
            raise UserError("impl='blockwise' has no rule for torch.func and forward-mode derivatives; 'reference' has")
        return impl, "asked for"
    obstacle = fused.obstacle(q, k, v, terms, layout, rescores=rescores)
    if impl == "fused":
        if obstacle:
            raise UserError(f"impl='fused' cannot run here: {obstacle}. impl='auto' picks one that can")
        return impl, "asked for"
    if obstacle is None and q.is_cuda:
        return "fused", "on a GPU and every term has a kernel"
    why = f"not fused: {obstacle}" if obstacle else "no GPU"
    if fused.transformed():
        return "reference", "torch.func and forward-mode derivatives have rules for plain operations alone"
    if not rescores and cpu.serves(q, k, v, terms, layout):
        return "blockwise", f"{why}; no gradient is wanted, so PyTorch's own kernel for CPUs serves"
    if q.shape[0] * q.shape[1] * layout.Tq * layout.Tk <= DENSE_CELLS:
        return "reference", f"{why}; small enough to be dense"
    return "blockwise", f"{why}; memory linear in the length"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: list[Term],
    layout: Layout,
    *,
    scale: float | None = None,
    rescore: reference.Rescore | None = None,
    impl: str = "auto",
    return_weights: bool = False,
    packed: fused.Packed | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with q and k already rotated. q [B,H,Tq,D], k and v [B,Hkv,Tk,D]. `packed`: all three in one tensor, where
    they are neither rotated nor cached."""
    scale, layout = _scale_of(scale, q), _needed(layout)
    how, _ = choose(impl, q, k, v, terms, layout, rescores=rescore is not None, return_weights=return_weights)
    if how != "fused" and not q.shape[0] * q.shape[2] * k.shape[2]:
        return _nothing(q, k, v, terms, return_weights)
    if how == "reference":
        out, weights = reference.attend(q, k, v, terms, layout, scale, rescore)
        return (out, weights) if return_weights else out
    if how == "blockwise":
        return blockwise.attend(q, k, v, terms, layout, scale, rescore)
    return fused.attend(q, k, v, terms, layout, scale, packed)


def _needed(layout: Layout) -> Layout:
    """A window that shows all is cheaper not asked."""
    if layout.window is not None and layout.window >= layout.Tk and layout.positions is None:
        return replace(layout, window=None)
    return layout


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, terms: list[Term], return_weights: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Where there is no text, no query or no key: zeros, of which everybody has a gradient."""
    given = [q, k, v, *(x for term in terms for x in vars(term).values() if isinstance(x, Tensor))]
    zero = sum(x.flatten()[:0].sum() for x in given if x.is_floating_point())
    out = (v.new_zeros(*q.shape[:3], v.shape[-1]) + zero).to(v.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (out, out.new_zeros(*q.shape[:3], k.shape[2], dtype=wide)) if return_weights else out


def _scale_of(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    scale = _plain(scale)
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise UserError(f"scale must be a number above 0, not {scale!r}")
    return scale


def _plain(x: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    return x.item() if isinstance(x, np.generic) else x


def prepare(
    encoding: Encoding,
    layout: Layout,
    hidden: Tensor | None = None,
    state: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Rotation | None, list[Term]]:
    """The rotation and the terms of one call. `hidden` covers all keys, or, with `state`, at least the queries."""
    encoding.checks(layout, dtype)
    if encoding.content:
        if hidden is None:
            raise UserError(f"{encoding.name} reads the layer's input: pass hidden=[B, Tk, {encoding.hidden_size}]")
        if hidden.shape[-1] != encoding.hidden_size:
            raise UserError(
                f"hidden has {hidden.shape[-1]} features; {encoding.name} was built for {encoding.hidden_size}"
            )
        # The layer's input may be of another dtype than the encoding's projections; autocast would see to that itself.
        own = next((p.dtype for p in encoding.parameters()), hidden.dtype)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(own)
        if state is None:
            if encoding.stateful and hidden.shape[1] != layout.Tk:
                raise UserError(f"hidden has {hidden.shape[1]} tokens but there are {layout.Tk} keys: pass state too")
            state = encoding.key_state(hidden, layout) if encoding.stateful else None
        if hidden.shape[1] == layout.Tk and layout.Tk != layout.Tq:
            hidden = layout.at_queries(hidden.transpose(1, 2)).transpose(1, 2)
        elif hidden.shape[1] != layout.Tq:
            raise UserError(
                f"hidden has {hidden.shape[1]} tokens; expected {layout.Tk} (keys) or {layout.Tq} (queries)"
            )
    positions = torch.promote_types(dtype, torch.float32)
    context = Context(layout, hidden, state, positions)
    return encoding.rotate(context), encoding.terms(context)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        raise UserError(f"q, k and v must be tensors, not {type(q).__name__}, {type(k).__name__}, {type(v).__name__}")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise UserError(
            f"q must be [B,H,Tq,D] and k, v [B,Hkv,Tk,D]; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise UserError(f"q, k and v must be of a floating point type, not {q.dtype}, {k.dtype}, {v.dtype}")
    if any(x.dtype.itemsize < 2 for x in (q, k, v)):
        raise UserError(f"q, k and v must have 16 bits or more, not {q.dtype}, {k.dtype}, {v.dtype}: convert them")
    if q.dtype != k.dtype and not torch.is_autocast_enabled(q.device.type):
        raise UserError(f"q is {q.dtype} and k is {k.dtype}: convert one of them")


def _check(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, layout: Layout) -> None:
    B, H, _, D = q.shape
    if k.shape[:3] != v.shape[:3] or k.shape[0] != B or k.shape[3] != D:
        raise UserError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if not k.shape[1] or H % k.shape[1]:
        raise UserError(
            f"{H} query heads cannot share {k.shape[1]} key heads: the first must be a multiple of the second"
        )
    if not isinstance(layout.causal, (bool, int)):
        raise UserError(f"causal must be True or False, not {layout.causal!r}")
    if encoding.heads != H:
        raise UserError(f"{encoding.name} was built for {encoding.heads} heads and q has {H}")
    mask = layout.key_padding_mask
    if mask is not None and tuple(mask.shape) != (B, layout.Tk):
        raise UserError(f"key_padding_mask must be [B, Tk] = [{B}, {layout.Tk}], not {list(mask.shape)}")
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):  # of those added, 0 means a real token
        raise UserError(f"key_padding_mask must be bool, True for real tokens, not {mask.dtype}")
    if layout.cu_seqlens is not None:
        check_borders(layout.cu_seqlens, layout.Tk)
        if B != 1:
            raise UserError(f"cu_seqlens packs documents into one row: batch must be 1, not {B}")
        if mask is not None or layout.positions is not None:
            raise UserError("cu_seqlens already says where documents end: pass no key_padding_mask or positions too")
    given = layout.positions
    if given is not None and (given.dim() != 2 or given.shape[0] not in (1, B) or given.shape[1] != layout.Tk):
        raise UserError(f"positions must be [1 or B, Tk] = [{B}, {layout.Tk}], not {list(given.shape)}")
    if given is not None and not whole(given):
        raise UserError(f"positions must be whole numbers, not {given.dtype}: for others there is rope:scaling=")
    offset, window = layout.q_offset, layout.window
    if isinstance(offset, Tensor) and not whole(offset):
        raise UserError(f"q_offset must be whole numbers, not {offset.dtype}")
    for what, value in (("q_offset", None if isinstance(offset, Tensor) else offset), ("window", window)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{what} must be a whole number, not {value!r}")
    if isinstance(layout.q_offset, int) and not 0 <= layout.q_offset <= layout.Tk - layout.Tq:
        raise UserError(f"q_offset={layout.q_offset} puts {layout.Tq} queries outside {layout.Tk} keys")
    if layout.q_offset is None and layout.Tq > layout.Tk:
        raise UserError(f"{layout.Tq} queries cannot be the last of {layout.Tk} keys")
    if isinstance(layout.q_offset, Tensor) and tuple(layout.q_offset.shape) != (B,):
        raise UserError(f"q_offset must be an int or [B] = [{B}], not {list(layout.q_offset.shape)}")
    if isinstance(offset, Tensor) and offset.device.type == "cpu" and not torch.compiler.is_compiling() and B:
        low, high = (int(x) for x in offset.aminmax())  # on a CPU a look at the values is cheap
        if low < 0 or high > layout.Tk - layout.Tq:
            wrong = low if low < 0 else high
            raise UserError(f"q_offset={wrong} puts {layout.Tq} queries outside {layout.Tk} keys")
    if layout.window is not None and not 1 <= layout.window < 1 << 63:
        raise UserError(f"window must be at least 1, and below 2^63, not {layout.window}; None for no window")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    *,
    hidden: Tensor | None = None,
    state: Tensor | None = None,
    positions: Tensor | None = None,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    impl: str = "auto",
    return_weights: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with a positional encoding.

    q [B,H,Tq,D]; k and v [B,Hkv,Tk,D], where Hkv divides H; hidden [B,Tk,hidden_size] for encodings that read the
    layer's input; state, what such an encoding's `key_state` gave for all keys (then hidden may cover the queries
    only); positions [B,Tk]; key_padding_mask [B,Tk], True for real tokens; cu_seqlens, document borders of packed
    text; q_offset, the column of the first query, `Tk - Tq` by default; window, a query sees keys with |d| < window.

    Returns [B,H,Tq,D], and the weights [B,H,Tq,Tk] with `return_weights`. The row of a query that sees no key, or is
    padding itself, is zero. No value of a tensor on a GPU is read on the host. Compiled whole (`fullgraph`), it takes
    an encoding that is built: a string is built in every call.
    """
    _refuse(sinks, softcap, dropout)
    q, k, terms, layout, rescore = _ready(
        q,
        k,
        v,
        encoding,
        hidden,
        state,
        causal=causal,
        q_offset=q_offset,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        positions=positions,
        window=window,
    )
    return attend(q, k, v, terms, layout, scale=scale, rescore=rescore, impl=impl, return_weights=return_weights)


def _refuse(sinks: Any, softcap: Any, dropout: Any) -> None:
    for what, given in (("attention sinks", sinks), ("soft-capping", softcap), ("attention dropout", dropout or None)):
        if given is not None:
            raise UserError(f"{what} is not supported: the kernels drop what is constant along a row of scores")


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    *,
    hidden: Tensor | None = None,
    state: Tensor | None = None,
    impl: str = "auto",
    return_weights: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **where: Any,
) -> tuple[str, str]:
    """The implementation that `attention` would run with the same arguments, and why, or the error that it would be.
    `where` is what says which query sees which key: causal, positions, key_padding_mask, cu_seqlens, q_offset,
    window."""
    known = ("causal", "positions", "key_padding_mask", "cu_seqlens", "q_offset", "window")
    for name in where:
        if name not in known:
            raise UserError(f"explain has no argument {name!r}.{nearest(name, known)}")
    _refuse(sinks, softcap, dropout)
    q, k, terms, layout, rescore = _ready(q, k, v, encoding, hidden, state, **where)
    _scale_of(scale, q)
    return choose(impl, q, k, v, terms, _needed(layout), rescores=rescore is not None, return_weights=return_weights)


def _ready(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    hidden: Tensor | None,
    state: Tensor | None,
    *,
    positions: Tensor | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor, list[Term], Layout, reference.Rescore | None]:
    """Checked arguments of `attention` as those of `attend`: rotated q and k, terms, layout, rescore."""
    _check_tensors(q, k, v)
    if isinstance(encoding, str):
        encoding = build(encoding, heads=q.shape[1], head_dim=q.shape[-1])
        if any(True for _ in encoding.parameters()):
            raise UserError(f"{encoding.name} has parameters: build it once with relpos.encodings.build and pass that")
    elif not isinstance(encoding, Encoding):
        raise UserError(f"encoding must be an Encoding or a string such as 'alibi', not {encoding!r}")
    tensors = {name: where.get(name) for name in ("key_padding_mask", "cu_seqlens")}
    for what, x in {"hidden": hidden, "state": state, "positions": positions, **tensors}.items():
        if x is not None and not isinstance(x, Tensor):
            raise UserError(f"{what} must be a tensor, not {type(x).__name__}")
    weight = next(encoding.parameters(), None)
    check_devices(
        "q", q.device, k=k, v=v, hidden=hidden, state=state, positions=positions, q_offset=where.get("q_offset"),
        **tensors, **{f"the encoding {encoding.name}": weight},
    )  # fmt: skip
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    where = {name: _plain(x) for name, x in where.items()}
    layout = Layout(Tq=q.shape[2], Tk=k.shape[2], device=q.device, positions=positions, **where)
    _check(q, k, v, encoding, layout)
    if layout.key_padding_mask is not None:
        layout = replace(layout, key_padding_mask=layout.key_padding_mask.bool())
    if hidden is not None and (hidden.dim() != 3 or not hidden.is_floating_point()):
        raise UserError(f"hidden must be [B, T, hidden_size] of a floating point type, not {list(hidden.shape)} of "
                        f"{hidden.dtype}")  # fmt: skip
    if hidden is not None and hidden.shape[0] != q.shape[0]:
        raise UserError(f"hidden has a batch of {hidden.shape[0]} and q of {q.shape[0]}")
    if state is not None and (state.dim() != 3 or state.shape[0] != q.shape[0] or state.shape[2] != k.shape[2]):
        raise UserError(f"state must be [B, S, Tk], what key_state gave for {k.shape[2]} keys, not {list(state.shape)}")
    rotation, terms = prepare(encoding, layout, hidden, state, q.dtype)
    if encoding.head_dim != q.shape[-1] and (rotation is not None or encoding.rescores):
        raise UserError(f"{encoding.name} was built for heads of {encoding.head_dim} features and q has {q.shape[-1]}")
    q, k = rotary.apply_rotation(q, k, rotation)
    return q, k, terms, layout, encoding.rescore if encoding.rescores else None


def bias_matrix(
    encoding: Encoding | str,
    length: int,
    hidden: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The additive bias as float32 [H,T,T], or [B,H,T,T] where the hidden state or q and k matter; `-inf` above the
    diagonal when causal. For encodings that rescore, the new score minus the plain one."""
    if isinstance(encoding, str):
        encoding = build(encoding)
    if not isinstance(encoding, Encoding):
        raise UserError(f"encoding must be an Encoding or a string such as 'alibi', not {encoding!r}")
    if not encoding.additive:
        raise UserError(
            f"{encoding.name} adds nothing to the scores, so it has no bias matrix; look at its scores instead: "
            "relpos figure --kind scores"
        )
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UserError(f"length must be a whole number, at least 1, not {length!r}")
    if isinstance(hidden, Tensor) and hidden.dim() == 2:
        hidden = hidden[None]
    for name, x, shape in (("hidden", hidden, "[B,T,hidden_size]"), ("q", q, "[B,H,T,D]"), ("k", k, "[B,Hkv,T,D]")):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise UserError(f"{name} must be a tensor {shape}, not {type(x).__name__}")
        if x.dim() != shape.count(",") + 1:
            raise UserError(f"{name} must be {shape}, not of the shape {list(x.shape)}")
        if x.shape[-2] != length:
            raise UserError(f"{name} has {x.shape[-2]} tokens; length is {length}")
        if bool(torch.isnan(x).any()):
            raise UserError(f"{name} holds NaN")
    try:
        return _matrix(encoding, length, hidden, q, k, causal)
    except (MemoryError, OverflowError, RuntimeError) as error:
        if too_large(error):
            raise UserError(f"a matrix of {length} x {length} for each head is too large for this machine") from error
        raise


def _matrix(
    encoding: Encoding, length: int, hidden: Tensor | None, q: Tensor | None, k: Tensor | None, causal: bool
) -> Tensor:
    weight = next(encoding.parameters(), None)
    if hidden is not None and weight is not None:
        hidden = hidden.to(weight.dtype)
    given = next((x for x in (hidden, q, weight) if x is not None), None)
    device = given.device if given is not None else torch.device("cpu")
    layout = Layout(Tq=length, Tk=length, device=device, causal=causal)
    dtype = torch.float32 if given is None else given.dtype
    _, terms = prepare(encoding, layout, hidden, None, dtype)
    bias = reference.bias_of(terms, layout, encoding.heads)
    allowed = layout.allowed()[:, None]
    batched = encoding.content
    if encoding.rescores:
        if q is None or k is None:
            raise UserError(
                f"{encoding.name} rescores whole rows: pass q and k, [B,{encoding.heads},T,{encoding.head_dim}]"
            )
        _check_tensors(q, k, k)
        _check(q, k, k, encoding, layout)
        if q.shape[-1] != encoding.head_dim:
            raise UserError(
                f"{encoding.name} was built for heads of {encoding.head_dim} features and q has {q.shape[-1]}"
            )
        if encoding.content and hidden is not None and hidden.shape[0] != q.shape[0]:
            raise UserError(f"hidden has a batch of {hidden.shape[0]} and q of {q.shape[0]}")
        k = reference.repeat_heads(k, q.shape[1])
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        bias = encoding.rescore(scores, bias, q, k, allowed) - scores
        batched = True
    bias = bias.float().expand(-1, -1, length, length)
    if causal:
        bias = bias.masked_fill(~allowed, float("-inf"))
    return bias if batched else bias[0]
