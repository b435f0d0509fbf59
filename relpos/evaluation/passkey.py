"""Passkey retrieval for base models: is a number said once, far back, still found?

After Mohtashami and Jaggi, "Landmark Attention" (https://arxiv.org/abs/2305.16300): filler text with one sentence that
states a five-digit pass key, then a question whose answer is the key. The grid is length x depth (how far into the
filler the key stands: 0 the beginning, 1 right before the question), a few keys per cell. It is fixed by the seed:
every model with the same tokenizer reads the very same prompts.

Where we differ, so that it works for base models and for any tokenizer, bytes too:
- Prompts are put together from token ids, so that prompt and answer are exactly `length` tokens at every depth.
- The key is spelled digit by digit (" 7 1 4 3 2"; "71432" where the tokenizer has no even spelling with spaces), so
  that each digit is decided by one token.
- One forward pass scores a prompt. The right digits are set against all distractors at once: at each digit the nine
  other digits compete, and by the chain rule the product is the likelihood of the key among all 100,000 numbers.
  Greedy decoding gives the key exactly if the most likely token of the whole vocabulary is right at every step, so that
  needs no generation either.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relpos.errors import UserError, several
from relpos.evaluation import result
from relpos.evaluation.folders import Outcome, each_folder, model_folder
from relpos.evaluation.perplexity import Failure, Partial, about_model, cost_per_token, explain
from relpos.evaluation.scoring import Scorer, load_tokenizer, release
from relpos.evaluation.sharing import World, progress

INTRODUCTION = (
    "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it. "
    "You will be asked about it.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
BEFORE, BETWEEN, AFTER = "\nThe pass key is", ". Remember it.", " is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DIGITS = 5
BATCH_TOKENS = 16384  # prompts read together
MEASURES = ("log_likelihood", "digits_first_of_ten", "greedy_digits", "greedy_key")
CHANCE = -DIGITS * math.log(10)  # of the log likelihood: every number equally likely
STATEMENT = (
    "{keys} prompts per cell of length x depth; a prompt and its answer are exactly `length` tokens. The key of "
    "{digits} digits is spelled {spelling} per digit and stated twice in one place. log_likelihood: of the key among "
    "all numbers of that many digits (each digit against the other nine, given the right ones before it). "
    "digits_first_of_ten: share of digits more likely than the other nine. greedy_digits: share whose tokens are the "
    "most likely of the whole vocabulary, given the right ones before. greedy_key: share of prompts where greedy "
    "decoding gives the whole key."
)


@dataclass(frozen=True)
class Grid:
    """The defaults take a minute or two for a nano model on two cores. The cost of a prompt grows with the square of
    its length: one of 16,384 tokens costs as much as sixteen of 4,096."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    keys: int = 2  # prompts per cell
    seed: int = 0

    def resolve(self) -> Grid:
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"lengths must be whole numbers of tokens from 1 on, not {list(self.lengths)}")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"depths lie between 0 (the beginning) and 1 (the end), not {list(self.depths)}")
        if self.keys < 1:
            raise UserError(f"each cell needs at least one key, not {self.keys}")
        if self.seed < 0:
            raise UserError(f"the seed must be 0 or more, not {self.seed}")
        return Grid(tuple(sorted(set(self.lengths))), tuple(sorted(set(self.depths))), self.keys, self.seed)


class Prompts:
    """Builds prompts of an exact number of tokens with one tokenizer."""

    def __init__(self, tokenizer: Any, filler: str = FILLER):
        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        self.digits, self.spelling = self._digits(ids)
        self.introduction = [*self._bos(tokenizer), *ids(INTRODUCTION)]
        self.filler = ids(filler)
        if not self.filler:
            raise UserError("the filler text is empty")
        self.before, self.between, self.after, self.question = ids(BEFORE), ids(BETWEEN), ids(AFTER), ids(QUESTION)
        self.answer_length = DIGITS * len(self.digits[0])

    @staticmethod
    def _bos(tokenizer: Any) -> list[int]:
        """What the tokenizer itself puts before a text."""
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        marked = tokenizer("a")["input_ids"]
        return list(marked[: len(marked) - len(plain)]) if marked[-len(plain) :] == plain else []

    @staticmethod
    def _digits(ids: Any) -> tuple[list[list[int]], str]:
        """Token ids of each digit: equally many, and alike up to the last, so that one token decides."""
        for spelling in (" {}", "{}"):
            pieces = [ids(spelling.format(d)) for d in range(10)]
            even = len({len(p) for p in pieces}) == 1 and len({tuple(p[:-1]) for p in pieces}) == 1
            if even and pieces[0] and len({p[-1] for p in pieces}) == 10:
                return pieces, spelling
        raise UserError("this tokenizer does not tell the ten digits apart by one token each: passkey cannot be scored")

    @property
    def shortest(self) -> int:
        """Tokens of a prompt and its answer without any filler."""
        fixed = self.introduction, self.before, self.between, self.after, self.question
        return sum(map(len, fixed)) + 3 * self.answer_length

    def build(self, length: int, depth: float, key: str, offset: int = 0) -> np.ndarray:
        """Prompt and answer, `length` ids; the answer is the last `answer_length` of them."""
        room = length - self.shortest
        if room < 0:
            raise UserError(
                f"a passkey prompt needs at least {self.shortest} tokens with this tokenizer; {length} is too short"
            )
        spelled = [i for d in key for i in self.digits[int(d)]]
        needle = [*self.before, *spelled, *self.between, *spelled, *self.after]
        start = np.arange(offset, offset + room) % len(self.filler)
        filler = np.asarray(self.filler)[start]
        cut = round(depth * room)
        parts = [self.introduction, filler[:cut], needle, filler[cut:], self.question, spelled]
        return np.concatenate([np.asarray(p, np.int64) for p in parts])


