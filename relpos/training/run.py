"""One training run from settings to a folder that `from_pretrained` loads, and several of them side by side.

    RUN/config.json, model.safetensors, tokenizer.json ...   the final model
    RUN/checkpoint-N/                                        the last few checkpoints, for --resume
    RUN/run.json                                             command, settings, versions, commit, data, how it went
    RUN/metrics.jsonl, validation.jsonl, tensorboard/        every optimizer step; every evaluation
    RUN/loss.png, sample.txt                                 the picture; what the model writes

The Trainer does the training; here its arguments, its data and its model are put together and its results put away.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gc
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from relpos import encodings
from relpos.data import TokenData, Windows, collate, prepare
from relpos.data.loader import MaskedRows
from relpos.data.tokenizer import MASK
from relpos.errors import UserError, too_large
from relpos.models import RelPosConfig, RelPosEncoderConfig, RelPosForCausalLM, RelPosForMaskedLM, loss
from relpos.training import presets, record
from relpos.training.trainer import RelPosTrainer, could_not_write, decayed, is_full, last_checkpoint, sync_folder

TASKS = ("clm", "mlm")


@dataclass
class Settings:
    """A run. None means: what the size's preset says (or, for `data`, the standard library's source)."""

    encoding: str = "kerple"
    size: str = "nano"
    data: str | None = None
    out: str | None = None
    task: str = "clm"
    length: int | None = None
    steps: int | None = None
    tokens_per_step: int | None = None
    rows: int | None = None  # windows per device and pass
    learning_rate: float | None = None
    warmup: int | None = None
    seed: int = 0
    documents: bool = False  # attention does not cross document borders
    vocab_size: int | None = None
    init_from: str | None = None
    decay_encodings: bool = False
    impl: str = "auto"
    compile: bool | None = None  # None: on a GPU
    fsdp: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # of the model's config, on top of the size
    overrides: dict[str, Any] = field(default_factory=dict)  # of TrainingArguments


# What a run writes into its folder, checkpoints and events aside: its records, the model, any tokenizer.
_FILES = (
    rf"({'|'.join(map(re.escape, (record.RUN, record.METRICS, record.VALIDATION)))}|loss\.png|sample\.txt"
    r"|(generation_)?config\.json|model.*\.safetensors(\.index\.json)?"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|(merges|vocab)\.txt|chat_template\.jinja)"
)
# A resumed run may change these; anything else would make it another run.
_FREE = {"out", "impl", "compile", "fsdp", "rows", "overrides"}


@dataclass
class Trained:
    """A finished run, its model still in memory."""

    folder: Path
    model: Any = None
    tokenizer: Any = None
    rates: list[tuple[int, float]] = field(default_factory=list)  # (steps, seconds) between flushes, without the first


def train_in_memory(settings: Settings, *, callbacks: list[TrainerCallback] | None = None) -> Trained:
    """One run for a caller who wants the model itself: `out` gets run.json and metrics.jsonl, and nothing else is
    written, drawn, sampled or evaluated. It cannot be resumed; a run in `out` is replaced. On a GPU the compiled step
    keeps its memory until `torch._dynamo.reset()`."""
    encodings.build(settings.encoding)
    overrides = {"save_strategy": "no", "eval_strategy": "no", **settings.overrides}
    return _train_one(dataclasses.replace(settings, overrides=overrides), False, True, None, callbacks, bare=True)


def train(
    settings: Settings,
    *,
    resume: bool = False,
    overwrite: bool = False,
    given: set[str] | None = None,
    callbacks: list[TrainerCallback] | None = None,
) -> list[Path]:
    """Train every encoding that `settings.encoding` lists, one after the other, and return the run folders.

    Several encodings go into subfolders of `out`, with the same seed and data order, and are compared there. `given`
    names the settings that the caller chose; on resume the others come from the run itself.
    """
    specs = encodings.split_list(settings.encoding)
    for spec in specs:
        encodings.build(spec)
    names = [encodings.slug(spec) for spec in specs]
    if len(set(names)) < len(names):
        raise UserError(f"{settings.encoding!r} lists the same encoding twice")
    main = _is_main()
    single = len(specs) == 1
    if settings.out is None and resume:
        raise UserError("--resume needs --out RUN: the run to go on with")
    out = Path(settings.out) if settings.out else _free_name("-".join(names[:3]) + f"-{settings.size}")
    if single:
        return [_train_one(dataclasses.replace(settings, out=str(out)), resume, overwrite, given, callbacks).folder]
    folders = {}
    for spec, name in zip(specs, names, strict=True):
        one = dataclasses.replace(settings, encoding=spec, out=str(out / name))
        again = resume and (out / name / record.RUN).is_file()  # the kill may have come before this one began
        _say(f"== {spec}", main)
        folders[spec] = _train_one(one, again, overwrite, given, callbacks).folder
        _free_graphs()
    if main:
        compare(folders, out)
    return list(folders.values())


# Where we are.


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _say(text: str, main: bool) -> None:
    if main:
        print(text, file=sys.stderr, flush=True)


def _free_name(name: str) -> Path:
    """`runs/kerple-nano`, or with -2, -3, ... where that is taken."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # every process must come to the same name
        raise UserError("with several processes, say where the run goes: --out RUN")
    path = Path("runs") / name
    number, candidate = 2, path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def _folder(
    out: Path, settings: Settings, resume: bool, overwrite: bool, given: set[str] | None, main: bool
) -> Settings:
    """Check the run folder and make it; on resume, the settings it was started with."""
    known = (out / record.RUN).is_file()
    if resume:
        if not known:
            raise UserError(f"there is no run in {str(out)!r} to resume; start one without --resume")
        return _resumed(out, settings, given)
    if not main:  # the first process looks, and may have begun to write already
        return settings
    if out.exists() and not out.is_dir():
        raise UserError(f"{str(out)!r} is a file; --out is the folder of the run")
    if known and not overwrite:
        raise UserError(
            f"{str(out)!r} already holds a run: go on (--resume), replace it (--overwrite), or take another --out"
        )
    if out.is_dir() and not known and any(out.iterdir()):
        raise UserError(f"{str(out)!r} is not empty and holds no run; choose another --out")
    if known:
        _remove_run(out)
    out.mkdir(parents=True, exist_ok=True)
    return settings


