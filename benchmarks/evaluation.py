"""How fast and in how much memory a text of some length is scored: the dense way against ours.

    python benchmarks/evaluation.py --device cuda --out results/evaluation-h200.json
    python benchmarks/evaluation.py --device cpu --lengths 16384 --impl auto --repeats 1 --encoding kerple

GPT-2 Small with random weights (speed and memory do not depend on them) on random tokens, `blocks`, through
`relpos.evaluation.evaluate` as the command uses it; on a GPU in bfloat16. Each row is the median of `--repeats` runs,
for kernels after one that compiles them. Both ways read the same windows together, one of 16,384 tokens or sixteen of
1,024: more would not fit the dense one.

Their losses must agree position by position, or the exit status is 1. The weights are drawn three times wider than for
training so that attention matters: bfloat16 alone then moves a loss by 0.02 nats (root mean square over 512 positions,
means of two windows, dense), another encoding by 1.6.

Memory: the GPU's peak, or the peak resident set of the process, so on a CPU measure one length and one implementation
at a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relpos.errors import UserError  # noqa: E402
from relpos.evaluation import Settings, evaluate, make_text  # noqa: E402
from relpos.evaluation.result import unpack, versions  # noqa: E402
from relpos.evaluation.scoring import pick_device, pick_dtype, release  # noqa: E402
from relpos.models import RelPosConfig, RelPosForCausalLM  # noqa: E402

BATCH_TOKENS = 16384
AGREE = {torch.float32: 1e-3}  # nats, root mean square over the positions
AGREE_16_BIT = 0.08


def measure(model, impl: str, T: int, tokens: int, repeats: int) -> tuple[dict, np.ndarray | None]:
    """A row of the result, and the loss at every position."""
    device = next(model.parameters()).device
    text = make_text(np.random.default_rng(0).integers(0, 50257, tokens + 1))
    settings = Settings((T,), ("blocks",), batch_tokens=BATCH_TOKENS)
    model.set_impl(impl)
    row = {"impl": impl, "length": T, "windows": tokens // T}
    compiles = device.type == "cuda" and impl != "reference"
    seconds, found = [], {}
    for n in range(-compiles, repeats):
        if device.type == "cuda" and n == 0:
            torch.cuda.reset_peak_memory_stats()
        # The weights need no name here, and taking it reads them all.
        found = evaluate(model, text, settings, fingerprint="")["protocols"]["blocks"]["results"][0]
        if found["status"] != "ok":
            release()
            return row | {"status": found["status"], "reason": found["reason"]}, None
        seconds.append(found["seconds"])
    seconds = seconds[compiles:]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    middle = statistics.median(seconds)
    row |= {
        "status": "ok",
        "seconds": middle,
        "all_seconds": seconds,
        "tokens_per_second": round(found["tokens"] / middle, 1),
        "peak_mib": round(peak),
        "loss": round(found["loss"], 6),
    }
    return row, unpack(found["positions"]["loss_f32_base64"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--encoding", default="kerple,fire,cable,rope")
    parser.add_argument("--impl", help="the dense one first; reference,fused on a GPU and reference,auto elsewhere")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="of the text, for each length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    try:
        device = pick_device(arguments.device)
        dtype = pick_dtype(arguments.dtype, device)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    impls = (arguments.impl or ("reference,fused" if device.type == "cuda" else "reference,auto")).split(",")
    most = AGREE.get(dtype, AGREE_16_BIT)
    rows, apart = [], []
    value = {
        "what": __doc__.split("\n")[0],
        "model": "GPT-2 Small, random weights",
        "dtype": str(dtype).removeprefix("torch."),
        "batch_tokens": BATCH_TOKENS,
        "agree_within": most,
        "versions": versions(device),
        "total_seconds": 0.0,
        "rows": rows,
    }
    for encoding in arguments.encoding.split(","):
        torch.manual_seed(0)
        model = RelPosForCausalLM(RelPosConfig.preset("small", encoding, initializer_range=0.06))
        model.to(device, dtype).eval()
        for T in map(int, arguments.lengths.split(",")):
            first: tuple[dict, np.ndarray | None] | None = None
            for impl in impls:
                row, losses = measure(model, impl, T, arguments.tokens, arguments.repeats)
                row = {"encoding": encoding, **row}
                if first is None:
                    first = row, losses
                elif losses is not None and first[1] is not None:
                    difference = float(np.sqrt(np.mean((losses.astype(np.float64) - first[1]) ** 2)))
                    row["times_as_fast"] = round(first[0]["seconds"] / row["seconds"], 2)
                    row["rms_difference"] = difference
                    if not difference < most:
                        apart.append(f"{encoding} at {T}: {impls[0]} and {impl} are {difference:.4f} nats apart")
                rows.append(row)
                print(json.dumps(row), flush=True)
                value["total_seconds"] = round(time.perf_counter() - began, 1)
                if arguments.out:  # after each row: a later one may die
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    arguments.out.write_text(json.dumps(value, indent=1) + "\n")
    print(f"{value['total_seconds']} s in total", file=sys.stderr)
    print(*apart, sep="\n", end="\n" if apart else "", file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
