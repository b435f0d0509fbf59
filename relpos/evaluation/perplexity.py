"""Perplexity by length: `exp` of the mean loss per token, under protocols that the result file states.

`evaluate` takes a model and a text; `evaluate_folders` is the command, over any number of models. The loss of every
counted token is computed once, kept as float32, and everything else (means, intervals, loss by position) is derived
from those in a fixed order, so that a resumed run and one shared by several processes give the same file.

A killed evaluation resumes: each finished batch of windows lies in `RESULT.partial/` until the result is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relpos.errors import UserError, several
from relpos.evaluation import protocols, result, statistics
from relpos.evaluation.context import effective_context
from relpos.evaluation.folders import Outcome, each_folder, model_folder
from relpos.evaluation.protocols import Settings, Windows
from relpos.evaluation.scoring import (
    Scorer,
    parameter_count,
    pick_device,
    release,
    weights_fingerprint,
)
from relpos.evaluation.sharing import Progress, World, progress
from relpos.evaluation.text import Text, open_text


class Partial:
    """Finished batches on disk. `folder=None` keeps nothing."""

    def __init__(self, folder: Path | None, identity: dict[str, Any], world: World):
        self.folder = folder
        self.note = ""
        if folder is None:
            return
        problem = self._set_up(folder, result.digest(identity)) if world.first else None
        problem = world.gather(problem)[0]  # nobody reads or writes before the folder is in order
        if problem:
            raise UserError(problem)

    def _set_up(self, folder: Path, identity: str) -> str | None:
        """Empty the folder unless it belongs to this very evaluation. Returns what went wrong."""
        plan = folder / "plan"
        try:
            if plan.is_file() and plan.read_text(encoding="utf-8") == identity:
                if any(folder.glob("*.npy")):
                    self.note = f"going on with what {folder} holds"
                return None
            if folder.exists():
                self.note = f"{folder} belongs to other settings or another model: starting anew"
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            plan.write_text(identity, encoding="utf-8")
        except OSError as error:
            return f"cannot write to {folder.parent}: {error.strerror or error}"
        return None

    def path(self, protocol: str, T: int, batch: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{protocol}-{T}-{batch:06d}.npy"

    def get(self, protocol: str, T: int, batch: int, shape: tuple[int, ...]) -> np.ndarray | None:
        if self.folder is None:
            return None
        try:
            found = np.load(self.path(protocol, T, batch), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == shape and found.dtype == np.float32 else None

    def put(self, protocol: str, T: int, batch: int, losses: np.ndarray) -> None:
        if self.folder is None:
            return
        target = self.path(protocol, T, batch)
        staged = target.with_suffix(".tmp")
        with open(staged, "wb") as file:
            np.save(file, losses, allow_pickle=False)
        os.replace(staged, target)

    def remove(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Failure:
    status: str  # "unsupported": the model cannot by its nature; "too short": no prompt fits; "failed": anything else
    reason: str


def explain(error: BaseException, T: int) -> Failure:
    if isinstance(error, UserError):
        # The ids are valid, so a model that raises this declines the length itself (its table ends, say).
        return Failure("unsupported", str(error))
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(error):
        return Failure(
            "failed",
            f"out of memory at {T} tokens: try --dtype bfloat16, a smaller --batch-tokens, or --impl blockwise",
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Failure("failed", f"{type(error).__name__}: {first}")


@dataclass
class _Job:
    """What all parts of one evaluation share."""

    scorer: Scorer
    text: Text
    settings: Settings
    plan: dict[tuple[str, int], Windows]
    too_short: dict[int, str]
    kept: dict[tuple[str, int], dict[str, Any]]  # lines of an earlier result that another length made incomplete
    partial: Partial
    world: World
    bar: Progress
    tokenizer: Any


def _score(job: _Job, protocol: str, T: int, cost: float) -> tuple[list[np.ndarray] | None, Failure | None, float]:
    """The losses of all batches, in order and in every process, or why not; and the seconds this process computed."""
    windows, world, bar = job.plan[protocol, T], job.world, job.bar
    batches = windows.batches(job.settings.batch_tokens)
    mine: dict[int, np.ndarray] = {}
    failure: Failure | None = None
    seconds = 0.0
    for number in range(world.rank, len(batches), world.size):
        group = batches[number]
        size, first = int(windows.size[group[0]]), int(windows.first[group[0]])
        losses = job.partial.get(protocol, T, number, (len(group), size - first))
        found = losses is not None
        if losses is None:
            start = time.perf_counter()
            ids = np.stack([job.text.tokens[s : s + size + 1] for s in windows.start[group]]).astype(np.int64)
            inputs = ids[:, :-1]
            if job.settings.bos is not None:
                inputs = inputs.copy()
                inputs[:, 0] = job.settings.bos
            try:
                losses = job.scorer.losses(inputs, ids[:, 1:], first)
            except (UserError, ValueError, IndexError, RuntimeError, MemoryError) as error:
                failure = explain(error, T)
                release()
                break
            seconds += time.perf_counter() - start
            job.partial.put(protocol, T, number, losses)
        mine[number] = losses
        bar.step(cost * len(group) * size, f"{protocol} {T}", found)
    everyone = world.gather((mine, failure))
    for _, theirs in everyone:
        if theirs is not None:
            return None, theirs, seconds
    merged = {number: losses for part, _ in everyone for number, losses in part.items()}
    return [merged[number] for number in range(len(batches))], None, seconds


def _bins(T: int) -> np.ndarray:
    """Edges of the bins of positions: single positions at first, then four per doubling."""
    edges = np.unique(np.round(2.0 ** (np.arange(0, 4 * math.log2(T) + 4) / 4)).astype(np.int64))
    return np.append(edges[edges <= max(1, 0.9 * T)], T + 1)  # no sliver of a bin at the end


def _row(
    T: int,
    windows: Windows,
    batches: list[np.ndarray],
    losses: list[np.ndarray],
    starts: np.ndarray,
    with_positions: bool,
) -> dict[str, Any]:
    """One line of results from the losses of all counted tokens."""
    C = len(starts)
    cluster_loss, cluster_tokens = np.zeros(C), np.zeros(C, np.int64)
    position_loss, position_tokens = np.zeros(T), np.zeros(T, np.int64)
    context, bad = 0, 0
    for group, part in zip(batches, losses, strict=True):
        first = int(windows.first[group[0]])
        rows = np.arange(first, first + part.shape[1])
        targets = windows.start[group][:, None] + rows[None] + 1
        cluster = np.searchsorted(starts, targets.ravel(), side="right") - 1
        cluster_loss += np.bincount(cluster, part.ravel().astype(np.float64), C)
        cluster_tokens += np.bincount(cluster, minlength=C)
        position_loss[rows] += part.astype(np.float64).sum(0)
        position_tokens[rows] += len(group)
        context += int((rows + 1).sum()) * len(group)
        bad += int((~np.isfinite(part)).sum())
    tokens = int(cluster_tokens.sum())
    if bad:
        return {
            "length": T,
            "status": "failed",
            "reason": f"the loss of {bad} of {tokens} tokens is not a finite number",
        }
    mean = statistics.clustered_mean(cluster_loss, cluster_tokens)
    low, high = (None if x is None else result.finite(np.exp(min(x, 1000.0))) for x in (mean.low, mean.high))
    row: dict[str, Any] = {
        "length": T,
        "status": "ok",
        "perplexity": result.finite(np.exp(min(mean.value, 1000.0))),
        "ci95": [low, high],
        "loss": mean.value,
        "loss_stderr": mean.stderr,
        "loss_ci95": [mean.low, mean.high],
        "tokens": tokens,
        "windows": len(windows),
        "full_windows": int((windows.size == T).sum()),
        "tokens_read": int(windows.size.sum()),
        "mean_context": context / tokens,
        "cluster_loss": [round(float(x), 6) for x in cluster_loss],
    }
    if with_positions:
        edges = _bins(T)
        lower, upper = edges[:-1] - 1, edges[1:] - 1  # rows [lower, upper) are positions lower + 1 .. upper
        count = np.add.reduceat(position_tokens, lower)
        total = np.add.reduceat(position_loss, lower)
        every = np.divide(position_loss, position_tokens, out=np.full(T, np.nan), where=position_tokens > 0)
        row["positions"] = {
            "meaning": "mean loss of the tokens with exactly n tokens before them in the window, n = 1 .. length",
            "bins": {
                "from": [int(x) for x in lower + 1],
                "to": [int(x) for x in upper],
                "tokens": [int(x) for x in count],
                "loss": [round(float(a / b), 6) if b else None for a, b in zip(total, count, strict=True)],
            },
            "loss_f32_base64": result.pack(every),  # NaN where no window has the position
            "tokens_per_position": [int(position_tokens.min()), int(position_tokens.max())],
        }
    return row


def cost_per_token(model: Any, T: int) -> float:
    """Work per token at length T, in arbitrary units: the matrices, and the attention that grows with T."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    layers, width = getattr(config, "num_hidden_layers", 1) or 1, getattr(config, "hidden_size", 1) or 1
    return float(parameter_count(model) + layers * width * T)