def _remove_run(out: Path) -> None:
    """Delete what a run writes, and nothing else."""
    for path in out.iterdir():
        if path.is_dir():
            if re.fullmatch(r"\.?checkpoint-\d+|tensorboard|\.final", path.name):
                shutil.rmtree(path)
        elif re.fullmatch(_FILES, path.name.removeprefix(".")):  # a dot while it is written
            path.unlink(missing_ok=True)


def _resumed(out: Path, settings: Settings, given: set[str] | None) -> Settings:
    stored = record.read_run(out)["settings"]
    chosen = dataclasses.asdict(settings)
    names = set(chosen) if given is None else given
    for name in sorted(names - _FREE):
        if name == "data" and chosen[name] is None:  # the default, which the run has named
            continue
        if chosen[name] != stored[name] and not _same_path(name, chosen[name], stored[name]):
            raise UserError(
                f"{str(out)!r} was started with {name}={stored[name]!r}; --resume cannot change it to "
                f"{chosen[name]!r}. Leave it out, or start another run"
            )
    free = {name: chosen[name] for name in names & _FREE}
    free["overrides"] = stored["overrides"] | free.get("overrides", {})
    return Settings(**{**stored, **free, "out": str(out)})


def _same_path(name: str, a: Any, b: Any) -> bool:
    return name in ("data", "init_from") and a is not None and b is not None and Path(a).resolve() == Path(b).resolve()


# Data.


