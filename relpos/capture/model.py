"""A trained model and a text -> a capture: ours, and those of families.py, from a folder or in memory."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relpos.attention import reference
from relpos.capture import families
from relpos.capture.record import MAX_LENGTH, Capture, Layer, title_of
from relpos.data import tokenizer as tokenizers
from relpos.data.progress import Progress
from relpos.errors import UserError
from relpos.files import check_place, final, settings_of
from relpos.models import RelPosForCausalLM, RelPosForMaskedLM
from relpos.models.base import RelPosPreTrainedModel

TEXT = Path(__file__).with_name("text.txt")  # our own prose, at least 512 tokens with GPT-2's tokenizer


def from_model(
    source: str | Path | nn.Module,
    *,
    text: str | Path | None = None,
    tokens: Sequence[int] | Tensor | None = None,
    length: int = 512,
    layers: str | Sequence[int] = "last",
    content: bool = True,
    name: str | None = None,
    provenance: dict[str, Any] | None = None,
    report: Callable[[float, str], None] | None = None,
) -> Capture:
    """Capture a model (a folder or a module) on the first `length` tokens of a text.

    `text` is a file, by default the one that ships with relpos; `tokens` are ids instead. `layers` is "last", "all" or
    numbers. `content` keeps q and k of the captured layers; False keeps them only where the positional part needs them
    (no bias at all, or one that rescores). `report` is told which part of the layers has run, and the next one.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise UserError(f"length must be between 1 and {MAX_LENGTH}, not {length}")
    folder = None if isinstance(source, nn.Module) else Path(source)
    model = load_model(folder) if folder is not None else source
    assert isinstance(model, nn.Module)
    ours = isinstance(model, RelPosPreTrainedModel)
    body = _body(model)
    config = body.config
    family = None if ours else families.family_of(config.model_type)
    if family is not None:
        limit = family.limit(config) if family.limit else None
        positional = family.positional
    else:
        limit = getattr(config, "max_position_embeddings", None)
        positional = all(e.additive and not e.content and not e.rescores for e in body.encodings)
    if limit is not None and length > limit:
        raise UserError(f"this model's table of positions ends at {limit} tokens: give --length {limit} or less")
    ids, pieces, told = _tokens(text, tokens, length, folder, config, needs_text=not positional)
    count = config.num_hidden_layers if family is None else len(family.modules(body))
    wanted = _layers(layers, count)
    with _watched([block.attention for block in body.layers] if family is None else family.modules(body), report):
        held = _record_ours(body, ids, wanted) if ours else families.record(body, ids, wanted)
    heads = next(iter(held.values())).q.shape[0]  # type: ignore[union-attr]
    title = _title(body, folder, family)
    made = Capture(
        name=name or (folder.resolve().name if folder is not None else title.lower().replace(" ", "-")),
        title=title,
        heads=heads,
        length=length,
        num_layers=count,
        layers=held,
        tokens=ids.to(torch.int32) if told else None,
        pieces=pieces,
        provenance={
            "model": _described(body, heads, count, folder),
            **({"encoding": " | ".join(dict.fromkeys(config.layer_encodings()))} if ours else {}),
            **(run_facts(folder) if folder is not None else {}),
            **({"text": told} if told else {"note": "no text: the bias does not depend on one"}),
            **(provenance or {}),
        },
    )
    if ours:
        _keep_parameters(made, body)
    for number, layer in held.items():
        if not told or (not content and layer.terms and not made.rescores(number)):
            layer.q = layer.k = None
    return made


def capture_run(
    run: str | Path,
    out: str | Path,
    *,
    text: str | Path | None = None,
    layers: str = "last",
    length: int = 512,
    content: bool = False,
    half: bool = False,
    note: str | None = None,
    progress: bool = False,
) -> Capture:
    """What `relpos capture` does: capture a model folder into a file."""
    wanted: str | list[int] = layers
    if layers not in ("last", "all"):
        try:
            wanted = [int(part) for part in layers.split(",")]
        except ValueError:
            raise UserError(f"layers are 'last', 'all' or numbers such as 0,3,11, not {layers!r}") from None
    told = {"note": note} if note else {}
    out = Path(out)
    check_place(out)
    name = out.name.removesuffix(".safetensors")
    with Progress("capturing", progress) as bar:
        bar(0.0, "reading the model")
        made = from_model(
            final(Path(run)), text=text, length=length, layers=wanted, content=content, name=name, provenance=told,
            report=bar,
        )  # fmt: skip
        bar(1.0, "writing")
        made.save(out, half=half)
    return made


