"""How fast and in how much memory a text of some length is scored: the dense way against ours.

    python benchmarks/evaluation.py --device cuda --out results/evaluation-h200.json
    python benchmarks/evaluation.py --device cpu --lengths 16384 --impl auto --windows 1

GPT-2 Small with random weights (speed and memory do not depend on them) on random tokens, `blocks`, through
`relpos.evaluation.evaluate` as the command uses it. Memory: the GPU's peak, or the peak resident set of the process,
so on a CPU measure one length and one implementation at a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from relpos.evaluation import Settings, evaluate, make_text  # noqa: E402
from relpos.evaluation.result import versions  # noqa: E402
from relpos.evaluation.scoring import pick_device, pick_dtype  # noqa: E402
from relpos.models import RelPosConfig, RelPosForCausalLM  # noqa: E402


def measure(model, impl: str, T: int, windows: int, batch_tokens: int) -> dict:
    device = next(model.parameters()).device
    tokens = np.random.default_rng(0).integers(0, 50257, T * windows + 1)
    settings = Settings((T,), ("blocks",), batch_tokens=batch_tokens)
    model.set_impl(impl)
    row = {"impl": impl, "length": T, "windows": windows, "batch_tokens": batch_tokens}
    if device.type == "cuda":
        evaluate(model, make_text(tokens[: T + 1]), settings)  # compiles the kernels
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = evaluate(model, make_text(tokens), settings)["protocols"]["blocks"]["results"][0]
    if found["status"] != "ok":
        return row | {"status": found["status"], "reason": found["reason"]}
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    row |= {"status": "ok", "seconds": round(time.perf_counter() - start, 3), "scoring_seconds": found["seconds"]}
    return row | {
        "tokens_per_second": round(T * windows / found["seconds"], 1),
        "peak_mib": round(peak),
        "loss": found["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--encoding", default="kerple,cable,rope")
    parser.add_argument("--impl", default="reference,auto")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    batch_tokens = arguments.batch_tokens or (65536 if device.type == "cuda" else 8192)
    rows = []
    for encoding in arguments.encoding.split(","):
        torch.manual_seed(0)
        model = RelPosForCausalLM(RelPosConfig.preset("small", encoding)).to(device, dtype).eval()
        for T in map(int, arguments.lengths.split(",")):
            for impl in arguments.impl.split(","):
                row = {"encoding": encoding, **measure(model, impl, T, arguments.windows, batch_tokens)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    value = {"what": __doc__.split("\n")[0], "dtype": str(dtype), "versions": versions(device), "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