def default_data(size: str, main_first: Any) -> str:
    """The standard library's source as tokens, made once per tokenizer and kept in the cache folder."""
    tokenizer = presets.preset(size).tokenizer
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(os.environ.get("RELPOS_CACHE") or home / "relpos") / f"stdlib-{python}-{tokenizer.replace(':', '-')}"
    with main_first():
        prepare("stdlib", folder, tokenizer, validation=0.02, progress=_is_main())
    return str(folder)


def _open_data(path: str) -> TokenData:
    data = TokenData(path)
    size = (len(data.train) + len(data.validation)) * data.dtype.itemsize
    if size <= 1 << 28:  # a second's work; `relpos data check` does it for the large ones
        data.verify()
    return data


# The model.


def _tokenizer(data: TokenData, task: str) -> tuple[Any, int | None]:
    """The tokenizer that travels with the run, and the id of the mask for MLM (added where the tokenizer has none)."""
    tok = None
    if data.tokenizer_folder is not None:
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(str(data.tokenizer_folder))
    if task != "mlm":
        return tok, None
    if tok is None:
        return None, data.vocab_size
    if tok.mask_token_id is None:
        tok.add_special_tokens({"mask_token": MASK})
    return tok, int(tok.mask_token_id)


def _check_init_tokenizer(source: Path, data: TokenData) -> None:
    """A checkpoint's own tokenizer must give the ids that the data holds."""
    from relpos.data import tokenizer

    if data.tokenizer_hash is None or not (source / "tokenizer.json").is_file():
        return
    theirs = tokenizer.load(source)
    ours = tokenizer.load(data.tokenizer_folder) if data.tokenizer_folder else None
    if ours is None or theirs.hash == data.tokenizer_hash:
        return
    # A run that added a token (a mask, say) still reads the same text in the same way.
    added = set(theirs.backend.get_vocab().items()) ^ set(ours.backend.get_vocab().items())
    probe = ["Hello world, it's 12345!\n\n\tdef f(x):  return x**2"]
    if len(added) <= 8 and theirs.encode_batch(probe)[0].tolist() == ours.encode_batch(probe)[0].tolist():
        return
    raise UserError(
        f"the tokenizer in {str(source)!r} is not the one that made {str(data.folder)!r}; prepare the text again with "
        f"--tokenizer {source}"
    )


