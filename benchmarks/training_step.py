"""A training step of GPT-2 Small with every encoding: compiled, bfloat16, 32,768 tokens a batch.

    python benchmarks/training_step.py --lengths 512,1024 --out results/training-step-h200.json

The step is forward, backward, gradient clipping and fused AdamW on random tokens; tokens per second from the median of
steps timed with CUDA events, peak memory as the allocator saw it. One process per model: they compile side by side and
take turns at the GPU for the timing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import platform
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOKENS = 32768
SPECS = "none,rope,alibi,cable,cable:form=unweighted,fox,t5,t5:form=clipped,kerple,sandwich,learned,sinusoidal,fire"


def measure(job: tuple[str, int, str, int]) -> dict:
    spec, length, lock, steps = job
    import torch

    from relpos.models import RelPosConfig, RelPosForCausalLM

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    config = RelPosConfig.preset("small", encoding=spec, train_length=length)
    model = RelPosForCausalLM(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(0, 50257, (TOKENS // length, length), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row = {"encoding": spec, "length": length}
    try:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        with open(lock, "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                step()
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)
            ]
            for begin, end in events:
                begin.record()
                step()
                end.record()
            torch.cuda.synchronize()
            times = sorted(begin.elapsed_time(end) for begin, end in events)
            row |= {
                "ms": times[len(times) // 2],
                "tokens_per_s": TOKENS / times[len(times) // 2] * 1e3,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
    except Exception as error:  # noqa: BLE001 - one that fails must not cost the others
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encodings", default=SPECS)
    parser.add_argument("--lengths", default="512,1024,4096")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    from relpos.encodings import split_list

    lock = tempfile.NamedTemporaryFile(suffix=".lock").name
    jobs = [
        (spec, int(length), lock, options.steps)
        for length in options.lengths.split(",")
        for spec in split_list(options.encodings)
    ]
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(measure, jobs, chunksize=1):
            rows.append(row)
            print(row, flush=True)
            if options.out:  # after every row: a run that is stopped keeps what it measured
                import torch

                Path(options.out).parent.mkdir(parents=True, exist_ok=True)
                Path(options.out).write_text(
                    json.dumps(
                        {
                            "what": "GPT-2 Small, compiled, bfloat16, 32,768 tokens a step, AdamW and clipping",
                            "machine": torch.cuda.get_device_name(),
                            "versions": {"torch": torch.__version__, "python": platform.python_version()},
                            "rows": sorted(rows, key=lambda r: (r["length"], r["encoding"])),
                        },
                        indent=1,
                    )
                )


if __name__ == "__main__":
    main()