def about_model(model: Any, name: str, path: str = "", fingerprint: str | None = None) -> dict[str, Any]:
    """What the result file says about the model. Ours state their encoding and training length. The fingerprint reads
    every weight: a caller who measures one model several times may take it once."""
    config = model.config
    encoding = getattr(config, "encoding", None)
    return {
        "name": name,
        "path": path,
        "class": type(model).__name__,
        "encoding": encoding if isinstance(encoding, (str, list)) else None,
        "train_length": getattr(config, "train_length", None),
        "parameters": parameter_count(model),
        "vocabulary": int(model.get_input_embeddings().num_embeddings),
        "dtype": str(model.dtype).removeprefix("torch."),
        "impl": getattr(config, "impl", None),
        "fingerprint": weights_fingerprint(model) if fingerprint is None else fingerprint,
    }


def training_of(path: str | Path) -> dict[str, Any] | None:
    """How a run of `relpos train` was made, in short, from its run.json; None for other folders."""
    for folder in (Path(path), Path(path).parent):  # a checkpoint lies inside its run
        try:
            run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            steps = run["steps"]
            if folder != Path(path):
                steps = int(Path(path).name.removeprefix("checkpoint-"))
            return {
                "seed": run["settings"]["seed"],
                "size": run["settings"]["size"],
                "steps": steps,
                "tokens": steps * run["tokens_per_step"],
                "data_fingerprint": run["data"]["fingerprint"],
                "commit": (run.get("git") or {}).get("commit"),
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _check_vocabulary(text: Text, scorer: Scorer) -> None:
    largest = max(int(text.tokens[i : i + (1 << 24)].max()) for i in range(0, len(text.tokens), 1 << 24))
    if largest >= scorer.vocabulary:
        raise UserError(
            f"the text holds token id {largest} and the model's vocabulary ends at {scorer.vocabulary - 1}: the text "
            "was cut into tokens with another tokenizer. Prepare it with the model's own"
        )


def evaluate(
    model: Any,
    text: Text,
    settings: Settings | None = None,
    *,
    tokenizer: Any = None,
    name: str = "model",
    path: str = "",
    training: dict[str, Any] | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    world: World | None = None,
    shown: bool = False,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """Score a model on a text. With `out`, a file name, the result is written there and a killed run resumes.

    The model is used as it is: its device, dtype and kernel. A `tokenizer` adds bits per byte; `training` goes into the
    file as it is, with its "seed". Returns the result, the same in every process.
    """
    world = world or World()
    settings = (settings or Settings()).resolve(text)
    was_training = model.training
    model.eval()
    scorer = Scorer(model)
    _check_vocabulary(text, scorer)
    fit, too_short = protocols.fitting(text, settings)
    if not fit:
        raise UserError(f"no length fits: {too_short[min(too_short)]}")
    about = about_model(model, name, path, fingerprint)
    about |= {"position_limit": scorer.limit, "logits": scorer.how}
    identity = {
        "format_version": result.FORMAT_VERSION,
        "model": about,
        "data": text.about,
        "settings": settings.as_dict(),
        "device": scorer.device.type,
    }
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    if out is not None and out.exists() and not overwrite:
        known = result.read_json(out, (result.PERPLEXITY,))
        if known.get("identity") != result.digest(identity):
            raise UserError(f"{out} exists and was made with other settings, data or weights: --overwrite replaces it")
        kept, whole = result.measured(known)
        if whole:
            return known
    partial = Partial(None if out is None else out.with_name(out.name + ".partial"), identity, world)

    plan = {(p, T): protocols.windows(p, T, text, settings) for p in settings.protocols for T in fit}
    missing = {place: w for place, w in plan.items() if place not in kept}
    share = sum(float(w.size.sum()) * cost_per_token(model, T) for (_, T), w in missing.items()) / world.size
    found: dict[str, Any] = {}
    with progress(share, name, shown and world.first) as bar:
        if partial.note:
            bar.say(partial.note)
        if kept:
            bar.say(f"{name}: what failed before is tried again, the rest of {out} is kept")
        job = _Job(scorer, text, settings, plan, too_short, kept, partial, world, bar, tokenizer)
        for protocol in settings.protocols:
            found[protocol] = _protocol(job, protocol)
    value = {
        "format": result.PERPLEXITY,
        "format_version": result.FORMAT_VERSION,
        "identity": result.digest(identity),
        "model": about | {"training": training},
        "data": text.about,
        "settings": settings.as_dict(),
        "interval": {"level": 0.95, "method": statistics.METHOD},
        "protocols": found,
        "effective_context": effective_context(found.get("last")),
        "seeds": {
            "training": None if training is None else training["seed"],
            "evaluation": None,
            "why": "no random number is drawn: windows, order and intervals are fixed by the settings",
        },
        "versions": result.versions(scorer.device),
        "processes": world.size,
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,  # the older call fails where both were used
        "command": result.command(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if out is not None and world.first:
        result.write_json(out, value)
        partial.remove()
    world.gather(None)  # the file is there when any process returns
    model.train(was_training)
    return value


def _protocol(job: _Job, protocol: str) -> dict[str, Any]:
    """All lengths under one protocol."""
    text, plan, settings, bar = job.text, job.plan, job.settings, job.bar
    fit = [T for p, T in plan if p == protocol]
    targets = plan[protocol, fit[-1]].targets()
    size = _bytes(text, targets, job.tokenizer)
    starts, what = statistics.cluster_borders(text.documents, int(targets.min()), int(targets.max()) + 1)
    cluster = np.searchsorted(starts, targets, side="right") - 1
    entry: dict[str, Any] = {
        "statement": protocols.statement(protocol, settings, fit[-1]),
        "scored": {
            "tokens": len(targets),
            "first": int(targets.min()),
            "last": int(targets.max()),
            "bytes": size,
            "fingerprint": _places(targets),
        },
        "same_tokens_at_every_length": all(_places(plan[protocol, T].targets()) == _places(targets) for T in fit),
        "clusters": {"what": what, "tokens": np.bincount(cluster, minlength=len(starts)).tolist()},
        "results": [],
    }
    for T in settings.lengths:
        if T in job.too_short:
            entry["results"].append({"length": T, "status": "too short", "reason": job.too_short[T]})
            bar.say(f"{bar.label}: {protocol} {T}: {job.too_short[T]}")
            continue
        if (protocol, T) in job.kept:
            entry["results"].append(job.kept[protocol, T])
            continue
        windows = plan[protocol, T]
        losses, failure, seconds = _score(job, protocol, T, cost_per_token(job.scorer.model, T))
        if failure is not None:
            bar.step(0.0)
            row: dict[str, Any] = {"length": T, "status": failure.status, "reason": failure.reason}
        else:
            assert losses is not None
            row = _row(T, windows, windows.batches(settings.batch_tokens), losses, starts, protocol == "blocks")
            row["seconds"] = round(seconds, 6)
            if size is not None and row["status"] == "ok":
                row["bits_per_byte"] = row["loss"] * row["tokens"] / math.log(2) / size
        if row["status"] == "ok":
            bar.say(f"{bar.label}: {protocol} {T}: perplexity {_shown(row)}")
        else:
            bar.say(f"{bar.label}: {protocol} {T}: {row['reason']}")
        entry["results"].append(row)
    return entry


BYTES_UP_TO = 1 << 23  # tokens: decoding more takes longer than it is worth


def _bytes(text: Text, targets: np.ndarray, tokenizer: Any) -> int | None:
    """UTF-8 bytes that the counted tokens stand for: what makes models with different tokenizers comparable. Special
    tokens stand for none; a character cut by the end of a stretch counts as its replacement."""
    if tokenizer is None or len(targets) > BYTES_UP_TO:
        return None
    runs = np.split(targets, np.flatnonzero(np.diff(targets) != 1) + 1)
    try:
        texts = (tokenizer.decode(text.tokens[run].tolist(), skip_special_tokens=True) for run in runs)
        return sum(len(part.encode("utf-8", "replace")) for part in texts) or None
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return None  # ids the tokenizer does not know, in a padded vocabulary


def _places(targets: np.ndarray) -> str:
    """A fingerprint of which tokens count."""
    return "sha256:" + hashlib.sha256(np.sort(targets).astype("<i8").tobytes()).hexdigest()[:32]


def _shown(row: dict[str, Any]) -> str:
    low, high = row["ci95"]
    value = "over 1e300" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
    return value if low is None or high is None else f"{value} ({low:.2f} to {high:.2f})"


# The command: any number of folders.


def evaluate_folders(
    paths: list[str],
    data: str | Path,
    out: str | Path,
    settings: Settings | None = None,
    *,
    split: str = "validation",
    eot: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | None = None,
    bos: bool = False,
    batch_tokens: int | None = None,
    overwrite: bool = False,
    shown: bool = True,
) -> list[Outcome]:
    """Evaluate models one after the other, one JSON each in `out`. One that fails does not stop the others."""
    settings = settings or Settings()
    on_gpu = pick_device(device).type == "cuda"
    batch_tokens = (65536 if on_gpu else 8192) if batch_tokens is None else batch_tokens
    settings = dataclasses.replace(settings, batch_tokens=batch_tokens).resolve()
    if not Path(data).exists():
        raise UserError(
            f"there is no text {str(data)!r}: expected a prepared folder, a .bin or .bin.xz, or a text file"
        )

    paths = [model_folder(path) for path in several("paths", paths)]

    def work(model: Any, tokenizer: Any, outcome: Outcome, file: Path, world: World) -> dict[str, Any]:
        text = open_text(data, tokenizer, split=split, eot=eot, max_tokens=max_tokens, model_folder=outcome.path)
        own = dataclasses.replace(settings, bos=_bos(outcome.path, tokenizer, model)) if bos else settings
        return evaluate(
            model,
            text,
            own,
            tokenizer=tokenizer,
            name=outcome.name,
            path=Path(outcome.path).name,
            training=training_of(outcome.path),
            out=file,
            overwrite=overwrite,
            world=world,
            shown=shown,
        )

    return each_folder(paths, out, ".json", work, device=device, dtype=dtype, impl=impl)


def _bos(path: str, tokenizer: Any, model: Any) -> int:
    """The id that begins a text."""
    for holder in (tokenizer, getattr(model, "generation_config", None), model.config):
        value = getattr(holder, "bos_token_id", None)
        if isinstance(value, int):
            return value
    raise UserError(f"{path} has no beginning-of-text token: leave --bos out")