@contextlib.contextmanager
def _watched(modules: Sequence[nn.Module], report: Callable[[float, str], None] | None) -> Iterator[None]:
    """While a model runs, tell how far through its layers it is."""
    if report is None:
        yield
        return
    numbers = {module: number for number, module in enumerate(modules)}

    def tell(module: nn.Module, args: tuple) -> None:
        report(numbers[module] / len(modules), f"layer {numbers[module] + 1} of {len(modules)}")

    hooks = [module.register_forward_pre_hook(tell) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Loading.


def load_model(folder: Path) -> nn.Module:
    """A model from a folder, in float32 on the CPU. Nothing is downloaded and no code from the folder runs."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {str(folder)!r}: expected a model that save_pretrained wrote")
    kind = settings_of(folder).get("model_type", "")
    with quiet():
        return _load(folder, kind)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bar for weights that load in a moment."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load(folder: Path, kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    ours = {cls.config_class.model_type: cls for cls in (RelPosForCausalLM, RelPosForMaskedLM)}
    if kind in ours:
        return ours[kind].from_pretrained(folder, dtype="float32")
    families.family_of(kind)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return AutoModel.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="float32"
        )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the model in {str(folder)!r} cannot be loaded: {first}") from None
    except Exception as error:  # safetensors raises its own
        raise UserError(f"the model in {str(folder)!r} cannot be loaded: {error}") from None


def _body(model: Any) -> Any:
    """The part with the layers: a head (language model, classifier) is not needed."""
    if isinstance(model, RelPosPreTrainedModel):
        return model.base_model if model.base_model is not model else model
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(model, prefix, None) if prefix else None
    return inner if isinstance(inner, nn.Module) and inner is not model else model


def _title(body: Any, folder: Path | None, family: families.Family | None) -> str:
    if family is not None:
        return family.title
    return ", ".join(dict.fromkeys(title_of(encoding) for encoding in body.encodings))


def _described(body: Any, heads: int, count: int, folder: Path | None) -> str:
    """One line about a model: what it is called and how large it is."""
    name = body.config.model_type if folder is None else folder.resolve().name
    if folder is not None and name.startswith("checkpoint-"):
        name = f"{folder.resolve().parent.name}/{name}"
    return f"{name}, {count} layers of {heads} heads, {sum(p.numel() for p in body.parameters()):,} parameters"


# Text.


def _tokens(
    text: str | Path | None,
    tokens: Sequence[int] | Tensor | None,
    length: int,
    folder: Path | None,
    config: Any,
    needs_text: bool,
) -> tuple[Tensor, list[str], str]:
    """Ids [length], the text of each, and what the caption says about them."""
    vocab = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    if tokens is not None:
        ids = torch.as_tensor(tokens).long().flatten()
        if len(ids) < length:
            raise UserError(f"{len(ids)} tokens were given and the length is {length}: give --length {len(ids)}")
        ids = ids[:length]
        if bool((ids < 0).any() or (ids >= vocab).any()):
            raise UserError(f"the tokens hold ids outside the model's vocabulary, 0 to {vocab - 1}")
        return ids, [], "token ids given"
    if folder is None and text is None and not needs_text:
        return torch.zeros(length, dtype=torch.long), [], ""
    if folder is None:
        raise UserError("a model in memory comes without a tokenizer: pass tokens=, the ids of a text")
    try:
        tokenizer = tokenizers.load(folder)
    except UserError:
        if text is None and not needs_text:
            return torch.zeros(length, dtype=torch.long), [], ""
        raise
    path = TEXT if text is None else Path(text)
    if not path.is_file():
        raise UserError(f"there is no text file {str(path)!r}")
    try:
        words = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{str(path)!r} is not UTF-8 text") from None
    ids = torch.from_numpy(tokenizer.encode_batch([words])[0].astype("int64"))
    if len(ids) < length:
        raise UserError(
            f"{path.name} has {len(ids)} tokens with this model's tokenizer and the length is {length}: give a longer "
            + (f"text, or --length {len(ids)}" if len(ids) else "text")
        )
    ids = ids[:length]
    if int(ids.max()) >= vocab:
        raise UserError(f"the tokenizer gives id {int(ids.max())} and the model's vocabulary has {vocab}")
    pieces = [tokenizer.decode([i]) for i in ids.tolist()]
    return ids, pieces, "relpos' stored text" if text is None else path.name


# Our models.


def _record_ours(body: Any, tokens: Tensor, wanted: list[int]) -> dict[int, Layer]:
    """Terms, and q and k after rotation, of the wanted layers; the model itself runs as it always does."""
    layers: dict[int, Layer] = {}
    numbers = {body.layers[number].attention: number for number in wanted}

    def note(module: Any, args: tuple, call: dict[str, Any]) -> None:
        given = dict(zip(("hidden", "plan"), args)) | call
        hidden, plan = given["hidden"], given["plan"]
        rotation, terms = plan.for_layer(hidden, None)
        q, k, _ = (
            x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in module.qkv(hidden).split(module.sizes, -1)
        )
        q, k = reference.apply_rotation(q, k, rotation)
        scale = module.head_dim**-0.5 if module.config.scale is None else module.config.scale
        layer = Layer(list(terms), q[0].float(), k[0].float(), scale, causal=plan.layout.causal)
        layers[numbers[module]] = families.to_cpu(layer)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in numbers]
    training = body.training
    try:
        body.eval()
        with torch.no_grad():
            body(input_ids=tokens.to(next(body.parameters()).device)[None])
    finally:
        body.train(training)
        for hook in hooks:
            hook.remove()
    return {number: layers[number] for number in wanted}


def _keep_parameters(made: Capture, body: Any) -> None:
    """The trained positional parameters of every layer; not a table that is added to the embeddings, which no map shows
    but through q and k."""
    config = body.config
    specs = config.layer_encodings()
    made.modules = list(body.encodings.of_layer)
    made.specs = [specs[made.modules.index(number)] for number in range(len(body.encodings))]
    made.geometry = {
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
    }
    for number, encoding in enumerate(body.encodings):
        if not encoding.additive and not encoding.rescores:
            continue
        for key, value in encoding.state_dict().items():
            made.parameters[f"{number}.{key}"] = value.detach().float().cpu().clone()


def run_facts(folder: Path) -> dict[str, Any]:
    """What a run folder says about how its model was made: recipe, data, steps, perplexity, commit. Empty for a model
    that was not trained with `relpos train`. A checkpoint inside a run has the run's recipe and its own step."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    path = (folder.resolve().parent if match else folder) / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        settings, spread = run["settings"], run["spread"]
        facts: dict[str, Any] = {
            "recipe": f"{settings['size']} at length {spread['length']}, {run['tokens_per_step']:,} tokens a step, "
            f"seed {settings['seed']}",
            "data": f"{Path(run['data']['folder']).name} ({run['data']['tokenizer']['name']} tokens)",
            "steps": f"{int(match.group(1)):,} of {run['steps']:,}" if match else f"{run['steps']:,}",
        }
        loss = run.get("validation_loss")
        if match:
            lines = path.with_name("validation.jsonl").read_text(encoding="utf-8").splitlines()
            loss = {one["step"]: one["loss"] for one in map(json.loads, lines)}.get(int(match.group(1)))
        if loss is not None:
            facts["perplexity"] = f"{math.exp(loss):.2f} per token, validation"
        if run.get("git"):
            facts["commit"] = run["git"]["commit"][:10] + (" with changes" if run["git"]["changed"] else "")
        return facts
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _layers(wanted: str | Sequence[int], count: int) -> list[int]:
    if wanted == "last":
        return [count - 1]
    if wanted == "all":
        return list(range(count))
    numbers = [wanted] if isinstance(wanted, (int, str)) else list(wanted)
    chosen = []
    for number in numbers:
        if not isinstance(number, int):
            raise UserError(f"layers are 'last', 'all' or numbers, not {number!r}")
        if not -count <= number < count:
            raise UserError(f"there is no layer {number}: the model has {count}, 0 to {count - 1} or -1 for the last")
        chosen.append(number % count)
    return list(dict.fromkeys(chosen))