def prompts_of_cell(prompts: Prompts, grid: Grid, length: int, depth: float) -> tuple[np.ndarray, list[str]]:
    """The prompts of one cell, [keys, length], and their keys: drawn from the seed, the length and the depth alone."""
    draw = np.random.default_rng([grid.seed, length, round(depth * 1e6)])
    keys = [f"{n:0{DIGITS}d}" for n in draw.integers(0, 10**DIGITS, grid.keys)]
    offsets = draw.integers(0, len(prompts.filler), grid.keys)
    return np.stack([prompts.build(length, depth, k, int(o)) for k, o in zip(keys, offsets, strict=True)]), keys


def score(scorer: Scorer, prompts: Prompts, ids: np.ndarray, keys: list[str]) -> np.ndarray:
    """Per prompt, [4, prompts] in the order of MEASURES: log likelihood of the key among all numbers, share of digits
    most likely of ten, digits and key by greedy choice."""
    n, T = prompts.answer_length, ids.shape[1]
    together = max(1, BATCH_TOKENS // T)  # prompts of a cell share the work of building their biases
    # Row t of the logits predicts the token behind it: the last row of the prompt and all but the last of the answer.
    parts = [scorer.logits(ids[i : i + together, :-1], T - 1 - n) for i in range(0, len(ids), together)]
    logits = np.concatenate(parts).astype(np.float64)
    answer = ids[:, -n:]  # [prompts, n]
    greedy = logits.argmax(-1) == answer
    per_digit = len(prompts.digits[0])
    deciding = logits[:, per_digit - 1 :: per_digit]  # [prompts, DIGITS, vocabulary]: the rows that tell digits apart
    ten = deciding[:, :, [p[-1] for p in prompts.digits]]
    logp = ten - np.log(np.exp(ten - ten.max(-1, keepdims=True)).sum(-1, keepdims=True)) - ten.max(-1, keepdims=True)
    right = np.asarray([[int(d) for d in key] for key in keys])
    chosen = np.take_along_axis(logp, right[..., None], -1)[..., 0]
    digits = greedy.reshape(len(ids), DIGITS, per_digit).all(-1)
    return np.stack([chosen.sum(-1), (ten.argmax(-1) == right).mean(-1), digits.mean(-1), greedy.all(-1)]).astype(
        np.float32
    )


def passkey(
    model: Any,
    tokenizer: Any,
    grid: Grid | None = None,
    *,
    name: str = "model",
    path: str = "",
    filler: str = FILLER,
    out: Path | None = None,
    overwrite: bool = False,
    world: World | None = None,
    shown: bool = False,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """Run the grid. With `out`, a file name, the result is written there."""
    world = world or World()
    grid = (grid or Grid()).resolve()
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer in its folder, and a passkey prompt is text")
    was_training = model.training
    model.eval()
    scorer = Scorer(model)
    prompts = Prompts(tokenizer, filler)
    largest = max(max(map(max, prompts.digits)), max(prompts.introduction), max(prompts.filler), max(prompts.question))
    if largest >= scorer.vocabulary:
        raise UserError(
            f"the tokenizer gives id {largest} and the model's vocabulary ends at {scorer.vocabulary - 1}: "
            "they do not match"
        )
    about = about_model(model, name, path, fingerprint) | {"position_limit": scorer.limit}
    settings = asdict(grid) | {
        "filler": result.digest(filler) if filler != FILLER else "default",
        "spelling": prompts.spelling,
    }
    parts = {
        "format_version": result.FORMAT_VERSION,
        "model": about,
        "settings": settings,
        "device": scorer.device.type,
    }
    identity = result.digest(parts)
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    if out is not None and out.exists() and not overwrite:
        known = result.read_json(out, (result.PASSKEY,))
        if known.get("identity") != identity:
            raise UserError(f"{out} exists and was made with other settings or weights: --overwrite replaces it")
        kept, whole = result.measured(known)
        if whole:
            return known

    partial = Partial(None if out is None else out.with_name(out.name + ".partial"), parts, world)
    cells = [(T, d) for T in grid.lengths if ("passkey", T) not in kept for d in grid.depths]
    mine: dict[tuple[int, float], np.ndarray] = {}
    # A study asks for the lengths of its perplexities: some may have no room for the prompt, with whatever model.
    short = f"a passkey prompt needs at least {prompts.shortest} tokens with this tokenizer"
    failures = {T: Failure("too short", short) for T in grid.lengths if T < prompts.shortest}
    cost = {T: T * cost_per_token(model, T) for T in grid.lengths}
    share = sum(cost[T] for T, _ in cells[world.rank :: world.size])
    with progress(share, f"{name} passkey", shown and world.first) as bar:
        if kept:
            bar.say(f"{name}: what failed before is tried again, the rest of {out} is kept")
        for T, depth in cells[world.rank :: world.size]:
            if T in failures:
                bar.step(cost[T], found=True)
                continue
            place = ("passkey", T, grid.depths.index(depth))
            held = partial.get(*place, (len(MEASURES), grid.keys))
            found = held is not None
            try:
                if held is None:
                    scorer.check(T - 1)
                    held = score(scorer, prompts, *prompts_of_cell(prompts, grid, T, depth))
                    partial.put(*place, held)
                mine[T, depth] = held
                bar.step(cost[T], f"{T} at {depth:g}", found)
            except (UserError, ValueError, IndexError, RuntimeError, MemoryError) as error:
                failures[T] = explain(error, T)
                bar.step(cost[T], found=True)
                bar.say(f"{bar.label}: {T}: {failures[T].reason}")
                release()
    everyone = world.gather((mine, failures))
    scores = {cell: value for part, _ in everyone for cell, value in part.items()}
    failed = {T: failure for _, part in everyone for T, failure in part.items()}

    rows = []
    for T in grid.lengths:
        if ("passkey", T) in kept:
            rows.append(kept["passkey", T])
            continue
        if T in failed:
            rows.append({"length": T, "status": failed[T].status, "reason": failed[T].reason})
            continue
        row: dict[str, Any] = {"length": T, "status": "ok", "cells": []}
        for depth in grid.depths:
            means = {
                key: round(float(np.mean(value, dtype=np.float64)), 6)
                for key, value in zip(MEASURES, scores[T, depth], strict=True)
            }
            row["cells"].append({"depth": depth, **means})
        for key in MEASURES:
            row[key] = round(float(np.mean([cell[key] for cell in row["cells"]])), 6)
        rows.append(row)
    value = {
        "format": result.PASSKEY,
        "format_version": result.FORMAT_VERSION,
        "identity": identity,
        "model": about,
        "settings": settings,
        "protocol": {
            "statement": STATEMENT.format(keys=grid.keys, digits=DIGITS, spelling=repr(prompts.spelling.format(7))),
            "chance": {"log_likelihood": CHANCE, "digits_first_of_ten": 0.1, "greedy_digits": None, "greedy_key": None},
            "prompt": {
                "introduction": INTRODUCTION,
                "filler": FILLER if filler == FILLER else "given",
                "question": QUESTION,
            },
            "shortest_prompt": prompts.shortest,
        },
        "results": rows,
        "seeds": {"keys": grid.seed},
        "versions": result.versions(scorer.device),
        "processes": world.size,
        "command": result.command(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if out is not None and world.first:
        result.write_json(out, value)
        partial.remove()
    world.gather(None)
    model.train(was_training)
    return value


def passkey_folders(
    paths: list[str],
    out: str | Path,
    grid: Grid | None = None,
    *,
    filler: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    impl: str | None = None,
    overwrite: bool = False,
    shown: bool = True,
) -> list[Outcome]:
    """Models one after the other, `NAME.passkey.json` each in `out`. One that fails does not stop the others."""
    grid = (grid or Grid()).resolve()
    text = FILLER
    if filler is not None:
        try:
            text = Path(filler).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the filler text {filler}: {error}") from None

    def check(tokenizer: Any, path: str) -> None:
        """A length without room for the prompt is a mistake in the question, not a limit of the model."""
        try:
            shortest = 0 if tokenizer is None else Prompts(tokenizer, text).shortest
        except UserError:
            return  # `passkey` says it, of this model alone
        short = [str(T) for T in grid.lengths if T < shortest]
        if short:
            raise UserError(
                f"--lengths {','.join(short)}: a passkey prompt needs at least {shortest} tokens with the tokenizer of "
                f"{path}; write --lengths {shortest} or more"
            )

    paths = [model_folder(path) for path in several("paths", paths)]
    for path in paths:  # before any model is read
        if (Path(path) / "config.json").is_file():
            check(load_tokenizer(path), path)

    def work(model: Any, tokenizer: Any, outcome: Outcome, file: Path, world: World) -> dict[str, Any]:
        check(tokenizer, outcome.path)  # of a model on the hub it is known only now
        return passkey(
            model,
            tokenizer,
            grid,
            name=outcome.name,
            path=Path(outcome.path).name,
            filler=text,
            out=file,
            overwrite=overwrite,
            world=world,
            shown=shown,
        )

    return each_folder(paths, out, ".passkey.json", work, device=device, dtype=dtype, impl=impl)
