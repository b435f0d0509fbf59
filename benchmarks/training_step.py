"""A training step of GPT-2 Small with every encoding: compiled, bfloat16, 32,768 tokens a batch; and the same model and
batch through the code of `relpos train`.

    python benchmarks/training_step.py --lengths 1024 --through-train --out results/training-step-h200.json

The bare step is forward, backward, gradient clipping and fused AdamW on random tokens: tokens per second from the
median step, peak memory as the allocator saw it. The peer in the same run is plain_gpt2.py, without any bias.
`--through-train` runs `train_in_memory` on a prepared folder of random tokens (the Trainer, the loader, metrics.jsonl;
no checkpoint, no evaluation) and times every step from its end to the next one's; the bare step then starts from the
weights it left. All launch their kernels as CUDA graphs, the default of `relpos train` on one GPU. `train_ratio`
compares the median steps; `train_mean_tokens_per_s` is over all steps, with the pauses in which every tenth reads the
losses back.

One process per model and length. They compile side by side, `--processes` at a time, run two steps, a few at a time for
the sake of the GPU's memory, and wait with what they compiled. When all of one length are ready they are told, one
after the other, to time themselves: nothing else runs then, on the GPU or the CPU. Beside a `relpos study`, `--lock
OUT/.work/turn.lock` times between two of its models. Rows of an `--out` that is there already stay unless they are
measured again, and what they say of `relpos train` unless that is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PEER = "plain GPT-2"
SPECS = (
    f"{PEER},none,rope,alibi,cable,cable:form=unweighted,fox,t5,t5:form=clipped,kerple,sandwich,learned,sinusoidal,xpos,fire,"
    "inkling"
)
FIRST, WARM = 2, 10  # steps before a model is ready; steps of a training run that are not timed
STEPPING = 4  # processes that hold the activations of a step at once: up to 20 GiB each
SECONDS, TRAIN_SECONDS = 4, 8  # that the timing of a model takes, about: the time limit keeps so much free for each


@dataclass(frozen=True)
class Job:
    spec: str
    length: int
    size: str
    tokens: int
    steps: int
    train_steps: int
    device: str
    data: str | None  # a prepared folder: time the training too
    out: str  # the folder of that run
    kernels: int = 0  # how many to name


# One model, in a process of its own -----------------------------------------------------------------------------------


def work(job: Job, conn: Any, tickets: Any, memory: Any) -> None:
    """Compile, say "ready", wait for the word, time, send the row."""
    row: dict[str, Any] = {"encoding": job.spec, "length": job.length} | ({"peer": True} if job.spec == PEER else {})
    with contextlib.ExitStack() as ticket:

        def ready() -> None:
            ticket.close()  # the next may compile
            conn.send("ready")
            conn.recv()

        try:
            import relpos.training  # noqa: F401 - while others compile

            ticket.enter_context(tickets)
            with contextlib.redirect_stderr(io.StringIO()):
                row |= measure(job, ready, memory)
        except Exception as error:  # noqa: BLE001 - one that fails must not cost the others
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    conn.send(row)


def measure(job: Job, ready: Callable[[], None], memory: Any) -> dict[str, Any]:
    import torch

    if job.device == "cuda":
        # Compile both passes before either runs, and then let only a few run: else every process keeps the activations
        # of its first step while it compiles the second half.
        if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
            torch._functorch.config.force_non_lazy_backward_lowering = True
        # As in `relpos train`.
        torch.backends.fp32_precision = "tf32"
        from relpos.models import loss

        loss.CELLS = loss.cells_for(torch.cuda.get_device_properties(0).total_memory)
        # Graphs are recorded when it is our turn: they keep the memory of a step, and all processes wait with theirs.
        from torch._inductor import cudagraph_trees

        captures = cudagraph_trees.is_cudagraph_capture_sizes
        cudagraph_trees.is_cudagraph_capture_sizes = lambda _: False
    with contextlib.ExitStack() as held:

        def hold(*_: Any) -> None:
            held.close()
            held.enter_context(memory)

        def settle() -> None:
            gc.collect()
            if job.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            held.close()

        def begin() -> None:
            ready()
            torch._dynamo.callback_handler.remove_end_callback(hold)  # it is called for a recording too
            if job.device == "cuda":
                cudagraph_trees.is_cudagraph_capture_sizes = captures

        torch._dynamo.callback_handler.register_end_callback(hold)
        return compare(job, begin, settle)


def compare(job: Job, ready: Callable[[], None], settle: Callable[[], None]) -> dict[str, Any]:
    """The bare step, and where asked for the training, each compiled before `ready` and timed after it."""
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.attention import SDPBackend

    from relpos.models import RelPosConfig, RelPosForCausalLM

    cuda = job.device == "cuda"
    torch.manual_seed(0)
    peer = job.spec == PEER
    row: dict[str, Any] = {}
    config = RelPosConfig.preset(job.size, encoding="none" if peer else job.spec, train_length=job.length)
    if (getattr(config, "max_position_embeddings", None) or job.length) < job.length:
        job = replace(job, spec=f"{job.spec}{',' if ':' in job.spec else ':'}max_positions={job.length}")
        config = RelPosConfig.preset(job.size, encoding=job.spec, train_length=job.length)
        row["note"] = f"as `{job.spec}`"
    if peer:
        from plain_gpt2 import PlainGPT2

        sizes = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        model: torch.nn.Module = PlainGPT2(job.length, config.vocab_size, *sizes)
        x = torch.empty(1, sizes[2], job.length, sizes[0] // sizes[2], device=job.device, dtype=torch.bfloat16)
        x.requires_grad_()
        row["note"] = f"PyTorch chose {SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True)).name}"
    else:
        model = RelPosForCausalLM(config)
    model = model.to(job.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, mode="reduce-overhead") if cuda else model
    shape = (job.tokens // job.length, job.length)
    tokens = torch.randint(0, config.eos_token_id + 1, shape, device=job.device)

    norms: list[Any] = []

    def step() -> None:
        if cuda:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    graphs = []  # compiled until the timing began

    def wait() -> None:
        settle()
        ready()
        graphs.append(counters["stats"]["unique_graphs"])

    for _ in range(FIRST):
        step()
    optimizer.state.clear()  # made again by the next step
    settle()
    own = torch.cuda.memory_allocated() if cuda else 0
    if job.data is None or peer:
        wait()
    else:
        times, trained = train(job, config.vocab_size, wait)
        # From the same weights: what FIRE costs depends on where its knots lie.
        model.load_state_dict(trained.state_dict())
        del trained
        settle()
        row["train_ms"] = statistics.median(times)
        row["train_tokens_per_s"] = job.tokens / row["train_ms"] * 1e3
        row["train_mean_tokens_per_s"] = job.tokens / statistics.mean(times) * 1e3
    left = 0
    if cuda:
        left = torch.cuda.memory_allocated() - own  # of the run before, not ours
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # the graphs are recorded here, and a graph that is launched again allocates nothing
        step()
    clock = Clock(cuda)
    clock.mark()
    for _ in range(job.steps):
        step()
        clock.mark()
    ms = statistics.median(clock.times())
    if not all(0 < norm < math.inf for norm in torch.stack(norms).tolist()):
        raise RuntimeError("the gradients are zero or not finite: this is no training step")
    row |= {"ms": ms, "tokens_per_s": job.tokens / ms * 1e3, "graphs": cuda}
    if cuda:
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - left) / 2**30
        if job.kernels:
            row["kernels_ms"], row["kernels"] = longest(step, job.kernels)
    if "train_tokens_per_s" in row:
        row["train_ratio"] = row["train_tokens_per_s"] / row["tokens_per_s"]
        row["train_mean_ratio"] = row["train_mean_tokens_per_s"] / row["tokens_per_s"]
    if counters["stats"]["unique_graphs"] != graphs[0]:
        row["note"] = "something was compiled again while it was timed"
    return row


def longest(step: Callable[[], None], count: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step that the GPU is busy, and those of its most expensive kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
    took: dict[str, float] = {}
    for event in found.key_averages():
        took[event.key[:90]] = took.get(event.key[:90], 0.0) + event.self_device_time_total / 3e3
    most = sorted(took, key=lambda name: -took[name])[:count]
    return sum(took.values()), {name: round(took[name], 3) for name in most}


class Clock:
    """Marks in the stream of a GPU, which keep nobody waiting, or on the wall."""

    def __init__(self, cuda: bool):
        self.cuda, self.marks = cuda, []

    def mark(self) -> None:
        import torch

        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def times(self) -> list[float]:
        """Milliseconds from mark to mark."""
        import torch

        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def train(job: Job, vocab_size: int, wait: Callable[[], None]) -> tuple[list[float], Any]:
    """Milliseconds of every step after the warm-up, through the library's own training; the model."""
    from transformers import TrainerCallback

    from relpos.training import Settings, train_in_memory

    clock = Clock(job.device == "cuda")

    class Pace(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == FIRST:
                wait()
            elif state.global_step >= WARM:
                clock.mark()

    settings = Settings(
        encoding=job.spec,
        size=job.size,
        data=job.data,
        out=job.out,
        length=job.length,
        steps=WARM + job.train_steps,
        tokens_per_step=job.tokens,
        rows=job.tokens // job.length,
        vocab_size=vocab_size,
        overrides={} if clock.cuda else {"use_cpu": True},
    )
    trained = train_in_memory(settings, callbacks=[Pace()])
    return clock.times(), trained.model


# All of them ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def turn(path: str | None) -> Iterator[None]:
    """While others wait for the lock on that file, the GPU is ours."""
    if path is None:
        yield
        return
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wave(
    jobs: list[Job], processes: int, deadline: float, lock: str | None, report: Callable[[dict[str, Any]], None]
) -> None:
    """Compile all, then time one by one."""
    context = multiprocessing.get_context("spawn")
    tickets, memory = context.Semaphore(processes), context.Semaphore(STEPPING)
    each = TRAIN_SECONDS if jobs[0].data else SECONDS
    workers = {}
    for job in jobs:
        conn, theirs = context.Pipe()
        workers[conn] = (job, context.Process(target=work, args=(job, theirs, tickets, memory), daemon=True))
        workers[conn][1].start()
        theirs.close()

    def receive(conn: Any) -> Any:
        try:
            return conn.recv()
        except (EOFError, OSError):
            job, process = workers[conn]
            process.join(5)
            return {"encoding": job.spec, "length": job.length, "error": f"its process ended: {process.exitcode}"}

    def end(conn: Any, why: str = "") -> None:
        job, process = workers.pop(conn)
        if why:
            say(f"{job.spec} at {job.length}: {why}")
        process.kill()  # what it had to say is said
        process.join()

    began, ready, waiting = time.monotonic(), [], set(workers)
    try:
        while waiting and time.monotonic() < deadline - each * len(ready):
            for conn in multiprocessing.connection.wait(waiting, timeout=1):
                waiting.discard(conn)
                message = receive(conn)
                if message == "ready":
                    ready.append(conn)
                    job = workers[conn][0]
                    say(f"{job.spec} at {job.length}: ready after {time.monotonic() - began:.0f} s")
                else:
                    report(message)
                    end(conn)
        for conn in waiting:  # nothing else runs while we time
            end(conn, "not ready in time")
        with turn(lock):
            for conn in ready:
                left = deadline - time.monotonic()
                if left < each / 2:
                    end(conn, "no time left")
                    continue
                conn.send("go")
                if conn.poll(min(left, 600)):
                    report(receive(conn))
                    end(conn)
                else:
                    end(conn, "did not finish in time")
    finally:
        for conn in list(workers):
            end(conn, "stopped")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def token_folder(folder: Path, last: int, count: int) -> str:
    """Random tokens up to `last`, the end of text, as `relpos data prepare` leaves them."""
    import numpy as np

    from relpos.data import prepare

    stream = folder / "stream.bin"
    np.random.default_rng(0).integers(0, last + 1, count, dtype=np.uint16).astype("<u2").tofile(stream)
    prepare(str(stream), folder / "data", eot=last, validation=0.0, workers=1)
    return str(folder / "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encodings", default=SPECS)
    parser.add_argument("--lengths", default="512,1024,4096")
    parser.add_argument("--through-train", action="store_true", help="time `relpos train` too")
    parser.add_argument("--size", default="small")
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--steps", type=int, default=15, help="timed of the bare step")
    parser.add_argument("--train-steps", type=int, default=40, help="timed of a training run")
    parser.add_argument("--processes", type=int, default=16, help="that compile at once")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds; what is measured by then stays")
    parser.add_argument("--kernels", type=int, default=0, help="name so many of the kernels that take longest")
    parser.add_argument("--lock", help="a file whose lock is held while models are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out")
    options = parser.parse_args()
    deadline = time.monotonic() + options.time_limit
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # of each process
    import torch

    from relpos.encodings import split_list
    from relpos.models import RelPosConfig
    from relpos.training.record import git_commit
    from relpos.training.trainer import write_atomically

    git = git_commit() or {"commit": None, "changed": False}
    out = Path(options.out) if options.out else None
    old = json.loads(out.read_text(encoding="utf-8"))["rows"] if out is not None and out.is_file() else []
    rows = {(row["length"], row["encoding"]): row for row in old}
    name = "GPT-2 Small" if options.size == "small" else f"size {options.size}"
    how = "compiled, bfloat16" if options.device == "cuda" else "float32"
    about = {
        "what": f"{name}, {how}, {options.tokens:,} tokens a step, AdamW and clipping",
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }

    def report(row: dict[str, Any]) -> None:
        row["commit"] = git["commit"] and git["commit"] + (" with changes" if git["changed"] else "")
        print(json.dumps(row), flush=True)
        if "train_ratio" in row:
            row["train_commit"] = row["commit"]
        else:  # an earlier run may have timed the training
            row |= {k: v for k, v in rows.get((row["length"], row["encoding"]), {}).items() if k.startswith("train_")}
        rows[row["length"], row["encoding"]] = row
        if out is not None:  # after every row: a run that is stopped keeps what it measured
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, json.dumps({**about, "rows": [rows[key] for key in sorted(rows)]}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        data = None
        if options.through_train:
            last = RelPosConfig.preset(options.size).eos_token_id
            data = token_folder(Path(scratch), last, options.tokens * (WARM + options.train_steps))
        fixed = (options.size, options.tokens, options.steps, options.train_steps, options.device, data)
        for length in map(int, options.lengths.split(",")):
            if deadline - time.monotonic() < 10 * SECONDS:
                say(f"no time left for {length}")
                continue
            specs = split_list(options.encodings)
            jobs = [
                Job(spec, length, *fixed, f"{scratch}/{length}-{n}", options.kernels) for n, spec in enumerate(specs)
            ]
            wave(jobs, options.processes, deadline, options.lock, report)


if __name__ == "__main__":
    main()
