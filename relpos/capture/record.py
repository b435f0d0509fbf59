"""A capture: what a picture of a model's positions needs, and nothing more.

It holds, for the layers it was asked for, the positional *terms* (what is added to the scores, as data), the
rotated q and k where they matter, and the trained positional parameters of every layer. From it come three maps, each
`[H, T, T]` and each a few rows at a time, so that 16k tokens fit:

- `bias`: what position adds to the scaled score (for encodings that rescore, the new score minus the plain one);
- `scores`: the content score `q . k * scale`, after rotation, before bias and mask;
- `weights`: the softmax of both together, or of the bias alone where q and k are not held.

Masked cells are `-inf` in all three, so that a picture leaves them blank. The file is safetensors;
docs/capture.md fixes its keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos import encodings, terms
from relpos.attention import prepare, reference
from relpos.encodings import Encoding
from relpos.errors import UserError, nearest
from relpos.files import whole
from relpos.terms import Layout, Term

FORMAT = "relpos-capture"
VERSION = 1
KINDS = ("bias", "scores", "weights")
MAX_LENGTH = 16384
CELLS = 1 << 22  # score cells held at once; blocks over 32 MiB would go back to the system after each use

_TERM_TYPES = {cls.__name__: cls for cls in (terms.Slope, terms.Distance, terms.Potential, terms.Profile, terms.Bank)}


@dataclass
class Layer:
    """One layer. Tensors have batch 1 or none: q [H,T,D], k [Hkv,T,D], both rotated; terms as relpos.terms has them."""

    terms: list[Term] = field(default_factory=list)
    q: Tensor | None = None
    k: Tensor | None = None
    scale: float = 1.0
    window: int | None = None  # a query sees keys with |d| < window
    causal: bool = True


@dataclass
class Capture:
    name: str  # file name of its pictures
    title: str  # how a picture names it
    heads: int
    length: int
    num_layers: int
    layers: dict[int, Layer]
    specs: list[str] = field(default_factory=list)  # of the distinct encodings, ours only
    modules: list[int] = field(default_factory=list)  # layer -> index into specs
    parameters: dict[str, Tensor] = field(default_factory=dict)  # "<module>.<name>"
    geometry: dict[str, int] = field(default_factory=dict)  # heads, head_dim, hidden_size of the encodings
    tokens: Tensor | None = None  # [T] int32
    pieces: list[str] = field(default_factory=list)  # the text of each token
    provenance: dict[str, Any] = field(default_factory=dict)  # model, recipe, data, steps, perplexity, commit, note ...

    # Layers.

    def heads_of(self, layer: int) -> int:
        """Query heads of a layer; the same in all of them but for models that mix two kinds of layer."""
        held = self.layers.get(self.index(layer))
        if held is None or (held.q is None and not held.terms):
            return self.heads
        return heads_in(held.terms[0]) if held.q is None else held.q.shape[0]

    def index(self, layer: int) -> int:
        """Layer number from 0, for a number that may count from the end."""
        if not -self.num_layers <= layer < self.num_layers:
            raise UserError(
                f"there is no layer {layer}: {self.title} has {self.num_layers}, numbered 0 to {self.num_layers - 1} "
                "or from the end, -1 for the last"
            )
        return layer % self.num_layers

    def encoding(self, layer: int) -> Encoding | None:
        """The encoding of a layer with its captured parameters; None where the model is not one of ours."""
        if not self.specs:
            return None
        module = self.modules[layer]
        built = encodings.build(self.specs[module], reset=False, allow_file=False, **self.geometry)
        if not built.additive and not built.rescores:
            return built  # whatever it has trained is not held
        prefix = f"{module}."
        state = {key[len(prefix) :]: value for key, value in self.parameters.items() if key.startswith(prefix)}
        try:
            built.load_state_dict({key: value.float() for key, value in state.items()})
        except RuntimeError as error:
            raise UserError(f"the parameters in this capture do not fit {self.specs[module]!r}: {error}") from None
        return built

    def _layer(self, layer: int, length: int) -> Layer:
        held = self.layers.get(layer)
        if held is not None and length <= self.length:
            return held
        encoding = self.encoding(layer)
        if encoding is None or encoding.content or encoding.rescores or not encoding.additive:
            if held is None:
                raise UserError(
                    f"this capture of {self.title} holds layer {', '.join(map(str, self.layers))} of {self.num_layers} "
                    f"and layer {layer} depends on the text: make a capture with --layers all"
                )
            raise UserError(
                f"this capture of {self.title} was made with {self.length} tokens; a length of {length} needs a new "
                "one from the model"
            )
        some = next(iter(self.layers.values()), Layer())
        layout = Layout(Tq=length, Tk=length, device=torch.device("cpu"), causal=some.causal)
        with torch.no_grad():
            built = prepare(encoding, layout)[1]
        return Layer(built, scale=some.scale, window=some.window, causal=some.causal)

    # Maps.

    def has_bias(self, layer: int = -1) -> bool:
        layer = self.index(layer)
        held = self.layers.get(layer)
        if held is not None and held.terms:
            return True
        encoding = self.encoding(layer)
        return encoding is not None and encoding.additive

    def has_content(self, layer: int = -1, length: int | None = None) -> bool:
        """Whether q and k of a layer are held, for so many tokens: without them there are no scores, and weights are
        those of the bias."""
        held = self.layers.get(self.index(layer))
        enough = length is None or length <= self.length
        return enough and held is not None and held.q is not None and held.k is not None

    def default_kind(self, layer: int = -1) -> str:
        return "bias" if self.has_bias(layer) else "scores"

    def check(self, kind: str, layer: int, length: int) -> None:
        """Raise UserError where this map cannot be made."""
        if kind not in KINDS:
            raise UserError(f"there is no kind of map {kind!r}.{nearest(kind, KINDS)}")
        if not 1 <= length <= MAX_LENGTH:
            raise UserError(f"length must be between 1 and {MAX_LENGTH}, not {length}")
        held = self._layer(layer, length)
        if kind == "bias" and not self.has_bias(layer):
            raise UserError(
                f"{self.title} adds nothing to the scores: draw kind 'scores' or 'weights' instead of 'bias'"
            )
        if (kind == "scores" or self.rescores(layer)) and (held.q is None or held.k is None):
            if self.has_content(layer):
                raise UserError(
                    f"this capture of {self.title} holds q and k of {self.length} tokens; {kind} of {length} need a "
                    "new one from the model"
                )
            if "model" not in self.provenance:
                raise UserError(f"{self.title} by itself has no q and k, which {kind} need: draw them from a model")
            raise UserError(
                f"this capture of {self.title} holds no q and k for layer {layer}, which {kind} need: capture the "
                "model again with --content, or draw from the model itself"
            )

    def rescores(self, layer: int) -> bool:
        return bool(self.specs) and encodings.get(encodings.parse(self.specs[self.modules[layer]])[0]).rescores

    def rows(
        self,
        kind: str,
        layer: int = -1,
        heads: list[int] | None = None,
        length: int | None = None,
        step: int | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Blocks of rows of a map: (first row, float32 [heads, rows, length])."""
        layer = self.index(layer)
        n = self.length if length is None else length
        self.check(kind, layer, n)
        held = self._layer(layer, n)
        own = self.heads_of(layer)
        heads = list(range(own)) if heads is None else heads
        layout = Layout(Tq=n, Tk=n, device=torch.device("cpu"), causal=held.causal, window=held.window)
        encoding = self.encoding(layer) if self.rescores(layer) else None
        wanted = list(range(own)) if encoding is not None else heads  # a rescoring encoding mixes the heads
        kept = [restrict(term, wanted, n) for term in held.terms]
        q = k = None
        if held.q is not None and held.k is not None and (kind != "bias" or encoding is not None):
            group = own // held.k.shape[0]
            q = held.q[wanted, :n].float()
            k = held.k[[h // group for h in wanted], :n].float()
        block = step or max(1, CELLS // (len(wanted) * n))
        for start in range(0, n, block):
            rows = slice(start, min(start + block, n))
            with torch.no_grad():
                cells = self._block(kind, kept, q, k, held.scale, layout, rows, encoding, len(wanted))
            yield start, cells if encoding is None else cells[heads]

    @staticmethod
    def _block(
        kind: str,
        kept: list[Term],
        q: Tensor | None,
        k: Tensor | None,
        scale: float,
        layout: Layout,
        rows: slice,
        encoding: Encoding | None,
        heads: int,
    ) -> Tensor:
        allowed = layout.allowed(rows)  # [1, rows, T]
        bias = reference.bias_of(kept, layout, heads, rows).expand(1, heads, rows.stop - rows.start, layout.Tk)
        scores = torch.zeros_like(bias)
        if q is not None and k is not None:
            scores = (q[:, rows] @ k.transpose(-1, -2) * scale)[None]
        if encoding is not None:
            assert q is not None and k is not None
            bias = encoding.rescore(scores, bias, q[None, :, rows], k[None], allowed[:, None]) - scores
        if kind == "bias":
            cells = bias[0]
        elif kind == "scores":
            cells = scores[0]
        else:
            cells = (scores + bias)[0].masked_fill(~allowed, -math.inf).softmax(-1)
        return cells.float().masked_fill(~allowed, -math.inf)

    def map(self, kind: str, layer: int = -1, heads: list[int] | None = None, length: int | None = None) -> Tensor:
        """The whole map, float32 [heads, T, T]."""
        return torch.cat([cells for _, cells in self.rows(kind, layer, heads, length)], 1)

    # Files.

    def save(self, path: str | Path, *, half: bool = False) -> Path:
        """Write the capture. `half` keeps q, k and large parameter matrices in float16, as the shipped ones are."""
        from safetensors.torch import save_file

        path = Path(path)
        if path.suffix == ".py":  # where a source is named, such a name is that of an encoding's file
            raise UserError(f"a capture is no Python file: give it another name than {str(path)!r}")

        def small(x: Tensor) -> Tensor:
            fits = half and x.numel() > 8192 and bool((x.abs() <= torch.finfo(torch.float16).max).all())
            return x.half() if fits else x

        tensors: dict[str, Tensor] = {}
        described: dict[str, Any] = {}
        for number, layer in self.layers.items():
            listed = []
            for index, term in enumerate(layer.terms):
                entry: dict[str, Any] = {"type": type(term).__name__}
                for item in dataclasses.fields(term):
                    value = getattr(term, item.name)
                    if isinstance(value, Tensor):
                        tensors[f"layer.{number}.term.{index}.{item.name}"] = value
                    elif isinstance(value, (bool, int, float)) and value != item.default:
                        entry[item.name] = value
                listed.append(entry)
            if layer.q is not None and layer.k is not None:
                tensors[f"layer.{number}.q"], tensors[f"layer.{number}.k"] = small(layer.q), small(layer.k)
            described[str(number)] = {
                "terms": listed,
                "scale": layer.scale,
                "window": layer.window,
                "causal": layer.causal,
            }
        for key, value in self.parameters.items():
            tensors[f"parameter.{key}"] = small(value)
        if self.tokens is not None:
            tensors["tokens"] = self.tokens.to(torch.int32)
        header = {
            key: getattr(self, key)
            for key in (
                "name",
                "title",
                "heads",
                "length",
                "num_layers",
                "specs",
                "modules",
                "geometry",
                "pieces",
                "provenance",
            )
        }
        header["layers"] = described
        metadata = {"format": FORMAT, "version": str(VERSION), "header": json.dumps(header)}
        ready = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        if not ready:  # an encoding without parameters or text: safetensors wants one tensor at least
            ready["empty"] = torch.zeros(0)

        def put(temporary: Path) -> None:
            temporary.touch()  # with the usual permissions; save_file alone would leave it readable to its owner only
            mode = temporary.stat().st_mode
            save_file(ready, temporary, metadata=metadata)
            temporary.chmod(mode)

        return whole(path, put)


def title_of(encoding: Encoding) -> str:
    """How a picture names an encoding: `KERPLE`, or `DAPE + KERPLE` for one built around another."""
    base = getattr(encoding, "base", None)
    own = encoding.title or encoding.name
    return f"{own} + {title_of(base)}" if isinstance(base, Encoding) else own


def heads_in(term: Term) -> int:
    if isinstance(term, terms.Slope):
        return term.slopes.shape[0]
    if isinstance(term, terms.Distance):
        return term.values.shape[0]
    return term.slope.shape[0] if isinstance(term, terms.Profile) else term.query.shape[1]


def restrict(term: Term, heads: list[int], length: int) -> Term:
    """A term for some of its heads and the first `length` tokens."""
    if isinstance(term, terms.Slope):
        return terms.Slope(term.slopes[heads])
    if isinstance(term, terms.Distance):
        return dataclasses.replace(term, values=term.values[heads])
    if isinstance(term, terms.Potential):
        gate = None if term.gate is None else term.gate[:, heads, :length]
        return dataclasses.replace(
            term, query=term.query[:, heads, :length], key=term.key[:, heads, :length], gate=gate
        )
    if isinstance(term, terms.Profile):
        rate = term.rate if term.rate.shape[0] == 1 else term.rate[heads]
        rho, slope, offset = term.rho[:, :length], term.slope[heads], term.offset[heads]
        return dataclasses.replace(term, rate=rate, rho=rho, slope=slope, offset=offset)
    return dataclasses.replace(term, query=term.query[:, heads, :length])


def load(path: str | Path) -> Capture:
    """Read a capture file."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"there is no file {str(path)!r}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}. It is truncated or no safetensors file") from None
    if metadata.get("format") != FORMAT:
        raise UserError(f"{str(path)!r} is a safetensors file but no capture; `relpos capture` makes one from a model")
    if not metadata.get("version", "").isdecimal() or int(metadata["version"]) > VERSION:
        raise UserError(
            f"{str(path)!r} is a capture of version {metadata.get('version')}; this relpos reads up to {VERSION}. "
            "Install a newer relpos"
        )
    try:
        header = json.loads(metadata["header"])
        described = header.pop("layers")
        layers: dict[int, Layer] = {}
        for number, entry in described.items():
            held: list[Term] = []
            for index, plain in enumerate(entry["terms"]):
                cls = _TERM_TYPES[plain["type"]]
                prefix = f"layer.{number}.term.{index}."
                values = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
                held.append(cls(**values, **{key: value for key, value in plain.items() if key != "type"}))
            layers[int(number)] = Layer(
                held,
                tensors.get(f"layer.{number}.q"),
                tensors.get(f"layer.{number}.k"),
                entry["scale"],
                entry["window"],
                entry["causal"],
            )
        parameters = {
            key.removeprefix("parameter."): value for key, value in tensors.items() if key.startswith("parameter.")
        }
        made = Capture(layers=layers, parameters=parameters, tokens=tensors.get("tokens"), **header)
        _check(made)
        return made
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(path)!r} is a damaged capture: {type(error).__name__}: {error}") from None


def _check(made: Capture) -> None:
    """ValueError where a file says what no capture can."""
    kinds = {"name": str, "title": str, "heads": int, "length": int, "num_layers": int, "specs": list, "modules": list}
    for key, kind in {**kinds, "geometry": dict, "pieces": list, "provenance": dict}.items():
        if not isinstance(getattr(made, key), kind):
            raise ValueError(f"{key} is {getattr(made, key)!r}")
    if made.specs and (len(made.modules) != made.num_layers or not set(made.modules) <= set(range(len(made.specs)))):
        raise ValueError(f"modules are {made.modules}, of {made.num_layers} layers and {len(made.specs)} encodings")
    for number, layer in made.layers.items():
        sizes = {heads_in(term) for term in layer.terms} | ({layer.q.shape[0]} if layer.q is not None else set())
        if not 0 <= number < made.num_layers or len(sizes) > 1:
            raise ValueError(f"layer {number} of {made.num_layers} has {sorted(sizes)} heads")
