"""A whole comparison: train the same model with each of a list of encodings, test it at length, and keep what figures
need. `relpos study` is the command, `docs/study.md` says what came out.

Everything but the encoding is the same: size, text, order of the text, seed, optimizer (the CABLE paper's, arXiv
2503.08067: AdamW 0.9 / 0.95, decay 0.1 on matrices, clip 1.0, 6e-4, cosine to a tenth) and tests. Where we differ from
the paper: steps of 65,536 tokens, a warm-up of 5% of them, and no parameter of an encoding is decayed.

One process per model, so that each starts with an empty GPU and one that fails costs no other. Each leaves
`SLUG-TOKENS-seedN.json` (recipe, loss of every step, speed, memory, perplexity by length, passkey) and beside it the
capture of its last layer, and nothing else unless weights are kept. A file that is there is not made again, so a study
goes on where it was stopped.

On a GPU the next process gets ready while one trains: it imports, builds, compiles and takes its first step, and then
waits for its turn. What is timed, and the tests, run in turn, alone but for that.

Encodings that no fused kernel can run (they rescore whole rows) get a smaller budget, and so, to compare with, do the
encodings that they are built around.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import json
import math
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from transformers import TrainerCallback

import relpos
from relpos import encodings
from relpos.capture.model import TEXT, from_model
from relpos.capture.record import title_of
from relpos.data import TokenData
from relpos.describe import fusable
from relpos.encodings import Encoding
from relpos.errors import UserError, several
from relpos.evaluation import Settings as Protocol
from relpos.evaluation import Text, evaluate, open_text
from relpos.evaluation.passkey import Grid, passkey
from relpos.evaluation.scoring import weights_fingerprint
from relpos.files import read_json
from relpos.training import Settings, Trained, presets, record, train_in_memory
from relpos.training.trainer import write_atomically

FORMAT, VERSION = "relpos-study", 1
ENCODINGS = (
    "cable",
    "cable:form=unweighted",
    "alibi:slopes=geometric",
    "fire",
    "t5:form=clipped",
    "t5",
    "kerple:share=false",
    "rope",
    "learned",
    "sinusoidal:scale=0.1",  # 1 drowns token embeddings of standard deviation 0.02; the CABLE paper's code has 0.1
    "none",
    "fox",
    "dape:version=2,base=kerple",
    "dape:version=2,base=cable",
)
WORK, WEIGHTS = ".work", "weights"  # folders inside the study's
LOCK = "turn.lock"  # a file inside WORK
NO_TIME = 75  # exit status of a process that found too little time left
LARGE = 64 << 30  # bytes of a GPU that holds a whole step of 65,536 tokens of GPT-2 Small at once


@dataclass(frozen=True)
class Study:
    """What is asked for. None means a default that follows from the rest."""

    data: str
    eval_data: tuple[str, ...] = ()  # the first is the main one; none: the validation split of `data`
    out: str = "results/study"
    size: str = "small"
    length: int = 512
    tokens: int = 96_000_000
    dense_tokens: int | None = None  # an eighth
    encodings: tuple[str, ...] = ENCODINGS
    seeds: tuple[int, ...] = (0,)
    tokens_per_step: int = 65_536
    learning_rate: float | None = None  # the preset's
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    eval_tokens: int = 262_145  # of each text; sixteen windows of 16,384
    rows: int | None = None  # windows per pass
    compile: bool | None = None  # None: on a GPU
    keep_weights: bool = False
    time_limit: float | None = None  # seconds; nothing starts that would likely end later
    ahead: int | None = None  # processes that get ready while one has the GPU: 1, and 0 without a GPU
    config: dict[str, Any] = field(default_factory=dict)  # of the model's config, on top of the size


@dataclass(frozen=True)
class Job:
    """One model of a study."""

    spec: str
    seed: int
    tokens: int
    dense: bool  # of the group with the smaller budget

    @property
    def name(self) -> str:
        return f"{encodings.slug(self.spec)}-{short(self.tokens)}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.spec}, {short(self.tokens)} tokens, seed {self.seed}"


def short(count: int) -> str:
    """48000000 -> 48M; a count that is no whole number of thousands as it is."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count % size == 0 and count >= size:
            return f"{count // size}{letter}"
    return str(count)


