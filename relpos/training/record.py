"""What a run writes down: `metrics.jsonl`, `validation.jsonl`, `run.json`, `loss.png`, and the lines or bar on screen.

`metrics.jsonl` has one line per optimizer step with what the step was (loss, gradient norm, learning rate, tokens so
far) and nothing that depends on the clock, so that the lines of an interrupted run are those of an undisturbed one,
byte by byte. Speed goes to the screen, to TensorBoard and, as a mean, to run.json.

MFU is model FLOPs over the peak of the device, counted as in the PaLM paper (arXiv 2204.02311, appendix B): per token
6 N + 12 L D T, N without the embedding but with the output layer, no discount for causality. The peak is the published
dense one of the GPU, or, on a device we have no figure for, that of a large matrix product measured at the start.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from relpos.errors import UserError
from relpos.training.trainer import last_checkpoint, write_atomically

METRICS, VALIDATION, RUN = "metrics.jsonl", "validation.jsonl", "run.json"

# Dense bfloat16 peaks as published by the vendor, FLOP/s.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "4090": 165e12}


def flops_per_token(model: nn.Module, length: int) -> float:
    """Forward and backward."""
    config: Any = model.config
    head = config.vocab_size * config.hidden_size
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    body = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    tied = config.tie_word_embeddings
    return 6.0 * (body + (head if tied else 0)) + 12.0 * config.num_hidden_layers * config.hidden_size * length


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name and dtype == torch.bfloat16:
                return peak
    n = 1024 if device.type == "cpu" else 4096
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - begin)
    return 2.0 * n**3 / best


# Files.


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a last one cut short by a kill does not count."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    try:
        found = [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: a line of it is no JSON ({error.doc[:40]!r})") from None
    return found


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after a step: the run that resumes there writes them again."""
    if path.is_file():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


_PACKAGES = "relpos torch transformers accelerate tokenizers safetensors numpy triton tiktoken".split()


def versions() -> dict[str, str | None]:
    from importlib import metadata

    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["relpos"] is None:  # from the source tree
        import relpos

        found["relpos"] = relpos.__version__
    return found


