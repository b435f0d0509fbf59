"""What a run of each size uses unless told otherwise, and how that becomes transformers' `TrainingArguments`.

tiny, small and medium follow the CABLE paper ("Context-aware Biases for Length Extrapolation", arXiv 2503.08067): AdamW
with betas 0.9 / 0.95 and eps 1e-8, weight decay 0.1 on matrices only, gradient clip 1.0, learning rate 6e-4 with a
linear warm-up of 750 steps and a cosine down to a tenth, 524,288 tokens a step at length 1024, bfloat16 autocast, no
dropout; 19,073 steps are 10 billion tokens. nano is ours: a laptop, two cores, a few minutes.

Where we differ from the paper: no parameter of an encoding is decayed, its projections and learned tables included,
unless `--decay-encodings` asks for the paper's grouping (all matrices).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from relpos.errors import UserError, nearest


@dataclass(frozen=True)
class Preset:
    length: int  # tokens in a window
    tokens_per_step: int
    steps: int
    warmup: int
    learning_rate: float
    rows: int  # windows per device and pass, at most; the rest is gradient accumulation
    save_every: int
    log_every: int
    held_out: int = 256  # windows of an evaluation
    tokenizer: str = "bytes"  # of the default corpus


PRESETS = {
    "nano": Preset(256, 1024, 300, 20, 1e-3, 16, 100, 10, 64),
    "tiny": Preset(1024, 524_288, 19_073, 750, 6e-4, 64, 1000, 10, tokenizer="bpe:8192"),
    "small": Preset(1024, 524_288, 19_073, 750, 6e-4, 32, 1000, 10, tokenizer="bpe:8192"),
    "medium": Preset(1024, 524_288, 19_073, 750, 6e-4, 16, 1000, 10, tokenizer="bpe:8192"),
}


def preset(size: str) -> Preset:
    if size not in PRESETS:
        raise UserError(f"there is no size {size!r}.{nearest(size, PRESETS)}")
    return PRESETS[size]


@dataclass(frozen=True)
class Shape:
    """How the windows of a step are spread: `rows` on each of `processes`, `accumulation` times."""

    length: int
    rows: int
    accumulation: int
    processes: int

    @property
    def rows_per_step(self) -> int:
        return self.rows * self.accumulation * self.processes

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.length


def shape(
    length: int,
    tokens_per_step: int,
    most_rows: int,
    processes: int,
    rows: int | None = None,
    accumulation: int | None = None,
) -> Shape:
    """Spread a step over the processes, or say why it does not go. `rows` and `accumulation` fix what they name."""
    given = {"length": length, "tokens_per_step": tokens_per_step, "rows": rows, "accumulation steps": accumulation}
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name} must be a whole number from 1 on, not {value!r}")
    if rows is not None and accumulation is not None:
        return Shape(length, rows, accumulation, processes)
    if tokens_per_step % length:
        near = max(tokens_per_step // length, 1) * length
        raise UserError(f"{tokens_per_step} tokens a step are no whole number of windows of {length}; {near} would be")
    windows = tokens_per_step // length
    if windows % processes:
        near = max(windows // processes, 1) * processes * length
        raise UserError(
            f"{windows} windows a step do not divide among {processes} processes; --tokens-per-step {near} would"
        )
    share = windows // processes
    if accumulation is not None:
        if share % accumulation:
            raise UserError(f"{share} windows per process and step do not divide by {accumulation} accumulation steps")
        return Shape(length, share // accumulation, accumulation, processes)
    if rows is not None:
        if share % rows:
            raise UserError(f"{share} windows per process and step do not divide into batches of {rows}")
        return Shape(length, rows, share // rows, processes)
    rows = max(n for n in range(1, min(most_rows, share) + 1) if share % n == 0)
    return Shape(length, rows, share // rows, processes)


OURS = ("output_dir", "data_seed", "resume_from_checkpoint", "remove_unused_columns", "train_sampling_strategy")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`--set key=value` for any field of TrainingArguments."""
    from transformers import TrainingArguments

    known = {f.name for f in dataclasses.fields(TrainingArguments) if f.init}
    values = parse_pairs("--set", pairs)
    for key in values:
        if key in OURS:
            raise UserError(f"--set {key} is not yours to set: relpos train needs it")
        if key == "seed":
            raise UserError("--set seed would leave the weights and the order of the data as they are: say --seed")
        if key not in known:
            raise UserError(f"transformers.TrainingArguments has no {key!r}.{_few(key, known - set(OURS))}")
    return values


