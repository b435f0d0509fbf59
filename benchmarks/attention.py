"""Attention with every encoding beside the peers, in one run on one GPU.

    python benchmarks/attention.py --out results/attention-h200.json

Causal, bfloat16, 32,768 tokens a call, 12 heads of 64 (6 of 128), random data, medians of CUDA-event timings. The floor
is stated with the result: FLOPs of the matrix products over the measured rate of a large bf16 product, bytes over the
measured copy bandwidth, whichever takes longer.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import relpos  # noqa: E402
from relpos.attention import attend, prepare  # noqa: E402
from relpos.encodings import build  # noqa: E402
from relpos.terms import Layout  # noqa: E402
from relpos.training import record  # noqa: E402

TOKENS = 32768
FLUSH = torch.empty(0)
OURS = [
    "none", "rope", "alibi", "alibi:learn=true", "cable", "cable:form=unweighted", "cable:form=kernel",
    "cable:form=softplus", "fox", "t5", "t5:form=clipped", "kerple", "kerple:form=power", "sandwich", "fire", "xpos",
    "inkling",
]  # fmt: skip


def median_ms(run: Callable[[], object], budget_ms: float = 150.0) -> float:
    """Median GPU time from the first kernel of a call to its last, after a warm-up. The GPU sleeps first while the host
    queues the call, as it is queued ahead in a training step; caches are cold."""
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    for _ in range(3 if time.perf_counter() - start < 3 else 0):  # the first call compiles; some peers take seconds
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    once = (time.perf_counter() - start) * 1e3
    count = int(min(50, max(7 if once < 100 else 3, budget_ms / max(once, 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        FLUSH.zero_()
        torch.cuda._sleep(int(2e9 * min(2 * queued, 0.01)))  # cycles, at 2 GHz
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[count // 2]


def eager_ms(run: Callable[[], object], budget_ms: float = 60.0) -> float:
    """Time of a call among many, one after the other from Python: the host's time where that is the longer."""
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = int(min(50, max(3, budget_ms / ((time.perf_counter() - start) * 1e3))))
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / count


def trained(encoding):
    """Away from the initial values, where FIRE has all its knots in one place and tables are zero."""
    with torch.no_grad():
        for parameter in encoding.parameters():
            if parameter.numel() > 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return encoding


