"""An encoding by itself, at its initial parameters, without a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relpos import encodings
from relpos.attention import prepare, reference
from relpos.capture.record import MAX_LENGTH, Capture, Layer, title_of
from relpos.errors import UserError
from relpos.terms import Layout


def from_spec(
    spec: str,
    *,
    length: int = 512,
    heads: int = 12,
    head_dim: int = 64,
    seed: int = 0,
    causal: bool = True,
    adjust: Callable[[encodings.Encoding], None] | None = None,
) -> Capture:
    """What the encoding reads of a text is made up, and the caption says so: standard normal hidden states (what a
    layer norm gives) and standard normal q and k. A rotation is shown on q = k = 1, an embedding on q = k = its own
    vectors, so that the scores show position alone. `adjust` may change the parameters before anything is computed."""
    if not 1 <= length <= MAX_LENGTH:
        raise UserError(f"length must be between 1 and {MAX_LENGTH}, not {length}")
    note = ["the encoding at its initial parameters"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        encoding = encodings.build(spec, heads=heads, head_dim=head_dim)
        if adjust is not None:
            adjust(encoding)
        layout = Layout(Tq=length, Tk=length, device=torch.device("cpu"), causal=causal)
        encoding.checks(layout, torch.float32)
        hidden = None
        if encoding.content:
            hidden = torch.randn(1, length, encoding.hidden_size)
            note.append("standard normal hidden states")
        rotation, terms = prepare(encoding, layout, hidden)
        q = k = None
        if encoding.rescores:
            q, k = torch.randn(2, 1, heads, length, head_dim)
            note.append("standard normal q and k")
        elif not encoding.additive:
            vectors = encoding.embed(torch.arange(length))
            if vectors is not None:
                q = k = vectors.float().view(1, length, heads, head_dim).transpose(1, 2)
                note.append("q and k are the position's own vector")
            elif rotation is not None:
                q = k = torch.ones(1, heads, length, head_dim)
                note.append("q and k are all ones")
            else:
                raise UserError(
                    f"{encoding.name} adds nothing and turns nothing: there is nothing to draw without a model"
                )
        if q is not None and k is not None:
            q, k = reference.apply_rotation(q, k, rotation)
            q, k = q[0], k[0]
    return Capture(
        name=encodings.slug(spec),
        title=title_of(encoding),
        heads=heads,
        length=length,
        num_layers=1,
        layers={0: Layer(terms, q, k, head_dim**-0.5, causal=causal)},
        specs=[encodings.by_name(spec)],
        modules=[0],
        parameters={f"0.{key}": value.detach().clone() for key, value in encoding.state_dict().items()},
        geometry={"heads": heads, "head_dim": head_dim, "hidden_size": encoding.hidden_size},
        provenance={"encoding": spec, "note": ", ".join(note)},
    )