def parse_config(pairs: list[str]) -> dict[str, Any]:
    """`--config key=value` for any field of the model's config that no option of its own sets."""
    from relpos.models import RelPosConfig

    known = set(RelPosConfig().to_dict()) - {"encoding", "impl", "vocab_size", "train_length", "format_version"}
    values = parse_pairs("--config", pairs)
    for key in values:
        if key not in known:
            raise UserError(f"the model's config has no {key!r} to set.{_few(key, known)}")
    return values


def parse_pairs(option: str, pairs: list[str]) -> dict[str, Any]:
    """key=value; a value is JSON where it can be, else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"{option} takes key=value, not {pair!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = {"True": True, "False": False, "None": None}.get(text, text)
        values[key.strip().lstrip("-").replace("-", "_")] = value
    return values


def _few(key: str, known: set[str]) -> str:
    """The nearest names only: all of them would fill the screen."""
    return nearest(key, sorted(known)).split(" Known:")[0]


def arguments(
    *, out: str, base: Preset, spread: Shape, steps: int, warmup: int, learning_rate: float, seed: int, cuda: bool,
    bf16: bool, compiled: bool, fsdp: bool, evaluates: bool, overrides: dict[str, Any],
) -> Any:  # fmt: skip
    """The TrainingArguments of a run: the recipe, what exact resume and full speed need, then the overrides."""
    from transformers import TrainingArguments
    from transformers.training_args import ParallelMode

    settings: dict[str, Any] = dict(
        output_dir=out,
        per_device_train_batch_size=spread.rows,
        gradient_accumulation_steps=spread.accumulation,
        per_device_eval_batch_size=spread.rows,
        max_steps=steps,
        # The recipe.
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=warmup,
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=bf16,
        use_cpu=not cuda and not torch.backends.mps.is_available(),  # unsaid, several CPU processes train apart
        # Exact order: the dataset itself is the shuffle (relpos.data.loader).
        seed=seed,
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        label_names=["labels"],
        # Speed: no synchronisation per step, copies that overlap with computing.
        logging_nan_inf_filter=False,
        dataloader_pin_memory=cuda,
        dataloader_num_workers=0,
        accelerator_config={"non_blocking": cuda, "dispatch_batches": False},
        ddp_find_unused_parameters=False,
        torch_compile=compiled,
        prediction_loss_only=True,
        # What is written when.
        logging_steps=base.log_every,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=base.save_every,
        save_total_limit=3,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=base.save_every if evaluates else None,
        report_to="none",
        disable_tqdm=True,
    )
    if fsdp:
        settings |= {"fsdp": True, "fsdp_config": {"version": 2}}
    if "lr_scheduler_type" in overrides:  # the others know no such option
        kind = str(getattr(overrides["lr_scheduler_type"], "value", overrides["lr_scheduler_type"]))
        if kind != settings["lr_scheduler_type"]:
            del settings["lr_scheduler_kwargs"]
    try:
        made = TrainingArguments(**{**settings, **overrides})
    except (ValueError, TypeError, ImportError) as error:
        if not overrides:
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"transformers refuses these settings ({', '.join(overrides)}): {reason}") from None
    if made.label_smoothing_factor:
        raise UserError("label smoothing needs the logits, which a training step here never holds as a whole")
    if made.save_only_model:
        raise UserError("save_only_model leaves out the optimizer and the schedule: the run could not be resumed")
    made._n_gpu = min(made.n_gpu, 1)  # one process is one GPU; more would mean DataParallel, which torchrun replaces
    if made.world_size != spread.processes:
        raise RuntimeError(f"the Trainer sees {made.world_size} processes and there are {spread.processes}")
    # On one GPU a step waits for the host, which launches a thousand kernels: CUDA graphs launch them at once. What DDP
    # and FSDP do between kernels does not go into a graph, and other allocators than PyTorch's own cannot record one.
    alone = cuda and made.parallel_mode == ParallelMode.NOT_PARALLEL and not made.fsdp
    alone = alone and (not torch.cuda.is_available() or torch.cuda.get_allocator_backend() == "native")
    if alone and made.torch_compile and made.torch_compile_backend == "inductor" and made.torch_compile_mode is None:
        made.torch_compile_mode = "reduce-overhead"
    return made