def git_commit() -> dict[str, Any] | None:
    """The commit of the relpos source, and whether it was changed since; None for an installed package. A copy of the
    tree without its history may be told: RELPOS_COMMIT."""
    told = os.environ.get("RELPOS_COMMIT")
    if told:
        return {"commit": told, "changed": False}
    here = Path(__file__).resolve().parents[1]  # the package
    try:
        run = {"cwd": here, "capture_output": True, "text": True, "timeout": 10, "check": True}
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], **run)  # type: ignore[call-overload]
        assert tracked.returncode == 0
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno", "."], **run)  # type: ignore[call-overload]
        return {"commit": commit, "changed": bool(changed.stdout.strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def read_run(folder: Path) -> dict[str, Any]:
    """What `run.json` says."""
    try:
        content = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get("settings"), dict):
            return content
    except ValueError:  # no JSON, no UTF-8
        pass
    raise UserError(f"{folder / RUN} is damaged: it is not what `relpos train` writes. Start the run anew")


class RunFile:
    """`run.json`: what was run, on what, and how it went. Written by the first process only."""

    def __init__(self, folder: Path, main: bool):
        self.path, self.main = folder / RUN, main
        self.content: dict[str, Any] = {}
        if self.path.is_file():
            self.content = read_run(folder)

    def update(self, **values: Any) -> None:
        self.content |= values
        if self.main:
            write_atomically(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")


# The screen.


class Screen(TrainerCallback):
    """A live bar on a terminal, plain lines elsewhere; writes the metrics as steps are flushed."""

    def __init__(
        self, folder: Path, *, steps: int, tokens_per_step: int, flops: float, peak: float, main: bool, first: int,
        events: bool = True,
    ):  # fmt: skip
        self.events = events  # for TensorBoard
        self.folder, self.steps, self.tokens_per_step, self.main = folder, steps, tokens_per_step, main
        self.flops, self.peak = flops, peak
        self.began = self.mark = time.perf_counter()
        self.first, self.marked = first, first
        self.step, self.loss, self.speed = first, math.nan, math.nan
        self.rates: list[tuple[int, float]] = []  # (steps, seconds) between flushes, without the first: it compiles
        self._bar: Any = None
        self._task: Any = None
        self._printed = -(10**9)
        self.log_every = 10
        self.writer: Any = None
        self._file: Any = None

    # Steps, from RelPosTrainer.flush.

    def record(self, steps: list[dict[str, Any]]) -> None:
        bad = next((s for s in steps if not (math.isfinite(s["loss"]) and math.isfinite(s["grad_norm"] or 0))), None)
        good = [s for s in steps if bad is None or s["step"] < bad["step"]]
        if self.main:
            if self._file is None:
                self._file = open(self.folder / METRICS, "a", encoding="utf-8")  # noqa: SIM115
            for s in good:
                self._file.write(json.dumps(s | {"tokens": s["step"] * self.tokens_per_step}) + "\n")
            self._file.flush()
        if bad is not None:
            self.close()
            what = "loss" if not math.isfinite(bad["loss"]) else "gradient"
            _, last, _ = last_checkpoint(self.folder)
            kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
            raise UserError(
                f"the {what} is not a number at step {bad['step']}: stopped, nothing saved after it; {kept}. A lower "
                "learning rate or a longer warm-up (--warmup) may help"
            )
        if self.step == 0 and all(s["grad_norm"] == 0 for s in steps):
            self.close()
            raise UserError(
                "no gradient reaches any weight in the first step: nothing would be learned. If the model is compiled, "
                "try --no-compile, and please report it with your version of torch"
            )
        now = time.perf_counter()
        self.step, self.loss = steps[-1]["step"], steps[-1]["loss"]
        done, took = self.step - self.marked, now - self.mark
        if self.marked > self.first or done > 1:
            self.rates.append((done, took))
        self.mark, self.marked = now, self.step
        self._speed(done, took)
        self._show()

    def _speed(self, done: int, took: float) -> None:
        recent = self.rates[-20:] or [(done, took)]
        self.speed = sum(n for n, _ in recent) * self.tokens_per_step / max(sum(t for _, t in recent), 1e-9)
        # A CPU's peak is measured at the start, perhaps while it was busy: going faster shows that it was higher.
        self.peak = max(self.peak, self.speed * self.flops)

    @property
    def mean_speed(self) -> float:
        """Tokens per second over the run so far, the first flush (compilation) left out."""
        if not self.rates:
            return math.nan
        return sum(n for n, _ in self.rates) * self.tokens_per_step / sum(t for _, t in self.rates)

    @property
    def mfu(self) -> float:
        return self.speed * self.flops / self.peak

    def _detail(self) -> str:
        left = (self.steps - self.step) * self.tokens_per_step / self.speed if self.speed > 0 else math.nan
        if self._bar is not None and self._bar.console.width < 80:
            return f"loss {self.loss:.3f}  {_clock(left)} left"
        return f"loss {self.loss:.4f}  {self.speed:,.0f} tokens/s  MFU {self.mfu:.1%}  {_clock(left)} left"

    def _show(self) -> None:
        if not self.main:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, detail=self._detail())
        elif self.step - self._printed >= self.log_every or self.step in (1, self.steps):
            self._printed = self.step
            print(f"step {self.step}/{self.steps}  {self._detail()}", file=sys.stderr, flush=True)

    def pause(self) -> None:
        """Time that is not training (a save, an evaluation) does not count as speed."""
        self.mark = time.perf_counter()

    # From the Trainer.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log_every = max(int(args.logging_steps), 1) if args.logging_steps >= 1 else 10
        self.pause()
        if not self.main:
            return
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            console = Console(stderr=True)
            columns: list[Any] = [TextColumn("step {task.completed:.0f}/{task.total:.0f}")]
            columns += [BarColumn(bar_width=None)] * (console.width >= 80)
            columns += [TextColumn("{task.fields[detail]}")]
            columns += [TimeElapsedColumn()] * (console.width >= 80)
            self._bar = Progress(*columns, console=console)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.steps, completed=self.step, detail="")
        if not self.events:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("no TensorBoard events: pip install tensorboard to have them", file=sys.stderr)
        else:
            self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.first + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.writer is None or logs is None:
            return
        names = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate"}
        for key, value in logs.items():
            if key in names:
                self.writer.add_scalar(names[key], value, state.global_step)
            elif key == "eval_loss":
                self.writer.add_scalar("validation/loss", value, state.global_step)
        if "loss" in logs and math.isfinite(self.speed):
            self.writer.add_scalar("speed/tokens_per_second", self.speed, state.global_step)
            self.writer.add_scalar("speed/mfu", self.mfu, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        self.pause()
        loss = metrics.get("eval_loss")
        if not self.main or loss is None:
            return
        with open(self.folder / VALIDATION, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "loss": loss}) + "\n")
        self.say(f"step {state.global_step}/{self.steps}  validation loss {loss:.4f}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def say(self, text: str) -> None:
        """A line that the live bar does not overwrite."""
        if not self.main:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


# The picture.


def smooth(values: list[float]) -> list[float]:
    """Mean over a fiftieth of the run around each step (fewer at the ends), so that a falling curve does not lag."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    n, most = len(values), len(values) // 100
    out = []
    for i in range(n):
        reach = min(i, n - 1 - i, most)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return out


def plot(runs: dict[str, Path], out: Path, entropy: float | None = None) -> None:
    """Training loss against the tokens read, a line per run, with the validation loss as dots."""
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(os.path.expanduser("~"), ".cache", "matplotlib"))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    highest = 0.0
    for number, (name, folder) in enumerate(runs.items()):
        lines = read_lines(folder / METRICS)
        if not lines:
            continue
        tokens, losses = [x["tokens"] / 1e6 for x in lines], [x["loss"] for x in lines]
        per_step = lines[-1]["tokens"] / lines[-1]["step"]
        colour = f"C{number % 10}"
        if len(runs) == 1:
            axes.plot(tokens, losses, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(tokens, smooth(losses), color=colour, linewidth=1.6, label=name)
        held = read_lines(folder / VALIDATION)
        if held:
            label = "validation" if len(runs) == 1 else None
            at = [x["step"] * per_step / 1e6 for x in held]
            axes.plot(at, [x["loss"] for x in held], "o", color=colour, markersize=4, label=label)
        highest = max(highest, losses[0])
    if len(runs) > 1 and any(read_lines(folder / VALIDATION) for folder in runs.values()):
        axes.plot([], [], "o", color="0.4", markersize=4, label="validation")
    if entropy is not None:
        axes.axhline(entropy, color="0.4", linestyle="--", linewidth=1, label="unigram entropy of the corpus")
    axes.set_xlabel("tokens read, millions")
    axes.set_ylabel("loss, nats per token")
    axes.set_ylim(top=highest * 1.05 if highest else None)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    staged = out.with_name(f".{out.name}")
    figure.savefig(staged, format="png")
    os.replace(staged, out)