def parse_count(text: str, what: str) -> int:
    """`96M`, `1.5B`, `500k` or plain digits, as a number of tokens."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMB]?)", text.strip())
    value = float(match.group(1)) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[match.group(2)] if match else 0
    if value < 1 or value != int(value):
        raise UserError(f"{what}: {text!r} is not a number of tokens; write {what} 96M or {what} 96000000")
    return int(value)


def base_of(spec: str) -> str | None:
    """The encoding that one is built around, shared between layers as the whole is; None for the others."""
    whole = encodings.build(spec)
    inner = getattr(whole, "base", None)
    if not isinstance(inner, Encoding):
        return None
    base = encodings.parse(spec)[1].get("base") or str(encodings.options(type(whole))["base"][1])
    if inner.share != whole.share and "share=" not in base:
        base += f"{',' if ':' in base else ':'}share={str(whole.share).lower()}"
    return base


def plan(study: Study) -> list[Job]:
    """The models in the order they are made: every encoding as listed with the first seed, then with the next."""
    specs = several("encodings", study.encodings)
    names = [encodings.slug(spec) for spec in specs]
    if not specs or len(set(names)) < len(names):
        raise UserError(f"{', '.join(specs) or 'the list'} names no encoding, or one of them twice")
    if not study.seeds or len(set(study.seeds)) < len(study.seeds) or min(study.seeds) < 0:
        raise UserError(f"seeds are different whole numbers from 0 on, not {list(study.seeds)}")
    if study.learning_rate is not None and not 0 < study.learning_rate < math.inf:
        raise UserError(f"the learning rate must be above 0, not {study.learning_rate}")
    dense = [spec for spec in specs if not fusable(encodings.build(spec))]
    bases = [base for base in dict.fromkeys(map(base_of, dense)) if base is not None]
    small = study.dense_tokens or max(study.tokens // 8, study.tokens_per_step)
    jobs = []
    for seed in study.seeds:
        jobs += [Job(spec, seed, small if spec in dense else study.tokens, spec in dense) for spec in specs]
        jobs += [Job(spec, seed, small, True) for spec in bases]
    unique: dict[str, Job] = {}
    for job in jobs:  # where the budgets agree, a base is in the list already
        unique.setdefault(job.name, job)
    return list(unique.values())


def ahead(study: Study) -> int:
    """Processes that get ready while one trains."""
    return study.ahead if study.ahead is not None else int(torch.cuda.is_available())


def steps_of(study: Study, job: Job) -> int:
    return math.ceil(job.tokens / study.tokens_per_step)


def recipe(study: Study, job: Job) -> dict[str, Any]:
    """What decides the training, apart from the text."""
    steps = steps_of(study, job)
    return {
        "size": study.size,
        "length": study.length,
        "tokens": steps * study.tokens_per_step,
        "steps": steps,
        "tokens_per_step": study.tokens_per_step,
        "warmup_steps": max(1, round(0.05 * steps)),
        "learning_rate": study.learning_rate or presets.preset(study.size).learning_rate,
        "schedule": "linear warm-up, cosine to 10%",
        "optimizer": "AdamW, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1 on matrices outside the encodings, clip 1",
        "seed": job.seed,
        "config": study.config,
    }


def protocol(study: Study, job: Job) -> tuple[tuple[int, ...], int]:
    """Lengths and tokens of each text. Dense attention is slow: up to 16 times the training length, on a quarter of the
    text, its tests took twice as long on an H200 as training on 6M tokens, so its group reads no more than that."""
    lengths = tuple(sorted(set(study.lengths)))
    if not job.dense:
        return lengths, study.eval_tokens
    return tuple(n for n in lengths if n <= 16 * study.length) or lengths[:1], max(2, (study.eval_tokens - 1) // 4 + 1)


def grid(study: Study, job: Job) -> Grid:
    """The passkey test: a few prompts at every length, as one forward pass scores each."""
    return Grid(protocol(study, job)[0], (0.0, 0.25, 0.5, 0.75, 1.0), keys=2)


def texts(study: Study, job: Job, data: TokenData) -> list[Text]:
    """What the models are tested on, cut to the budget; the dense group reads the first text only."""
    most = protocol(study, job)[1]
    if not study.eval_data and not len(data.validation):
        raise UserError(
            f"{data.folder} has nothing to test on, its validation split is empty: name a text with --eval-data, or "
            "prepare it again with a larger --validation"
        )
    if not study.eval_data:
        return [open_text(data.folder, split="validation", max_tokens=most)]
    found = []
    for source in study.eval_data[:1] if job.dense else study.eval_data:
        path, split, tok = Path(source), "all", None
        if path.is_dir():
            split = "validation" if len(TokenData(path).validation) else "all"
        elif not path.name.endswith((".bin", ".bin.xz")):
            tok = load_tokenizer(data)
        found.append(
            open_text(path, tok, split=split, eot=data.eot, max_tokens=most, model_folder=data.tokenizer_folder)
        )
    return found


def load_tokenizer(data: TokenData) -> Any:
    from transformers import AutoTokenizer

    if data.tokenizer_folder is None:
        raise UserError(
            f"{data.folder} was prepared without its tokenizer, and the passkey test and the captured text need one; "
            "prepare it again with --tokenizer"
        )
    return AutoTokenizer.from_pretrained(str(data.tokenizer_folder))


def asked(study: Study, job: Job, data: TokenData) -> dict[str, Any]:
    """What a result on disk must have been made with to be this one."""
    lengths, most = protocol(study, job)
    return {
        "encoding": job.spec,
        "recipe": recipe(study, job),
        "data": data.fingerprint,
        "texts": [text.about["fingerprint"] for text in texts(study, job, data)],
        "lengths": list(lengths),
        "eval_tokens": most,
    }


def load(folder: str | Path) -> list[dict[str, Any]]:
    """The results of a study, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        value = read_json(path)
        if isinstance(value, dict) and value.get("format") == FORMAT:
            if value["format_version"] > VERSION:
                raise UserError(f"{path} has format version {value['format_version']}; this relpos reads {VERSION}")
            found.append(value)
    return found