def _model(
    settings: Settings, data: TokenData, tok: Any, mask: int | None, length: int
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the weights that are new where it starts from another one."""
    needed = max(data.vocab_size, 0 if mask is None else mask + 1)
    if settings.init_from is not None:
        model = _from(settings, data)
        if model.config.vocab_size < needed:
            raise UserError(
                f"the vocabulary of {settings.init_from!r} is too small: {model.config.vocab_size} ids, and the data "
                f"needs {needed}"
            )
        model.config.train_length = length
        return model, list(model.new_weights)
    vocab_size = settings.vocab_size if settings.vocab_size is not None else math.ceil(needed / 64) * 64
    if vocab_size < needed:
        raise UserError(f"--vocab-size {vocab_size} is too small: the data holds token ids up to {needed - 1}")
    pad = None if tok is None else tok.pad_token_id
    chosen: dict[str, Any] = dict(
        vocab_size=vocab_size,
        train_length=length,
        bos_token_id=data.eot,
        eos_token_id=data.eot,
        pad_token_id=pad,
        impl=settings.impl,
    )
    config = RelPosConfig.preset(settings.size, settings.encoding, **{**chosen, **settings.config})
    try:
        if settings.task == "mlm":
            return RelPosForMaskedLM(RelPosEncoderConfig.of(config)), []
        return RelPosForCausalLM(config), []
    except (RuntimeError, MemoryError) as error:
        if not too_large(error):
            raise
        raise UserError(f"the memory of this machine does not hold such a model (vocabulary {vocab_size:,})") from error


def _from(settings: Settings, data: TokenData) -> Any:
    """Start from one of our checkpoints or a stock GPT-2 or BERT, with the encoding swapped."""
    assert settings.init_from is not None
    source = Path(settings.init_from)
    if not (source / "config.json").is_file():
        raise UserError(f"--init-from {settings.init_from!r} is no folder with a model (config.json and safetensors)")
    kind = json.loads((source / "config.json").read_text(encoding="utf-8")).get("model_type")
    wanted = {"clm": ("relpos", "gpt2"), "mlm": ("relpos_encoder", "bert")}[settings.task]
    if kind not in wanted:
        given = f"and {settings.init_from!r} is {kind}"
        raise UserError(f"--task {settings.task} starts from {' or '.join(wanted)}, {given}")
    _check_init_tokenizer(source, data)
    cls = RelPosForCausalLM if settings.task == "clm" else RelPosForMaskedLM
    encoding = encodings.by_name(settings.encoding)  # a file has been imported, and a config must not name it
    if kind == "gpt2":
        return RelPosForCausalLM.from_gpt2(source, encoding=encoding, impl=settings.impl)
    if kind == "bert":
        return RelPosForMaskedLM.from_bert(source, encoding=encoding, impl=settings.impl)
    model = cls.from_pretrained(source, encoding=encoding)
    model.set_impl(settings.impl)
    return model


def _check_length(model: PreTrainedModel, length: int, encoding: str) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise UserError(
            f"{encoding} has a table of {most} positions and the windows are {length} tokens long; shorten --length or "
            f"ask for a longer table, max_positions={length}"
        )


# One run.


def _train_one(
    settings: Settings,
    resume: bool,
    overwrite: bool,
    given: set[str] | None,
    callbacks: list[TrainerCallback] | None,
    bare: bool = False,
) -> Trained:
    main, out = _is_main(), Path(settings.out or "")
    settings = _folder(out, settings, resume, overwrite, given, main)
    try:
        return _run(settings, out, resume, main, callbacks, bare)
    except BaseException as error:
        # A mistake found before the first step leaves no folder behind.
        if main and not resume and isinstance(error, UserError) and not record.read_lines(out / record.METRICS):
            _remove_run(out)
        if main and not resume and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise


def _device(overrides: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a GPU is used, and whether it does bfloat16."""
    cuda = torch.cuda.is_available() and not overrides.get("use_cpu", False)
    return cuda, cuda and torch.cuda.is_bf16_supported()


def _run(
    settings: Settings, out: Path, resume: bool, main: bool, callbacks: list[TrainerCallback] | None, bare: bool
) -> Trained:
    from accelerate import PartialState

    if settings.task not in TASKS:
        raise UserError(f"--task is clm or mlm, not {settings.task!r}")
    base = presets.preset(settings.size)
    overrides = dict(settings.overrides)
    cuda, bf16 = _device(overrides)
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not cuda and (settings.fsdp or overrides.get("fsdp") or launched):
        raise UserError("FSDP2 through the Trainer needs GPUs: on a CPU it would silently run DDP instead")
    state = PartialState(cpu=not cuda)
    if cuda:
        loss.CELLS = loss.cells_for(torch.cuda.get_device_properties(state.device).total_memory)
    length = base.length if settings.length is None else settings.length

    if settings.data is None:
        settings = dataclasses.replace(settings, data=default_data(settings.size, state.main_process_first))
    data = _open_data(settings.data or "")
    settings = dataclasses.replace(settings, data=str(data.folder.resolve()))  # a resume may start elsewhere
    spread = presets.shape(
        length,
        base.tokens_per_step if settings.tokens_per_step is None else settings.tokens_per_step,
        base.rows,
        state.num_processes,
        _either(settings.rows, "--rows", overrides, "per_device_train_batch_size"),
        overrides.pop("gradient_accumulation_steps", None),
    )
    steps = _steps(settings, overrides, base, data, spread)
    rate = _either(settings.learning_rate, "--learning-rate", overrides, "learning_rate")
    rate = base.learning_rate if rate is None else rate
    warmup = _either(settings.warmup, "--warmup", overrides, "warmup_steps")
    warmup = min(base.warmup, max(steps // 10, 1)) if warmup is None else warmup
    for what, value, good in (
        ("the learning rate must be above 0", rate, isinstance(rate, (int, float)) and 0 < rate < math.inf),
        ("the warm-up must be 0 or more steps", warmup, isinstance(warmup, (int, float)) and warmup >= 0),
        ("the seed must be from 0 to 4294967295", settings.seed, 0 <= settings.seed < 1 << 32),
    ):
        if not good:
            raise UserError(f"{what}, not {value}")

    transformers_logging.disable_progress_bar()  # a bar for every file that is saved
    set_seed(settings.seed)
    tok, mask = _tokenizer(data, settings.task)
    step, checkpoint, skipped = last_checkpoint(out) if resume else (0, None, [])
    if checkpoint is not None and settings.init_from is not None:  # what it started from may be gone
        settings_of_model = dataclasses.replace(settings, init_from=str(checkpoint))
    else:
        settings_of_model = settings
    model, new = _model(settings_of_model, data, tok, mask, length)
    _check_length(model, length, settings.encoding)
    train_set = Windows(
        data.train, length, seed=settings.seed, count=steps * spread.rows_per_step, documents=settings.documents
    )
    held = _held_out(data, length, spread, settings.documents, base.held_out)
    if overrides.get("eval_strategy") == "no":
        held = None
    args = presets.arguments(
        out=str(out),
        base=base,
        spread=spread,
        steps=steps,
        warmup=warmup,
        learning_rate=rate,
        seed=settings.seed,
        cuda=cuda,
        bf16=bf16,
        compiled=cuda if settings.compile is None else settings.compile,
        fsdp=settings.fsdp,
        evaluates=held is not None,
        overrides=overrides,
    )
    run = record.RunFile(out, main)
    if resume:
        _check_resume(run, data, spread, out)
        for path in skipped:
            _say(f"passing over {path}: it is not complete", main)
        if run.content.get("status") == "complete":
            _say(f"{out} is complete already", main)
            return Trained(out)
    if main:
        for stale in out.glob(".checkpoint-*"):
            shutil.rmtree(stale)
        for name in (record.METRICS, record.VALIDATION):
            record.keep_until(out / name, step)
    parameters = sum(p.numel() for p in model.parameters())
    of_encoding = sum(p.numel() for m in model.modules() if isinstance(m, encodings.Encoding) for p in m.parameters())
    run.update(
        status="running",
        command=shlex.join(sys.argv),
        settings=dataclasses.asdict(settings),
        versions=record.versions(),
        git=record.git_commit(),
        data={
            "folder": str(data.folder.resolve()),
            "fingerprint": data.fingerprint,
            "tokenizer": data.index["tokenizer"],
            "train_tokens": len(data.train),
            "unigram_entropy": data.unigram_entropy,
        },
        model={
            "parameters": parameters,
            "encoding_parameters": of_encoding,
            "new_weights": run.content.get("model", {}).get("new_weights", new),
            "decayed": decayed(model, settings.decay_encodings),
        },
        steps=steps,
        tokens_per_step=spread.tokens_per_step,
        spread=dataclasses.asdict(spread),
        device=torch.cuda.get_device_name() if cuda else "cpu",
        started=run.content.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        resumed_at=[*run.content.get("resumed_at", []), step] if resume else [],
    )
    _announce(settings, data, spread, steps, parameters, of_encoding, new, out, step if resume else None, main)

    flops = record.flops_per_token(model, length)
    peak = record.peak_flops(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if bf16 else torch.float32)
    screen = record.Screen(
        out,
        steps=steps,
        tokens_per_step=spread.tokens_per_step,
        flops=flops,
        peak=peak * state.num_processes,
        main=main,
        first=step,
        events=not bare,
    )
    borders = None
    if settings.documents:
        borders = max(train_set.borders(), 0 if held is None else held.borders())
    if mask is None:
        collator: Any = Collator(borders)
    else:
        collator = MaskedRows(mask=mask, vocab_size=data.vocab_size, seed=settings.seed, borders=borders)
    with _refusals(settings, Exception):
        trainer = RelPosTrainer(
            model=model,
            args=args,
            train_dataset=train_set,
            eval_dataset=held,
            data_collator=collator,
            processing_class=tok,
            callbacks=[screen, *(callbacks or [])],
            decay_encodings=settings.decay_encodings,
            on_flush=screen.record,
        )
    trainer.remove_callback(PrinterCallback)
    began = time.perf_counter()
    try:
        with _refusals(settings, ValueError, TypeError, begun=lambda: screen.step > step):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.graphs and not bare:
            _free_graphs()
        # The last evaluation will do, unless an earlier checkpoint has been loaded since.
        tested = _just_evaluated(out, steps) and not args.load_best_model_at_end
        final_loss = trainer.evaluate()["eval_loss"] if held is not None and not tested else None
        if not bare:
            _save_final(trainer, out, main)
    except UserError as error:
        run.update(status="failed", error=str(error))
        raise
    except torch.OutOfMemoryError as error:
        run.update(status="failed", error="out of memory")
        raise UserError(
            f"the GPU's memory does not hold {spread.rows} windows of {spread.length} tokens at once; --rows "
            f"{max(spread.rows // 2, 1)} takes less and changes nothing else"
        ) from error
    except OSError as error:
        if is_full(error):  # in a line of the metrics, say
            raise could_not_write(error, out, f"step {screen.step}") from error
        raise
    except KeyboardInterrupt:
        run.update(status="interrupted")
        _say(f"stopped at step {screen.step}; go on with: relpos train --resume --out {out}", main)
        raise
    finally:
        screen.close()
    _finish(run, screen, data, out, time.perf_counter() - began, final_loss, tok, mask, settings, main, bare)
    trainer.accelerator.wait_for_everyone()
    plain = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    trainer.accelerator.free_memory()
    return Trained(out, plain, tok, screen.rates)


@contextlib.contextmanager
def _refusals(settings: Settings, *kinds: type[Exception], begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """What the Trainer says of overrides that TrainingArguments let pass, before the first step has begun."""
    try:
        yield
    except kinds as error:
        if not settings.overrides or isinstance(error, UserError) or begun():
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the Trainer refuses these settings ({', '.join(settings.overrides)}): {first}") from error


def _free_graphs() -> None:
    """Give back the memory of a step, which its graphs keep as long as the compiled code is there."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Collator:
    """`collate` with its border count, as an object a worker process can receive."""

    def __init__(self, borders: int | None):
        self.borders = borders

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collate(rows, self.borders)


def _either(ours: Any, option: str, overrides: dict[str, Any], name: str) -> Any:
    """What an option of ours says, or `--set` of the field it stands for, which is then taken out of the overrides."""
    theirs = overrides.pop(name, None)
    if ours is not None and theirs is not None and ours != theirs:
        raise UserError(f"{option} {ours} and --set {name}={theirs} contradict each other: give one of them")
    return theirs if ours is None else ours


def _steps(
    settings: Settings, overrides: dict[str, Any], base: presets.Preset, data: TokenData, spread: presets.Shape
) -> int:
    steps = _either(settings.steps, "--steps", overrides, "max_steps")
    epochs = overrides.pop("num_train_epochs", None)
    if steps is None and epochs is not None:
        if not isinstance(epochs, (int, float)):
            raise UserError(f"num_train_epochs must be a number, not {epochs!r}")
        steps = math.ceil(epochs * (len(data.train) // spread.length) / spread.rows_per_step)
    steps = base.steps if steps is None else steps
    if not isinstance(steps, int) or steps < 1:
        raise UserError(f"a run needs at least one step, not {steps!r}")
    return steps


def _held_out(data: TokenData, length: int, spread: presets.Shape, documents: bool, most: int) -> Windows | None:
    """Windows from all over the validation split, always the same, a whole number of batches; None if too few."""
    batch = spread.rows * spread.processes
    count = min(len(data.validation) // length, max(most, batch)) // batch * batch
    if count == 0:
        return None
    return Windows(data.validation, length, count=count, documents=documents)


def _just_evaluated(out: Path, steps: int) -> bool:
    lines = record.read_lines(out / record.VALIDATION)
    return bool(lines) and lines[-1]["step"] == steps


def _check_resume(run: record.RunFile, data: TokenData, spread: presets.Shape, out: Path) -> None:
    before = run.content.get("data", {}).get("fingerprint")
    if before is not None and before != data.fingerprint:
        raise UserError(f"the data in {data.folder} is not what {out} was started with (its fingerprint differs)")
    tokens = run.content.get("tokens_per_step", spread.tokens_per_step)
    if tokens != spread.tokens_per_step:
        raise UserError(
            f"{str(out)!r} was started with {tokens:,} tokens a step, and {spread.rows} windows of {spread.length} "
            f"tokens, {spread.accumulation} times on {spread.processes} processes, are {spread.tokens_per_step:,}: "
            "give --rows or gradient_accumulation_steps, not both, and the other follows"
        )


def _announce(
    settings: Settings, data: TokenData, spread: presets.Shape, steps: int, parameters: int, of_encoding: int,
    new: list[str], out: Path, resumed: int | None, main: bool,
) -> None:  # fmt: skip
    lines = [
        f"{settings.encoding}, {settings.size}, {settings.task}: {parameters:,} parameters, {of_encoding:,} of them "
        f"the encoding's; {steps:,} steps of {spread.tokens_per_step:,} tokens ({spread.rows} x {spread.length}"
        + (f", {spread.accumulation} times" if spread.accumulation > 1 else "")
        + (f", {spread.processes} processes" if spread.processes > 1 else "")
        + f") into {out}",
        f"data: {len(data.train):,} tokens, {steps * spread.tokens_per_step / max(len(data.train), 1):.2f} epochs; "
        f"unigram entropy {data.unigram_entropy:.3f} nats",
    ]
    if settings.init_from is not None:
        shown = ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")
        lines.append(f"from {settings.init_from}: new weights: {shown or 'none'}")
    idle = torch.cuda.device_count() - spread.processes
    if idle > 0 and spread.processes == 1 and torch.cuda.is_available():
        use = f"torchrun --nproc-per-node {idle + 1} --no-python relpos train ..."
        lines.append(f"{idle} more GPUs are idle; {use} uses them all")
    if resumed is not None:
        lines.append(f"resuming after step {resumed}" if resumed else "no complete checkpoint: starting anew")
    _say("\n".join(lines), main)


def _save_final(trainer: RelPosTrainer, out: Path, main: bool) -> None:
    """The model into RUN itself: staged, then file by file, last the one by which a folder is known to hold a model."""
    staged = out / ".final"
    try:
        if main:
            shutil.rmtree(staged, ignore_errors=True)
        trainer.save_model(str(staged), _internal_call=True)
        if main:
            sync_folder(staged)
            for path in sorted(staged.iterdir(), key=lambda p: p.name == "config.json"):
                os.replace(path, out / path.name)
            staged.rmdir()
    except Exception as error:  # OSError, SafetensorError
        shutil.rmtree(staged, ignore_errors=True)
        raise could_not_write(error, out, "the final model") from error
    trainer.accelerator.wait_for_everyone()


def _finish(
    run: record.RunFile, screen: record.Screen, data: TokenData, out: Path, seconds: float, held: float | None,
    tok: Any, mask: int | None, settings: Settings, main: bool, bare: bool,
) -> None:  # fmt: skip
    if not main:
        return
    lines = record.read_lines(out / record.METRICS)
    last = lines[-max(len(lines) // 20, 1) :]
    mean = sum(x["loss"] for x in last) / len(last)
    evaluations = record.read_lines(out / record.VALIDATION)
    held = evaluations[-1]["loss"] if held is None and evaluations else held
    text, speed = None, screen.mean_speed
    if not bare:
        entropy = data.unigram_entropy if settings.task == "clm" else None
        record.plot({settings.encoding: out}, out / "loss.png", entropy)
        text = _sample(out, tok, mask, data, settings) if tok is not None else None
    if text is not None:
        (out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    run.update(
        status="complete",
        finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seconds=round(seconds, 2),
        tokens_per_second=speed if math.isfinite(speed) else None,
        train_loss=mean,
        validation_loss=held,
    )
    against = f" (unigram entropy of the corpus: {data.unigram_entropy:.3f})" if settings.task == "clm" else ""
    shown = f"\nvalidation loss {held:.3f}, perplexity {math.exp(min(held, 50)):.2f}" if held is not None else ""
    pace = f", {speed:,.0f} tokens/s" if math.isfinite(speed) else ""
    _say(f"final loss {mean:.3f}{against}{shown}\n{seconds:.0f} s{pace}", main)
    if text is not None:
        _say(f"-- a sample\n{text}\n--", main)
    _say(f"{out}", main)


@torch.no_grad()
def _sample(out: Path, tok: Any, mask: int | None, data: TokenData, settings: Settings) -> str:
    """What the saved model writes: a text of its own, or for an encoder a line with its masked words filled in."""
    device = "cuda" if torch.cuda.is_available() and not settings.overrides.get("use_cpu") else "cpu"
    generator = torch.get_rng_state()
    torch.manual_seed(settings.seed)
    try:
        if mask is None:
            model = RelPosForCausalLM.from_pretrained(out).to(device).eval()
            begin = torch.tensor([[data.eot]], device=device)
            how: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=20, pad_token_id=data.eot)
            room = getattr(model.config, "max_position_embeddings", None) or 301
            if room < 2:
                return ""
            ids = model.generate(begin, max_new_tokens=min(300, room - 1), **how)
            return str(tok.decode(ids[0, 1:], skip_special_tokens=True))
        encoder = RelPosForMaskedLM.from_pretrained(out).to(device).eval()
        stream = data.validation if len(data.validation) >= 64 else data.train
        room = getattr(encoder.config, "max_position_embeddings", None) or 64
        ids = torch.from_numpy(stream.read(0, min(64, room, len(stream))))[None].to(device)
        holes = torch.arange(ids.shape[1], device=device) % 7 == 3
        shown = torch.where(holes, mask, ids)
        filled = torch.where(holes, encoder(shown).logits.argmax(-1), ids)
        return f"masked: {tok.decode(shown[0])}\nfilled: {tok.decode(filled[0])}"
    finally:
        torch.set_rng_state(generator)


# Several runs side by side.


def compare(folders: dict[str, Path], out: Path) -> None:
    """`comparison.md`, `comparison.csv` and `comparison.png` for finished runs of the same data and seed."""
    rows = []
    for spec, folder in folders.items():
        run = json.loads((folder / record.RUN).read_text(encoding="utf-8"))
        held, speed = run["validation_loss"], run["tokens_per_second"] or math.nan
        rows.append(
            {
                "encoding": spec,
                "encoding parameters": run["model"]["encoding_parameters"],
                "train loss": round(run["train_loss"], 4),
                "validation loss": "" if held is None else round(held, 4),
                "validation perplexity": "" if held is None else round(math.exp(min(held, 50)), 3),
                "tokens per second": round(speed) if math.isfinite(speed) else "",
                "seconds": run["seconds"],
            }
        )
    names = list(rows[0])
    with open(out / "comparison.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    table = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (f"{row[n]:,}" if isinstance(row[n], int) else str(row[n]) for n in names)
        table.append("| " + " | ".join(cells) + " |")
    (out / "comparison.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    entropy = run["data"]["unigram_entropy"] if run["settings"]["task"] == "clm" else None
    record.plot(folders, out / "comparison.png", entropy)
    _say("\n".join(table), True)