def peak_extra_mib(run: Callable[[], object]) -> float:
    """Peak memory of one call beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def inputs(length: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    batch = max(1, TOKENS // length)
    q, k, v, do = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    hidden = torch.randn(batch, length, heads * head_dim, device="cuda", dtype=torch.bfloat16)
    for x in (q, k, v, hidden):
        x.requires_grad_()
    return q, k, v, do, hidden


def ours(spec: str, impl: str = "fused"):
    """From q, k, v to the output, and the gradients of q, k, v and the encoding's parameters. For content-aware
    encodings the operands are their potentials and gates: the projections that make them are the model's, as those of
    q, k and v are (benchmarks/training_step.py times them all)."""

    def make(q, k, v, do, hidden):
        encoding = trained(build(spec, heads=q.shape[1], head_dim=q.shape[-1]).cuda())
        if not encoding.content:
            return lambda: relpos.attention(q, k, v, encoding, impl=impl), [*encoding.parameters()]
        layout = Layout(Tq=q.shape[2], Tk=k.shape[2], device=q.device)
        with torch.no_grad():
            _, terms = prepare(encoding, layout, hidden.float(), None, torch.float32)
        leaves: list[torch.Tensor] = []

        def leaf(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            leaves.append(x.clone().requires_grad_())
            return leaves[-1]

        terms = [type(term)(**{f.name: leaf(getattr(term, f.name)) for f in fields(term)}) for term in terms]
        return lambda: attend(q, k, v, terms, layout, impl=impl), leaves

    return make


def sdpa(backend: SDPBackend):
    def make(q, k, v, do, hidden):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return call, []

    return make


def flex(kind: str):
    def make(q, k, v, do, hidden):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # each variant compiles twice (with and without gradients); the limit is eight
        compiled = torch.compile(flex_attention, dynamic=False)
        B, H, T, _ = q.shape
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
        parameters: list[torch.Tensor] = []
        score_mod = None
        if kind == "alibi":
            slopes = torch.exp2(-8.0 * torch.arange(1, H + 1, device="cuda") / H)
            score_mod = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
        elif kind == "key":
            key = torch.rand(B, H, T, device="cuda").cumsum(-1).requires_grad_()
            parameters = [key]
            score_mod = lambda s, b, h, i, j: s + key[b, h, j]  # noqa: E731 - two look-ups with gradient are refused
        elif kind == "kerple":
            a, p = (torch.rand(H, device="cuda", requires_grad=True) for _ in range(2))
            parameters = [a, p]
            score_mod = lambda s, b, h, i, j: s - p[h] * torch.log(1 + a[h] * (i - j).abs())  # noqa: E731

        return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask), parameters

    return make


def dense_t5(q, k, v, do, hidden):
    encoding = build("t5", heads=q.shape[1], head_dim=q.shape[-1]).cuda()

    def call():
        bias = relpos.bias_matrix(encoding, q.shape[2]).to(q.dtype)[None].expand(q.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return call, [*encoding.parameters()]


def dense_cable(q, k, v, do, hidden):
    return ours("cable", "reference")(q, k, v, do, hidden)


PEERS = {
    "flash (FA2), no bias": sdpa(SDPBackend.FLASH_ATTENTION),
    "cuDNN, no bias": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention, no bias": flex("none"),
    "FlexAttention, ALiBi fixed": flex("alibi"),
    "FlexAttention, key bias learned": flex("key"),
    "FlexAttention, KERPLE learned": flex("kerple"),
    "dense T5 (SDPA, bias matrix)": dense_t5,
    "dense CABLE (plain PyTorch)": dense_cable,
}
# Peers that take seconds, to compile or to run: the longest length for each.
LONGEST = {
    "FlexAttention, KERPLE learned": 4096,
    "dense T5 (SDPA, bias matrix)": 4096,
    "dense CABLE (plain PyTorch)": 4096,
    "FlexAttention, no bias": 16384,
    "FlexAttention, ALiBi fixed": 16384,
    "FlexAttention, key bias learned": 16384,
}


def measure(make, q, k, v, do, hidden) -> dict:
    call, parameters = make(q, k, v, do, hidden)
    leaves = [q, k, v, *[p for p in parameters if p.requires_grad]]

    def step():
        torch.autograd.grad(call(), leaves, do)

    with torch.no_grad():
        forward = median_ms(call)
    both = median_ms(step)
    return {"forward_ms": forward, "both_ms": both, "eager_ms": eager_ms(step), "extra_mib": peak_extra_mib(step)}


def decoding(result: dict) -> None:
    """One query against a cache, beside SDPA without bias and K and V at the speed of a copy. Terms are made before."""
    for batch in (1, 64):
        for cached in (1024, 8192, 65536):
            torch.manual_seed(0)
            k, v = (torch.randn(batch, 12, cached, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            q = torch.randn(batch, 12, 1, 64, device="cuda", dtype=torch.bfloat16)
            hidden = torch.randn(batch, cached, 768, device="cuda")
            calls = {"SDPA, no bias": functools.partial(F.scaled_dot_product_attention, q, k, v)}
            for spec in ("none", "alibi", "kerple", "t5", "fire", "cable", "fox", "inkling"):
                encoding = trained(build(spec, heads=12, head_dim=64).cuda())
                layout = Layout(Tq=1, Tk=cached, device=q.device)
                with torch.no_grad():
                    _, terms = prepare(encoding, layout, hidden if encoding.content else None)
                calls[f"relpos {spec}"] = functools.partial(attend, q, k, v, terms, layout, impl="fused")
            for name, call in calls.items():
                with torch.no_grad():
                    row = {"name": name, "batch": batch, "cached": cached, "us": median_ms(call) * 1e3}
                row["floor_us"] = 2 * k.numel() * 2 / result["ceilings"]["copy_tb_s"] / 1e6
                result["decode"].append(row)
            found = "  ".join(f"{row['name']} {row['us']:.1f}" for row in result["decode"][-len(calls) :])
            print(f"decode {batch:3} x {cached:6}, us: {found}", flush=True)


def compile_one(job: tuple[str, int, int]) -> None:
    """Fill the compilers' caches on disk for one encoding, or one peer that is compiled, so that all compile side by
    side. Our kernels are the same for every length and batch."""
    name, length, head_dim = job
    peer = name in PEERS
    given = [x if peer else x[:1] for x in inputs(length, 768 // head_dim, head_dim)]
    try:
        call, leaves = (PEERS[name] if peer else ours(name))(*given)
        if peer:
            with torch.no_grad():
                call()
        torch.autograd.grad(call(), [*given[:3], *[x for x in leaves if x.requires_grad]], given[3])
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the measurement reports it
        print(name, type(error).__name__, str(error)[:200], flush=True)


def ceilings() -> dict:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = median_ms(lambda: a @ b)
    x = torch.randn(2**30, device="cuda")
    y = torch.empty_like(x)
    copy = median_ms(lambda: y.copy_(x))
    return {"bf16_tflops": 2 * 8192**3 / product / 1e9, "copy_tb_s": 2 * x.numel() * 4 / copy / 1e9}


def floor_ms(length: int, heads: int, head_dim: int, top: dict) -> dict:
    """Forward has 2 matrix products per causal cell, backward 5; q, k, v, o and their gradients move once."""
    cells = TOKENS * length / 2 * heads
    flops = 7 * 2 * head_dim * cells
    bytes_ = (3 + 1 + 5 + 3) * TOKENS * heads * head_dim * 2
    return {"arithmetic_ms": flops / top["bf16_tflops"] / 1e9, "memory_ms": bytes_ / top["copy_tb_s"] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="512,1024,4096,16384,32768")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--only", default="", help="names with ; between them")
    parser.add_argument("--out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    only = [name for name in options.only.split(";") if name]
    lengths, head_dims = ([int(n) for n in x.split(",")] for x in (options.lengths, options.head_dims))
    jobs = [(name, n, 64) for name in LONGEST if "Flex" in name for n in lengths if 1024 <= n <= LONGEST[name]]
    jobs += [(spec, 1024, d) for d in head_dims for spec in OURS]
    jobs = [job for job in jobs if not only or job[0] in only or f"relpos {job[0]}" in only]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    global FLUSH
    FLUSH = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")  # larger than the L2
    top = ceilings()
    print(f"{torch.cuda.get_device_name()}: bf16 {top['bf16_tflops']:.0f} TFLOP/s, copy {top['copy_tb_s']:.2f} TB/s")
    rows: list[dict] = []
    result = {
        "what": "causal attention, forward and forward + backward, bfloat16, 32,768 tokens a call, medians",
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "relpos": relpos.__version__},
        "commit": (record.git_commit() or {"commit": "unknown"})["commit"],
        "ceilings": top,
        "floors": [
            {"length": n, "head_dim": d, **floor_ms(n, 768 // d, d, top)}
            for d in (64, 128)
            for n in (512, 1024, 4096, 16384, 32768)
        ],
        "rows": rows,
        "decode": [],
    }
    decoding(result)
    for head_dim in head_dims:
        heads = 768 // head_dim
        for length in lengths:
            if head_dim != 64 and length not in (1024, 4096):
                continue
            table = {**PEERS, **{f"relpos {spec}": ours(spec) for spec in OURS}}
            base = None
            for name, make in table.items():
                if only and name not in only and base is not None:
                    continue
                if name in LONGEST and (not 1024 <= length <= LONGEST[name] or head_dim != 64):
                    continue
                given = inputs(length, heads, head_dim)
                try:
                    row = measure(make, *given)
                except Exception as error:  # noqa: BLE001 - one peer that fails must not cost the others
                    print(f"{name:34} {length:6} failed: {type(error).__name__}: {str(error)[:150]}", flush=True)
                    torch.cuda.empty_cache()
                    continue
                base = base or row
                row |= {"name": name, "length": length, "head_dim": head_dim, "heads": heads}
                row["ratio"] = row["both_ms"] / base["both_ms"]
                row["forward_ratio"] = row["forward_ms"] / base["forward_ms"]
                rows.append(row)
                print(
                    f"{name:34} {length:6} d{head_dim:<4} fwd {row['forward_ms']:8.3f} ({row['forward_ratio']:5.2f})  "
                    f"both {row['both_ms']:8.3f} ({row['ratio']:5.2f})  eager {row['eager_ms']:7.3f}  "
                    f"+{row['extra_mib']:6.0f} MiB",
                    flush=True,
                )
                if options.out:  # after every row: a run that is stopped keeps what it measured
                    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
                    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