# One model, in a process of its own -----------------------------------------------------------------------------------


class NoTime(Exception):
    """The model would likely not be finished before the time is over."""


@dataclass
class Clock:
    """How long the parent guesses training and tests to take, and when all must be over (seconds since the epoch)."""

    deadline: float | None = None
    speed: float | None = None  # tokens per second
    after: float = 0.0  # seconds from the end of training until the process may go

    def need(self, tokens: int) -> float:
        return self.after + (0.0 if self.speed is None else tokens / self.speed)

    def check(self, seconds: float) -> None:
        if self.deadline is not None and time.time() + seconds > self.deadline:
            left = max(0.0, self.deadline - time.time())
            raise NoTime(f"about {seconds:.0f} s would be needed and {left:.0f} s are left")


class Turn(TrainerCallback):
    """After the first step, which compiles: wait until the GPU is ours, see whether the time will do, go on. A little
    later the time is looked at again, with the speed as measured."""

    def __init__(self, lock: Path, clock: Clock, tokens_per_step: int, steps: int, ready: Callable[[Any], None]):
        self.lock, self.clock, self.ready = lock, clock, ready
        self.tokens_per_step, self.steps = tokens_per_step, steps
        self.look = max(3, min(30, steps // 10))
        self.prepared = self.began = math.nan
        self._file: IO[str] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.ready(model)
            self.prepared = time.perf_counter()
            say("ready")
            self.take()
            self.clock.check(self.clock.need((self.steps - 1) * self.tokens_per_step))
            self.began = time.perf_counter()
            say("training")
        elif state.global_step == self.look:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            each = (time.perf_counter() - self.began) / (self.look - 1)
            self.clock.check((self.steps - self.look) * each + self.clock.after)

    def take(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows, where models are made one after the other
            return
        self._file = open(self.lock, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows_of(study: Study, job: Job, halvings: int) -> int | None:
    """Windows per pass; None leaves it to the preset."""
    windows = study.tokens_per_step // study.length
    rows = study.rows
    if rows is None and torch.cuda.is_available():
        large = torch.cuda.get_device_properties(0).total_memory >= LARGE
        if job.dense and not fusable(encodings.build(job.spec)):
            rows = 16 if large else 4  # scores of all heads, a dozen copies of them in every layer
        elif large:
            rows = windows
    if rows is None:
        return None
    most = max(1, min(rows, windows) >> halvings)
    return max(n for n in range(1, most + 1) if windows % n == 0)


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """As in training: bfloat16 autocast on a GPU that has it, else float32."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        yield


def warm(model: Any, length: int) -> None:
    """Compile the kernels of the tests before our turn: they run uncompiled, at lengths of several divisibilities."""
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    was_training = model.training
    model.eval()
    try:
        with inference():
            for shape in ((1, 12), (2, length), (1, length), (2, length - 1), (1, length - 1)):
                model.base_model(torch.zeros(shape, dtype=torch.long, device=model.device), use_cache=False)
        torch.cuda.synchronize()
    except Exception as error:  # the tests will meet it again and record it length by length
        say(f"warming up failed: {type(error).__name__}: {error}")
    finally:
        model.train(was_training)


def measure(study: Study, job: Job, trained: Trained, found: list[Text]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Perplexity by length on each text, and the passkey grid, with the model where it is."""
    lengths, _ = protocol(study, job)
    longest = max((n for n in lengths if all(len(text.tokens) > n for text in found)), default=lengths[0])
    last = min(256, lengths[0])
    settings = Protocol(
        lengths=lengths,
        protocols=("blocks", "last"),
        last=last,
        every=max(last, longest // 2),
        batch_tokens=131_072 if torch.cuda.is_available() else 8192,
    )
    model = trained.model
    if torch.cuda.is_available() and not fusable(encodings.build(job.spec)):
        model.set_impl("blockwise")  # training held whole rows; here they get long
    with inference():
        # The fingerprint reads all weights, which can wait until the GPU has been handed on.
        results = [evaluate(model, text, settings, name=job.name, fingerprint="") for text in found]
        keys = passkey(model, trained.tokenizer, grid(study, job), name=job.name, fingerprint="")
    return results, keys


def slim(value: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """A result of `evaluate` or `passkey` without what the study's own file says, and without the loss of every single
    position: its bins stay."""
    for key in ("identity", "versions", "command", "created", "processes", "seeds", "format_version"):
        value.pop(key, None)
    value["model"] = {**value["model"], "fingerprint": fingerprint}
    for entry in value.get("protocols", {}).values():
        for row in entry["results"]:
            row.pop("seconds", None)
            row.get("positions", {}).pop("loss_f32_base64", None)
    return value


def one(study: Study, job: Job, clock: Clock, attempt: int = 0) -> Path:
    """Train, test and capture one model; its file. `attempt` 1 is the second try: not compiled, smaller passes."""
    began = time.perf_counter()
    out = Path(study.out)
    data = TokenData(study.data)
    found = texts(study, job, data)
    fixed = recipe(study, job)
    cuda = torch.cuda.is_available()
    compiled = (cuda if study.compile is None else study.compile) and attempt == 0
    dense = not fusable(encodings.build(job.spec))
    turn = Turn(out / WORK / LOCK, clock, study.tokens_per_step, fixed["steps"], lambda m: warm(m, study.length))
    settings = Settings(
        encoding=job.spec,
        size=study.size,
        data=study.data,
        out=str(out / WORK / job.name),
        length=study.length,
        steps=fixed["steps"],
        tokens_per_step=study.tokens_per_step,
        rows=rows_of(study, job, attempt),
        learning_rate=fixed["learning_rate"],
        warmup=fixed["warmup_steps"],
        seed=job.seed,
        # Under the compiler blockwise would unroll hundreds of blocks; dense rows of the training length fit.
        impl="reference" if cuda and dense else "auto",
        compile=compiled,
        config=study.config,
        overrides={"logging_steps": max(1, fixed["steps"] // 40)},
    )
    trained = train_in_memory(settings, callbacks=[turn])
    if cuda:
        torch.cuda.synchronize()
    over = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if cuda else None
    torch._dynamo.reset()  # the graphs of a compiled step keep its memory
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    results, keys = measure(study, job, trained, found)
    tested = time.perf_counter()
    turn.release()
    model = trained.model.cpu()
    fingerprint = weights_fingerprint(model)
    ran = json.loads((trained.folder / record.RUN).read_text(encoding="utf-8"))
    lines = record.read_lines(trained.folder / record.METRICS)
    speeds = [steps * study.tokens_per_step / seconds for steps, seconds in trained.rates]
    value: dict[str, Any] = {
        "format": FORMAT,
        "format_version": VERSION,
        "encoding": job.spec,
        "title": title_of(encodings.build(job.spec)),
        "seed": job.seed,
        "budget": job.tokens,
        "group": "dense" if job.dense else "main",
        "asked": asked(study, job, data),
        "recipe": fixed,
        "run": {
            "rows": ran["spread"]["rows"],
            "accumulation": ran["spread"]["accumulation"],
            "compiled": compiled,
            "ahead": ahead(study),
            "implementation": "dense" if dense else "fused" if cuda else "auto",
            "dtype": "bfloat16 autocast" if cuda and torch.cuda.is_bf16_supported() else "float32",
        },
        "model": {**{k: ran["model"][k] for k in ("parameters", "encoding_parameters")}, "fingerprint": fingerprint},
        "data": {
            "name": data.folder.resolve().name,
            "fingerprint": data.fingerprint,
            "train_tokens": len(data.train),
            "tokenizer": data.index["tokenizer"]["name"],
            "unigram_entropy": round(data.unigram_entropy, 6),
            "epochs": round(fixed["tokens"] / len(data.train), 4),
        },
        "train_loss": ran["train_loss"],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "tokens_per_second_whole_run": (fixed["steps"] - 1) * study.tokens_per_step / (over - turn.began)
        if fixed["steps"] > 1
        else None,
        "peak_memory_bytes": peak,
        "seconds": {
            "prepare": round(turn.prepared - began, 2),
            "train": round(over - turn.began, 2),
            "test": round(tested - over, 2),
        },
        "loss": [round(line["loss"], 5) for line in lines],
        "grad_norm": [round(line["grad_norm"], 4) for line in lines],
        "evaluation": [slim(result, fingerprint) for result in results],
        "passkey": slim(keys, fingerprint),
        "device": ran["device"],
        "git": ran["git"],
        "versions": ran["versions"],
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    keep_capture(value, model, trained.tokenizer, out / f"{job.name}.safetensors")
    if study.keep_weights:
        keep_weights(trained, out / WEIGHTS / job.name)
    path = out / f"{job.name}.json"
    write_atomically(path, compact(value))
    shutil.rmtree(trained.folder, ignore_errors=True)
    say(f"{path}: {summary(value)}")
    return path


def compact(value: dict[str, Any]) -> str:
    """JSON with a key per line, and lists of numbers on one."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda m: "[" + re.sub(r",\s+", ", ", m[1]) + "]", text) + "\n"


def at(value: dict[str, Any], protocol: str, length: int, text: int = 0) -> dict[str, Any] | None:
    """The line of one protocol and length, if it was measured."""
    entry = value["evaluation"][text]["protocols"].get(protocol, {"results": []})
    return next((row for row in entry["results"] if row["length"] == length and row["status"] == "ok"), None)


def summary(value: dict[str, Any]) -> str:
    rows = [row for row in value["evaluation"][0]["protocols"]["blocks"]["results"] if row["status"] == "ok"]
    shown = ", ".join(f"{row['length']}: {row['perplexity'] or math.inf:.2f}" for row in rows)
    speed = value["tokens_per_second"]
    took = value["seconds"]
    return (
        f"loss {value['train_loss']:.3f}; perplexity {shown}; "
        + (f"{speed:,.0f} tokens/s; " if speed else "")
        + f"{took['prepare']:.0f} s to get ready, {took['train']:.0f} s of training, {took['test']:.0f} s of tests"
    )


def keep_capture(value: dict[str, Any], model: Any, tokenizer: Any, path: Path) -> None:
    """The last layer on the text that ships with relpos, on the CPU: nobody else needs to wait for it."""
    words = TEXT.read_text(encoding="utf-8")
    ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"][: value["recipe"]["length"]]
    fixed, size = value["recipe"], value["recipe"]["size"]
    row = at(value, "blocks", fixed["length"])
    git = value["git"]
    held = value["evaluation"][0]["data"]["source"]
    facts = {
        "model": f"{size}, {model.config.num_hidden_layers} layers of {model.config.num_attention_heads} heads, "
        f"{value['model']['parameters']:,} parameters",
        "recipe": f"{size} at length {fixed['length']}, {fixed['tokens_per_step']:,} tokens a step, "
        f"seed {fixed['seed']}",
        "data": f"{value['data']['name']} ({value['data']['tokenizer']} tokens)",
        "steps": f"{fixed['steps']:,}",
        "perplexity": f"{row['perplexity']:.2f} per token at {fixed['length']}, {held}"
        if row is not None and row["perplexity"] is not None
        else f"{math.exp(min(value['train_loss'], 50)):.2f} per token, training",
        "commit": git["commit"][:10] + (" with changes" if git["changed"] else "") if git else f"v{relpos.__version__}",
        "text": "relpos' stored text",
    }
    model.set_impl("reference")
    made = from_model(
        model, tokens=ids, length=len(ids), layers="last", content=False, name=path.stem, provenance=facts
    )
    made.pieces = [tokenizer.decode([i]) for i in ids]
    made.save(path, half=True)


def keep_weights(trained: Trained, folder: Path) -> None:
    """A folder that every command takes: weights, tokenizer, run.json, metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    trained.model.set_impl("auto")
    trained.model.save_pretrained(folder)
    if trained.tokenizer is not None:
        trained.tokenizer.save_pretrained(folder)
    for name in (record.RUN, record.METRICS):
        shutil.copyfile(trained.folder / name, folder / name)


def _child(text: str) -> int:
    """`python -m relpos.study JSON`: one model. 0: done; NO_TIME: not begun or given up for lack of time."""
    given = json.loads(text)
    with contextlib.suppress(AttributeError, OSError):  # Linux: go when the parent goes, even if it is killed
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != given["parent"]:
            return 1
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for plugin in given["plugins"]:
        encodings.load_file(plugin)
    known = given["study"]
    for name in ("eval_data", "encodings", "seeds", "lengths"):
        known[name] = tuple(known[name])
    try:
        one(Study(**known), Job(**given["job"]), Clock(**given["clock"]), given["attempt"])
    except NoTime as error:
        say(f"no time: {error}")
        return NO_TIME
    except UserError as error:
        say(f"relpos: {error}")
        return 2
    return 0


# All of them ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one model: "done", "there" (made before), "left" (no time) or "failed"."""

    job: Job
    status: str
    error: str = ""  # of one that is there: what it lacks


@dataclass
class Process:
    job: Job
    attempt: int
    clock: Clock
    popen: subprocess.Popen[str]
    log: Path
    began: float | None = None  # when it got the GPU, time.time()

    def left(self) -> float:
        """Seconds it will likely still take."""
        need = self.clock.need(self.job.tokens)
        return need if self.began is None else max(0.0, self.began + need - time.time())


def estimate(study: Study, job: Job, cuda: bool) -> Clock:
    """Guesses from what the study has finished on such a device, else from experience."""
    device = torch.cuda.get_device_name() if cuda else "cpu"
    dense = not fusable(encodings.build(job.spec))

    def alike(value: dict[str, Any]) -> bool:
        kind = value["run"]["implementation"] == "dense"
        return value["device"] == device and value["recipe"]["size"] == study.size and kind == dense

    known = [value for value in load(study.out) if alike(value)]
    speeds = [v["tokens_per_second_whole_run"] for v in known if v["tokens_per_second_whole_run"]]
    tests = [v["seconds"]["test"] for v in known if v["group"] == ("dense" if job.dense else "main")]
    speed: float | None = statistics.median(speeds) if speeds else None
    if speed is None and cuda:
        speed = 40_000 if dense else 350_000
    after = max(tests) if tests else (180.0 if dense else 20.0) if cuda else 0.0
    return Clock(speed=speed, after=after + 3)


def _plugins() -> list[str]:
    """Files of encodings that this process has loaded: the others need them too."""
    loaded = [encodings.get(name) for name in encodings.names()]
    return [inspect.getfile(cls) for cls in loaded if cls.__module__.startswith("relpos_encoding_")]


class Runner:
    """Starts the processes, passes on what they say, and keeps account."""

    def __init__(self, study: Study):
        self.study = study
        self.cuda = torch.cuda.is_available()
        self.live: list[Process] = []
        self.ended: queue.Queue[Process] = queue.Queue()
        self.deadline = None if study.time_limit is None else time.time() + study.time_limit

    def start(self, job: Job, attempt: int = 0) -> None:
        clock = estimate(self.study, job, self.cuda)
        clock.deadline = self.deadline
        work = Path(self.study.out) / WORK
        shutil.rmtree(work / job.name, ignore_errors=True)
        given = {
            "parent": os.getpid(),
            "plugins": _plugins(),
            "study": dataclasses.asdict(self.study),
            "job": dataclasses.asdict(job),
            "clock": dataclasses.asdict(clock),
            "attempt": attempt,
        }
        source = str(Path(relpos.__file__).resolve().parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.getenv("PYTHONPATH")]))}
        # What is compiled lies in one place for all processes; leave some cores to the one that trains.
        environment.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
        environment.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) - 4)))
        popen = subprocess.Popen(
            [sys.executable, "-m", "relpos.study", json.dumps(given)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        process = Process(job, attempt, clock, popen, work / f"{job.name}.log")
        self.live.append(process)
        reader = threading.Thread(target=self._listen, args=(process,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()

    def _listen(self, process: Process) -> None:
        assert process.popen.stdout is not None
        with open(process.log, "w", encoding="utf-8") as log:
            for line in process.popen.stdout:
                log.write(line)
                log.flush()
                if line.strip() == "training":
                    process.began = time.time()
                say(f"[{process.job.name}] {line.rstrip()}")

    def _wait(self, process: Process, reader: threading.Thread) -> None:
        process.popen.wait()
        reader.join(10)  # compilers that it started may hold its output open a little longer
        self.ended.put(process)

    def fits(self, job: Job) -> bool:
        if self.deadline is None:
            return True
        before = sum(process.left() for process in self.live)
        need = estimate(self.study, job, self.cuda).need(job.tokens)
        return time.time() + before + need <= self.deadline

    def outcome(self, process: Process) -> Outcome | None:
        """What an ended process means; None where it is tried once more."""
        status = process.popen.returncode
        if status == 0 and (Path(self.study.out) / f"{process.job.name}.json").is_file():
            process.log.unlink(missing_ok=True)
            return Outcome(process.job, "done")
        last = process.log.read_text(encoding="utf-8").strip().splitlines()[-1:] or [f"exit status {status}"]
        if status == NO_TIME:
            return Outcome(process.job, "left", last[0].removeprefix("no time: "))
        if self.cuda and process.attempt == 0 and self.fits(process.job):
            say(f"[{process.job.name}] failed ({last[0]}): once more, not compiled and with smaller passes")
            self.start(process.job, 1)
            return None
        return Outcome(process.job, "failed", f"{last[0]} (all of it in {process.log})")

    def run(self, jobs: list[Job]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        waiting = list(jobs)
        try:
            while waiting or self.live:
                while len(self.live) <= ahead(self.study):
                    job = next(filter(self.fits, waiting), None)  # a shorter one where the next would take too long
                    if job is None:
                        break
                    waiting.remove(job)
                    self.start(job)
                if not self.live:
                    why = "it would likely not be finished in time"
                    outcomes += [Outcome(job, "left", why) for job in waiting]
                    break
                process = self.ended.get()
                self.live.remove(process)
                found = self.outcome(process)
                if found is not None:
                    outcomes.append(found)
        finally:
            for process in self.live:
                process.popen.terminate()
            for process in self.live:
                process.popen.wait()
        return outcomes


def check(study: Study, jobs: list[Job]) -> list[Job]:
    """Mistakes are found before anything runs. Returns what is missing."""
    if not study.lengths:
        raise UserError("name at least one length to test at")
    if study.ahead is not None and study.ahead < 0:
        raise UserError(f"ahead must be at least 0, not {study.ahead}")
    presets.shape(study.length, study.tokens_per_step, presets.preset(study.size).rows, 1, study.rows)
    data = TokenData(study.data)
    load_tokenizer(data)
    missing = []
    wanted: dict[bool, dict[str, Any]] = {}
    for job in jobs:
        common = wanted.setdefault(job.dense, asked(study, job, data))
        path = Path(study.out) / f"{job.name}.json"
        if not path.is_file():
            missing.append(job)
            continue
        known = read_json(path)
        now = {**common, "encoding": job.spec, "recipe": recipe(study, job)}
        if not isinstance(known, dict) or known.get("asked") != now:
            raise UserError(f"{path} was made with another recipe, text or test: choose another --out, or delete it")
    return missing


def _there(study: Study, job: Job) -> Outcome:
    """Weights cannot be kept afterwards, and hours of training are not repeated without being asked for."""
    lacks = study.keep_weights and not (Path(study.out) / WEIGHTS / job.name / record.RUN).is_file()
    again = f"its weights were not kept: delete {job.name}.json to train it again" if lacks else ""
    return Outcome(job, "there", again)


def run(study: Study) -> list[Outcome]:
    """Make what is missing of a study. One that fails does not stop the others."""
    jobs = plan(study)
    study = dataclasses.replace(
        study,
        data=str(Path(study.data).resolve()),
        eval_data=tuple(str(Path(p).resolve()) for p in study.eval_data),
        out=str(Path(study.out).resolve()),
    )
    missing = check(study, jobs)
    work = Path(study.out) / WORK
    work.mkdir(parents=True, exist_ok=True)
    there = [_there(study, job) for job in jobs if job not in missing]
    if there:
        say(f"already there: {', '.join(outcome.job.name for outcome in there)}")
    for outcome in there:
        if outcome.error:
            say(f"{outcome.job.name}: {outcome.error}")
    outcomes = there + Runner(study).run(missing)
    with contextlib.suppress(OSError):  # another study that worked here may have removed it
        if all(path.name == LOCK for path in work.iterdir()):  # else one failed, or another study is at work
            (work / LOCK).unlink(missing_ok=True)
            work.rmdir()
    return outcomes


if __name__ == "__main__":
    # Run as a file this module is __main__; what it raises and catches must be the classes of the imported one.
    from relpos.study import _child as child

    sys.exit(child(sys.argv[1]))
