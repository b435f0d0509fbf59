"""Find block sizes: time every kernel with each candidate on this GPU and print the best.

    python benchmarks/tune.py --lengths 1024,4096 --variants 'none;cable' --out tune.json

Compiles in parallel first, then reads each kernel's own GPU time from the profiler, so that one pass over the
candidates serves all kernels. The winners go into `_BLOCKS` of relpos/attention/fused.py by hand.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from relpos import attention as _attention  # noqa: E402, F401
from relpos.attention import fused, prepare  # noqa: E402
from relpos.encodings import build  # noqa: E402
from relpos.terms import Layout  # noqa: E402

from attention import trained  # noqa: E402  isort: skip - the benchmark beside this one

TOKENS, HEADS = 32768, 12
CANDIDATES = {
    "forward": [
        (64, 64, 4, 3, 128), (64, 64, 4, 3, 168), (64, 64, 4, 2, 168), (64, 64, 4, 2, 128), (128, 64, 8, 3, 128),
        (64, 64, 4, 3, 0), (64, 32, 4, 3, 128), (64, 32, 4, 2, 128),
    ],
    "backward_q": [
        (64, 64, 4, 3, 168), (64, 64, 4, 3, 0), (64, 32, 4, 3, 168), (64, 64, 4, 2, 0), (128, 64, 8, 3, 128),
        (64, 64, 4, 3, 128), (64, 32, 4, 2, 0), (64, 64, 8, 2, 0),
    ],
    "backward_k": [
        (32, 64, 4, 3, 128), (32, 64, 4, 3, 168), (32, 64, 4, 2, 168), (32, 64, 4, 3, 0), (64, 64, 4, 2, 168),
        (32, 64, 4, 2, 128), (32, 64, 4, 2, 0), (64, 64, 4, 3, 0),
    ],
    "backward_distance": [
        (64, 64, 4, 3, 0), (64, 64, 4, 3, 168), (128, 128, 8, 2, 0), (64, 64, 4, 2, 168), (64, 64, 8, 3, 0),
        (64, 64, 4, 2, 0), (128, 128, 8, 3, 0), (64, 64, 4, 2, 128),
    ],
}  # fmt: skip


def problem(variant: str, length: int, head_dim: int, tokens: int = TOKENS):
    """A call of the fused operation with every gradient wanted: (forward, backward)."""
    torch.manual_seed(0)
    heads = HEADS * 64 // head_dim
    batch = max(1, tokens // length)
    encoding = trained(build(variant, heads=heads, head_dim=head_dim).cuda())
    q, k, v, do = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    hidden = torch.randn(batch, length, heads * head_dim, device="cuda")
    layout = Layout(Tq=length, Tk=length, device=q.device)
    _, terms = prepare(encoding, layout, hidden if encoding.content else None, None, q.dtype)
    arguments: list = []

    def remember(*given):
        arguments.extend(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
        return fused._forward(*arguments)

    original, fused._Eager.apply = fused._Eager.apply, remember
    try:
        fused.attend(q, k, v, terms, layout, head_dim**-0.5)
    finally:
        fused._Eager.apply = original
    # What autograd would ask for: the gradient of every operand, where the encoding has parameters.
    a, b, c, d, e = arguments[3:8]
    given = (a, b, c, d, e)
    if arguments[10] in (fused.PROFILE, fused.POWER):  # knots have none, and without them rho has none
        given = (a, b if c.numel() else None, None, d, e)
    elif arguments[10] == fused.BANK:
        given = (a, b)
    wants = sum(1 << n for n, x in enumerate(given) if x is not None)
    wants = wants if list(encoding.parameters()) else 0
    saved = fused._forward(*arguments)

    def step():
        fused._forward(*arguments)
        fused._backward(do, *arguments[:3], *saved, *arguments[3:], wants)

    return step


_default = fused._blocks


def use(index: int) -> dict[str, tuple]:
    chosen = {name: options[index % len(options)] for name, options in CANDIDATES.items()}
    fused._blocks = lambda kernel, q, kind: chosen.get(kernel) or _default(kernel, q, kind)
    return chosen


def compile_one(job: tuple) -> None:
    variant, head_dim, index = job
    with open(os.devnull, "w") as sink:
        sys.stderr = sink
        use(index)
        try:
            problem(variant, 1024, head_dim, 1024)()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - too much shared memory; the timing pass reports it
            pass


def kernel_times(step, repeat: int = 8) -> dict[str, float]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeat):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    # A step may launch a kernel more than once, fills and sums: the median of what its launches take together.
    return {
        name: statistics.median(sum(ts[i : i + len(ts) // repeat]) for i in range(0, len(ts), len(ts) // repeat))
        for name, ts in times.items()
        if len(ts) >= repeat
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--variants", default="none;cable")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--indices", default="0-7")
    parser.add_argument("--out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    first, _, last = options.indices.partition("-")
    indices = range(int(first), int(last or first) + 1)
    variants = options.variants.split(";")
    jobs = [(variant, options.head_dim, index) for variant in variants for index in indices]
    context = multiprocessing.get_context("spawn")
    with context.Pool(14, maxtasksperchild=8) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    rows = []
    for variant in variants:
        for length in map(int, options.lengths.split(",")):
            for index in indices:
                chosen = use(index)
                try:
                    times = kernel_times(problem(variant, length, options.head_dim))
                except Exception as error:  # noqa: BLE001
                    print(variant, length, chosen, "failed:", str(error)[:90], flush=True)
                    continue
                for kernel, blocks in chosen.items():
                    if kernel in times:
                        rows.append(
                            {
                                "variant": variant,
                                "length": length,
                                "kernel": kernel,
                                "blocks": blocks,
                                "us": times[kernel],
                            }
                        )
                other = sum(t for name, t in times.items() if name not in chosen)
                rows.append({"variant": variant, "length": length, "kernel": "other", "blocks": (), "us": other})
    groups: dict[tuple, list] = defaultdict(list)
    for row in rows:
        groups[row["variant"], row["length"], row["kernel"]].append((row["us"], tuple(row["blocks"])))
    for (variant, length, kernel), found in groups.items():
        best = "  ".join(f"{us:.0f}us {blocks}" for us, blocks in sorted(found)[: 1 if kernel == "other" else 5])
        print(f"{variant:24} {length:6} {kernel:18} {best}")
    if options.out:
        Path(options.out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
