"""Attention with every encoding of the case table: the reference against a dense softmax over the second formula, and
every other way to compute the same numbers against the reference."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, HEAD_DIM, Case
from support import Inputs, close, make, oracle, setting

import relpos
from relpos import UserError
from relpos.attention import attend, blockwise, choose, cpu, prepare, reference
from relpos.encodings import Encoding, build
from relpos.terms import Layout

every = pytest.mark.parametrize("case", CASES, ids=[case.spec for case in CASES])
several = [case for case in CASES if case.distinct]
distinct = pytest.mark.parametrize("case", several, ids=[case.spec for case in several])
H = 3
ROOT = Path(__file__).resolve().parent.parent


def attention(case: Case, encoding: Encoding, inputs: Inputs, **options):
    """All queries against all keys, with the hidden state where the encoding reads it."""
    hidden = inputs.hidden if case.content else None
    return relpos.attention(inputs.q, inputs.k, inputs.v, encoding, hidden=hidden, **options)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that tiny sizes cross borders."""
    monkeypatch.setattr(blockwise, "CELLS", 400)


# Against the second formula


@every
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_reference_is_a_dense_softmax(case, causal):
    if not causal and not case.bidirectional:
        encoding, inputs = make(case, H), Inputs(H, 5)
        with pytest.raises(UserError, match="causal attention only"):
            attention(case, encoding, inputs, causal=False)
        return
    for heads, T in ((12, 7), (H, 1), (H, 11)):
        encoding, inputs = make(case, heads), Inputs(heads, T)
        out, weights = attention(case, encoding, inputs, causal=causal, impl="reference", return_weights=True)
        for row in range(2):
            expected, there = oracle(case, setting(encoding, inputs, row, causal=causal), inputs.v[row])
            close(out[row], expected, 1e-7)
            close(weights[row], there, 1e-7)


@distinct
def test_grouped_query_attention(case, small_blocks):
    encoding, inputs = make(case, 12), Inputs(12, 7, key_heads=4, B=1)
    expected, _ = oracle(case, setting(encoding, inputs), inputs.v[0])
    for impl in ("reference", "blockwise"):
        close(attention(case, encoding, inputs, impl=impl)[0], expected, 1e-7)


@every
def test_explicit_positions(case, small_blocks):
    """With gaps, and longer than the number of keys."""
    positions = [0, 1, 4, 5, 8, 9, 14]
    encoding, inputs = make(case, H), Inputs(H, 7, B=2)
    expected, _ = oracle(case, setting(encoding, inputs, 1, positions=positions), inputs.v[1])
    both = torch.tensor([[0, 1, 2, 3, 4, 5, 6], positions])
    for impl in ("reference", "blockwise"):
        close(attention(case, encoding, inputs, positions=both, impl=impl)[1], expected, 1e-7)
    close(attention(case, encoding, inputs, positions=torch.tensor(positions))[1], expected, 1e-7)


@distinct
def test_window(case, small_blocks):
    if case.rescores:
        return  # their rows see the window too: the oracle's formula is for whole rows
    encoding, inputs = make(case, H), Inputs(H, 9, B=1)
    for causal in (True, False) if case.bidirectional else (True,):
        expected, _ = oracle(case, setting(encoding, inputs, causal=causal), inputs.v[0], window=3)
        for impl in ("reference", "blockwise"):
            close(attention(case, encoding, inputs, causal=causal, window=3, impl=impl)[0], expected, 1e-7)


# Blockwise against the reference


def gradients(out: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)  # the same for all
    found = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}


@distinct
@pytest.mark.parametrize("setup", ["causal", "both ways", "padded", "one token", "packed", "rows", "gaps"])
def test_blockwise_is_the_reference(case, setup, small_blocks):
    if setup == "both ways" and not case.bidirectional:
        return
    T = 1 if setup == "one token" else 13
    encoding = make(case, H)
    inputs = Inputs(H, T, B=1 if setup == "packed" else 2)
    options: dict = {"causal": setup != "both ways"}
    if setup == "padded":
        options["key_padding_mask"] = torch.arange(T) >= torch.tensor([[4], [0]])
    if setup == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 6, 13])
    if setup == "rows":
        inputs.q = inputs.q[:, :, :6].detach().requires_grad_()
        options["q_offset"] = torch.tensor([2, 7])
    if setup == "gaps":
        options["positions"] = torch.arange(T) * 3
    leaves = inputs.leaves(encoding)
    expected = attention(case, encoding, inputs, impl="reference", **options)
    actual = attention(case, encoding, inputs, impl="blockwise", **options)
    close(actual, expected, 1e-10)
    there, here = gradients(expected, leaves), gradients(actual, leaves)
    for name in leaves:
        assert there[name].isfinite().all(), name
        torch.testing.assert_close(here[name], there[name], rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    # Every parameter takes part. A bank's and a table's far entries do not, at 13 tokens.
    if setup == "causal" and case.embed is None:
        assert all(there[name].abs().sum() > 0 for name in leaves if name != "c" or T > 1)


def test_blockwise_under_autocast(small_blocks):
    """The blocks are computed again in the backward pass, which runs outside autocast."""
    case = next(case for case in CASES if case.spec == "kerple")
    encoding, inputs = make(case, H, dtype=torch.float32), Inputs(H, 13, dtype=torch.float32)
    leaves, found = inputs.leaves(encoding), {}
    for impl in ("reference", "blockwise"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(case, encoding, inputs, impl=impl)
        found[impl] = gradients(out, leaves)
    for name in leaves:
        torch.testing.assert_close(found["blockwise"][name], found["reference"][name], rtol=0.05, atol=0.02)


@distinct
def test_autocast_without_gradients(case, small_blocks):
    """Sums that are to stay float32 must not go into a product that autocast rounds."""
    encoding, inputs = make(case, H, dtype=torch.float32), Inputs(H, 40, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain, auto, blocks = (attention(case, encoding, inputs, impl=x) for x in ("reference", "auto", "blockwise"))
    assert plain.dtype == auto.dtype == blocks.dtype == torch.bfloat16
    torch.testing.assert_close(auto, plain)
    torch.testing.assert_close(blocks, plain)


@distinct
def test_no_text_no_query_no_key(case):
    encoding = make(case, H, dtype=torch.float32)
    for B, Tq, Tk in ((0, 5, 5), (2, 0, 5), (2, 0, 0)):
        for impl, dtype, grad in itertools.product(
            ("auto", "reference", "blockwise"), (torch.float32, torch.bfloat16), (False, True)
        ):
            q, k, v = (torch.randn(B, H, T, HEAD_DIM, dtype=dtype).requires_grad_(grad) for T in (Tq, Tk, Tk))
            hidden = torch.randn(B, Tk, H * HEAD_DIM)
            out = relpos.attention(q, k, v, encoding, hidden=hidden, impl=impl)
            assert out.shape == q.shape and out.dtype == dtype
            if grad:
                out.sum().backward()
                assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))
    q = torch.randn(1, H, 0, HEAD_DIM)
    k = torch.randn(1, H, 3, HEAD_DIM)
    out, weights = relpos.attention(q, k, k, encoding, hidden=torch.randn(1, 3, H * HEAD_DIM), return_weights=True)
    assert out.shape == q.shape and weights.shape == (1, H, 0, 3)


def test_a_matrix_longer_than_any_number():
    with pytest.raises(UserError, match="too large for this machine"):
        relpos.bias_matrix("alibi", 10**30)


def test_numbers_of_numpy():
    inputs = Inputs(H, 6, dtype=torch.float32)
    q, k, v = inputs.q[:, :, :3], inputs.k, inputs.v
    found = relpos.attention(q, k, v, "alibi", q_offset=np.int64(2), window=np.int32(4), scale=np.float32(0.5))
    assert torch.equal(found, relpos.attention(q, k, v, "alibi", q_offset=2, window=4, scale=0.5))


def test_blockwise_memory_is_linear():
    """Of a process of its own: dense, one tensor of scores alone would take 256 MiB, and a step several of them."""
    program = """
import resource, torch, relpos
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
encoding = relpos.encodings.build("kerple", heads=4, head_dim=8)
def step(T):
    q, k, v = (torch.randn(1, 4, T, 8, requires_grad=True) for _ in range(3))
    relpos.attention(q, k, v, encoding, impl="blockwise").sum().backward()
step(1024)
before = peak()
step(4096)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400, f"{done.stdout.strip()} MiB more at 4096 tokens than at 1024"


@distinct
def test_gradients_are_those_of_finite_differences(case):
    """Of the reference, by moving along one random direction of every input at once."""
    encoding, inputs = make(case, 2, seed=4), Inputs(2, 5, B=1, seed=6)
    leaves = inputs.leaves(encoding)
    generator = torch.Generator().manual_seed(7)
    steps = {n: torch.randn(x.shape, generator=generator, dtype=x.dtype) for n, x in leaves.items()}

    def value() -> torch.Tensor:
        out = attention(case, encoding, inputs, impl="reference")
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)  # the same for all
        return (out * weight).sum()

    found = torch.autograd.grad(value(), list(leaves.values()), allow_unused=True)
    slope = sum(float((g * steps[n]).sum()) for n, g in zip(leaves, found, strict=True) if g is not None)
    e = 1e-6
    values = []
    with torch.no_grad():
        for move in (e, -2 * e):
            for n, x in leaves.items():
                x.add_(steps[n], alpha=move)
            values.append(float(value()))
    assert (values[0] - values[1]) / (2 * e) == pytest.approx(slope, rel=1e-4, abs=1e-6)


# The same text in other clothes


def alone(inputs: Inputs, row: int, tokens: list[int]) -> Inputs:
    """Some tokens of one row as a text of their own."""
    own = Inputs.__new__(Inputs)
    own.q, own.k, own.v = (x[row : row + 1, :, tokens] for x in (inputs.q, inputs.k, inputs.v))
    own.hidden = inputs.hidden[row : row + 1, tokens]
    return own


@distinct
@pytest.mark.parametrize("where", ["left", "right", "hole", "both ends"])
def test_a_padded_row_equals_the_unpadded_one(case, where, small_blocks):
    if where == "hole" and not case.holes:
        return
    T = 12
    real = {
        "left": list(range(3, 12)),
        "right": list(range(9)),
        "hole": [0, 1, 4, 5, 6, 8, 9, 10, 11],
        "both ends": list(range(2, 11)),
    }[where]
    encoding, inputs = make(case, H), Inputs(H, T)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1] = False
    mask[1, real] = True
    for causal in (True, False) if case.bidirectional else (True,):
        expected = attention(case, encoding, alone(inputs, 1, real), causal=causal)[0]
        whole = attention(case, encoding, inputs, causal=causal)[0]
        for impl in ("reference", "blockwise"):
            out = attention(case, encoding, inputs, causal=causal, key_padding_mask=mask, impl=impl)
            close(out[1][:, real], expected)
            close(out[0], whole)
            padded = [t for t in range(T) if t not in real]
            assert (out[1][:, padded] == 0).all()


@distinct
def test_packed_documents_equal_separate_ones(case, small_blocks):
    borders = [0, 1, 7, 12]
    encoding, inputs = make(case, H), Inputs(H, 12, B=1)
    for causal in (True, False) if case.bidirectional else (True,):
        for impl in ("reference", "blockwise"):
            out = attention(case, encoding, inputs, causal=causal, cu_seqlens=torch.tensor(borders), impl=impl)
            for start, stop in zip(borders, borders[1:], strict=False):
                own = list(range(start, stop))
                close(out[:, :, own], attention(case, encoding, alone(inputs, 0, own), causal=causal))


@distinct
def test_rows_of_a_chunk_equal_rows_of_the_whole(case, small_blocks):
    T = 11
    encoding, inputs = make(case, H), Inputs(H, T)
    for causal in (True, False) if case.bidirectional else (True,):
        whole = attention(case, encoding, inputs, causal=causal)
        for impl in ("reference", "blockwise"):

            def rows(chosen, offset, causal=causal, impl=impl):
                hidden = inputs.hidden if case.content else None
                options = {"hidden": hidden, "causal": causal, "q_offset": offset, "impl": impl}
                return relpos.attention(chosen, inputs.k, inputs.v, encoding, **options)

            close(rows(inputs.q[:, :, 4:], None), whole[:, :, 4:])
            close(rows(inputs.q[:, :, 2:7], 2), whole[:, :, 2:7])
            chosen = torch.stack((inputs.q[0, :, 1:4], inputs.q[1, :, 6:9]))
            out = rows(chosen, torch.tensor([1, 6]))
            close(out[0], whole[0, :, 1:4])
            close(out[1], whole[1, :, 6:9])


def decode(case: Case, encoding: Encoding, inputs: Inputs, chunks: list[int], mask=None) -> torch.Tensor:
    """As a model with a cache: rotated keys and the state are kept, each call sees its own tokens only."""
    keys, state, outs, start = [], None, [], 0
    for size in chunks:
        own, stop = slice(start, start + size), start + size
        seen = None if mask is None else mask[:, :stop]
        layout = Layout(size, stop, torch.device("cpu"), key_padding_mask=seen, first_length=chunks[0])
        hidden = inputs.hidden[:, own] if case.content else None
        if hidden is not None:
            new = encoding.key_state(hidden, layout, state)
            assert (new is not None) == encoding.stateful
            if new is not None:
                state = new if state is None else torch.cat((state, new), -1)
        rotation, terms = prepare(encoding, layout, hidden, state, torch.float64)
        q, k = inputs.q[:, :, own], inputs.k[:, :, :stop]
        q, k = reference.apply_rotation(q, k, rotation)
        keys.append(k[:, :, own])
        rescore = encoding.rescore if encoding.rescores else None
        outs.append(attend(q, torch.cat(keys, 2), inputs.v[:, :, :stop], terms, layout, rescore=rescore))
        start = stop
    return torch.cat(outs, 2)


@distinct
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_cached_decoding_equals_the_full_pass(case, padded):
    T = 13
    encoding, inputs = make(case, H), Inputs(H, T)
    mask = torch.arange(T) >= torch.tensor([[0], [3]]) if padded else None
    for chunks in ([1] * T, [6, 1, 1, 5], [10, 3]):
        if case.by_length:  # frequencies of the first call's length, for all that follows
            layout = Layout(T, T, torch.device("cpu"), key_padding_mask=mask, first_length=chunks[0])
            rotation, terms = prepare(encoding, layout, dtype=torch.float64)
            q, k = reference.apply_rotation(inputs.q, inputs.k, rotation)
            whole = attend(q, k, inputs.v, terms, layout)
        else:
            whole = attention(case, encoding, inputs, key_padding_mask=mask)
        close(decode(case, encoding, inputs, chunks, mask), whole)


@distinct
def test_state_through_the_public_function(case):
    """attention(..., state=): hidden for the queries only."""
    if not case.content:
        return
    encoding, inputs = make(case, H), Inputs(H, 9)
    whole = attention(case, encoding, inputs)
    state = encoding.key_state(inputs.hidden, Layout(9, 9, torch.device("cpu")))
    last = relpos.attention(inputs.q[:, :, 7:], inputs.k, inputs.v, encoding, hidden=inputs.hidden[:, 7:], state=state)
    close(last, whole[:, :, 7:])


# Rows without keys, NaN


@distinct
def test_rows_without_a_key_are_zero_and_harm_no_gradient(case, small_blocks):
    T = 9
    encoding, inputs = make(case, H), Inputs(H, T)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :4] = False
    mask[1] = False
    for impl in ("reference", "blockwise"):
        out = attention(case, encoding, inputs, key_padding_mask=mask, impl=impl)
        assert (out[1] == 0).all() and (out[0, :, :4] == 0).all() and (out[0, :, 4:] != 0).any()
        for name, gradient in gradients(out, inputs.leaves(encoding)).items():
            assert gradient.isfinite().all(), (impl, name)
            if name in ("q", "k", "v", "hidden"):
                assert (gradient[1] == 0).all(), (impl, name)
    rows = attention(case, encoding, inputs, key_padding_mask=mask, return_weights=True)[1].sum(-1)
    close(rows[0, :, 4:], torch.ones_like(rows[0, :, 4:]))
    assert (rows[1] == 0).all()


@distinct
def test_nan_in_is_nan_out(case, small_blocks):
    encoding, inputs = make(case, H), Inputs(H, 8, B=2)
    for impl in ("reference", "blockwise"):
        for name in ("q", "k", "v", *(["hidden"] if case.content else [])):
            broken = Inputs(H, 8, B=2)
            with torch.no_grad():
                getattr(broken, name)[0, ..., 5, 0] = math.nan
            out = attention(case, encoding, broken, impl=impl)
            assert out[0, :, 5].isnan().any(), name
            close(out[1], attention(case, encoding, inputs)[1])


# Dtypes


@distinct
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_near_float64(case, dtype):
    T = 40
    encoding, inputs = make(case, H), Inputs(H, T, B=1, dtype=dtype)
    exact = make(case, H).to(dtype).double()  # the same rounded parameters
    wide = Inputs(H, T, B=1, dtype=dtype)
    for name in ("q", "k", "v", "hidden"):
        setattr(wide, name, getattr(inputs, name).detach().double())
    expected = attention(case, exact, wide)
    for impl in ("reference", "blockwise"):
        out = attention(case, encoding.to(dtype), inputs, impl=impl)
        assert out.dtype == dtype
        # A content-aware bias sums 40 rounded steps, so its error is that many roundings of the model's dtype.
        rounding = torch.finfo(dtype).eps * (40 if case.content or case.rescores else 8)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=max(rounding, 4e-5))


@distinct
def test_autocast_leaves_the_bias_alone(case):
    """Under bfloat16 autocast a float32 matrix product of the bias would run in bfloat16."""
    encoding, inputs = make(case, H, dtype=torch.float32), Inputs(H, 20, B=1, dtype=torch.float32)
    layout = Layout(20, 20, torch.device("cpu"))
    state = encoding.key_state(inputs.hidden, layout) if case.content else None
    _, terms = prepare(encoding, layout, inputs.hidden, state)
    scores = (inputs.q @ inputs.k.transpose(-1, -2)) * HEAD_DIM**-0.5

    def bias() -> torch.Tensor:
        own = terms if case.content else prepare(encoding, layout)[1]  # projections of hidden may be rounded
        found = reference.bias_of(own, layout, H)
        allowed = layout.allowed()[:, None]
        return encoding.rescore(scores, found, inputs.q, inputs.k, allowed) if case.rescores else found

    expected = bias()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bias()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# torch.compile


@distinct
def test_compiles_without_a_break(case):
    torch._dynamo.reset()
    # One case per encoding runs the reference inside blocks, which takes longer to trace.
    impl = "blockwise" if case is next(c for c in several if c.name == case.name) else "reference"
    encoding, inputs = make(case, 2, dtype=torch.float32), Inputs(2, 6, dtype=torch.float32)
    mask, offset = torch.arange(6) >= torch.tensor([[0], [2]]), torch.tensor([1, 3])
    leaves = inputs.leaves(encoding)

    def run(q: torch.Tensor) -> torch.Tensor:
        hidden = inputs.hidden if case.content else None
        options = {"hidden": hidden, "key_padding_mask": mask, "q_offset": offset, "impl": impl}
        out = relpos.attention(q, inputs.k, inputs.v, encoding, **options)
        vectors = encoding.embed(torch.arange(6))
        return out if vectors is None else out + vectors.sum()

    q = inputs.q[:, :, :3]
    expected, actual = run(q), torch.compile(run, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    there, here = gradients(expected, leaves), gradients(actual, leaves)
    for name in leaves:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-4)


def test_compiles_for_growing_lengths():
    """One graph serves every length, as in evaluation at several."""
    torch._dynamo.reset()
    encoding = build("kerple", heads=2, head_dim=HEAD_DIM)
    options = {"fullgraph": True, "backend": "aot_eager", "dynamic": True}
    run = torch.compile(lambda q: relpos.attention(q, q, q, encoding), **options)
    for T in (5, 17):
        q = torch.randn(1, 2, T, HEAD_DIM)
        torch.testing.assert_close(run(q), relpos.attention(q, q, q, encoding))


# Which implementation, bad input


def test_choose_says_what_and_why():
    q = torch.zeros(1, 2, 16, HEAD_DIM, requires_grad=True)
    layout = Layout(16, 16, q.device)
    assert choose("reference", q, q, q, [], layout) == ("reference", "asked for")
    assert choose("blockwise", q, q, q, [], layout) == ("blockwise", "asked for")
    how, why = choose("auto", q, q, q, [], layout)
    assert how == "reference" and "small enough to be dense" in why
    how, why = choose("auto", q.detach(), q.detach(), q.detach(), [], layout)
    assert how == "blockwise" and "no gradient is wanted" in why
    long = torch.zeros(1, 2, 1, HEAD_DIM, requires_grad=True).expand(-1, -1, 4096, -1)
    how, why = choose("auto", long, long, long, [], Layout(4096, 4096, q.device))
    assert how == "blockwise" and "memory linear in the length" in why
    assert choose("auto", q, q, q, [], layout, return_weights=True) == ("reference", "the weights were asked for")
    with pytest.raises(UserError, match="impl='fused' cannot run here: .*impl='auto' picks one that can"):
        choose("fused", q, q, q, [], layout)
    with pytest.raises(UserError, match="there is no implementation 'blokwise'. Did you mean 'blockwise'"):
        choose("blokwise", q, q, q, [], layout)
    for impl in ("blockwise", "fused"):
        with pytest.raises(UserError, match=f"impl='{impl}' never holds the weights"):
            choose(impl, q, q, q, [], layout, return_weights=True)


def test_explain_answers_for_a_call():
    q = torch.zeros(1, 4, 16, HEAD_DIM, requires_grad=True)
    how, why = relpos.explain(q, q, q, "alibi")
    assert how == "reference" and "small enough to be dense" in why
    assert relpos.explain(q, q, q, "rope", impl="blockwise", causal=False, window=3) == ("blockwise", "asked for")
    long = torch.zeros(1, 4, 1, HEAD_DIM).expand(-1, -1, 2048, -1)
    assert relpos.explain(long, long, long, "alibi")[0] == "blockwise"
    assert relpos.explain(long, long, long, "alibi", return_weights=True)[0] == "reference"
    with pytest.raises(UserError, match="was built for 5 heads"):
        relpos.explain(q, q, q, build("kerple", heads=5))


@pytest.mark.parametrize("spec", ["none", "rope", "alibi", "kerple", "t5", "fire:length=6", "cable", "fox", "inkling"])
@pytest.mark.parametrize("queries", [23, 9, 1])
def test_without_gradients_pytorchs_own_kernel_gives_the_same(spec, queries, monkeypatch):
    """Blocks of few rows; all queries, the last ones of a cache, and one."""
    monkeypatch.setattr(cpu, "ROWS", 5)
    monkeypatch.setattr(blockwise, "CELLS", 4 * 23 * 2 * 3)
    encoding = build(spec, heads=4, head_dim=HEAD_DIM).double()
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 2, 23, HEAD_DIM, dtype=torch.float64)
    q = torch.randn(2, 4, queries, HEAD_DIM, dtype=torch.float64)
    hidden = torch.randn(2, 23, 4 * HEAD_DIM, dtype=torch.float64)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        calls = []
        monkeypatch.setattr(cpu, "attend", lambda *a, inner=cpu.attend: calls.append(1) or inner(*a))
        ours = relpos.attention(q, k, v, encoding, hidden=hidden, impl="blockwise")
        close(ours, relpos.attention(q, k, v, encoding, hidden=hidden, impl="reference"))
    assert calls


def test_values_of_another_dtype_without_gradients():
    inputs = Inputs(4, 6, dtype=torch.float32)
    with torch.no_grad():
        for impl in ("auto", "blockwise"):
            out = relpos.attention(inputs.q, inputs.k, inputs.v.double(), "alibi", impl=impl)
            close(out, relpos.attention(inputs.q, inputs.k, inputs.v.double(), "alibi", impl="reference"))


def test_explain_knows_that_a_window_may_show_all():
    q = torch.randn(1, 4, 64, 16)
    with torch.no_grad():
        assert relpos.explain(q, q, q, "alibi", window=64) == relpos.explain(q, q, q, "alibi")
        assert relpos.explain(q, q, q, "alibi", window=63) != relpos.explain(q, q, q, "alibi")


def test_explain_takes_the_arguments_of_attention():
    inputs = Inputs(4, 6, dtype=torch.float32)
    assert relpos.explain(inputs.q, inputs.k, inputs.v, "alibi", scale=0.3, window=3)[0] in ("reference", "blockwise")
    with pytest.raises(UserError, match="no argument 'windw'. Did you mean 'window'"):
        relpos.explain(inputs.q, inputs.k, inputs.v, "alibi", windw=3)
    relpos.explain(inputs.q, inputs.k, inputs.v, "alibi", sinks=None, softcap=None, dropout=0.0)
    for match, wrong in (("soft-capping is not", {"softcap": 3.0}), ("scale must be a number above 0", {"scale": -1})):
        with pytest.raises(UserError, match=match):
            relpos.explain(inputs.q, inputs.k, inputs.v, "alibi", **wrong)


def test_auto_is_the_same_at_a_length_where_it_is_blockwise(monkeypatch):
    encoding, inputs = make(several[0], H), Inputs(H, 20)
    dense = attention(several[0], encoding, inputs)
    monkeypatch.setattr(sys.modules["relpos.attention"], "DENSE_CELLS", 10)
    close(attention(several[0], encoding, inputs), dense)


def bad(message, **changes):
    """A call that is right but for the changes."""
    inputs = Inputs(4, 6, dtype=torch.float32)
    encoding = changes.pop("encoding", "alibi")
    q, k, v = (changes.pop(name, getattr(inputs, name)) for name in "qkv")
    with pytest.raises(UserError, match=message):
        relpos.attention(q, k, v, encoding, **changes)


def test_bad_input():
    x = torch.zeros
    bad(r"q must be \[B,H,Tq,D\]", q=x(4, 6, 8))
    bad(r"q must be \[B,H,Tq,D\]", q=x(8))
    bad("q, k and v must be tensors, not list", q=[1.0])
    tiny = x(2, 4, 6, 8).to(torch.float8_e5m2)
    bad("16 bits or more, not torch.float8_e5m2", q=tiny, k=tiny, v=tiny)
    bad("floating point type, not torch.int64", q=x(2, 4, 6, 8).long(), k=x(2, 4, 6, 8).long())
    bad("q is torch.float32 and k is torch.float64", k=x(2, 4, 6, 8).double())
    bad("do not fit together", k=x(2, 4, 6, 7))
    bad("do not fit together", v=x(2, 4, 5, 8))
    bad("do not fit together", k=x(3, 4, 6, 8), v=x(3, 4, 6, 8))
    bad("4 query heads cannot share 3 key heads", k=x(2, 3, 6, 8), v=x(2, 3, 6, 8))
    bad("4 query heads cannot share 0 key heads", k=x(2, 0, 6, 8), v=x(2, 0, 6, 8))
    bad("causal must be True or False, not 'no'", causal="no")
    bad("alibi was built for 5 heads and q has 4", encoding=build("alibi", heads=5))
    bad(r"rope was built for heads of 16 features and q has 8", encoding=build("rope", heads=4, head_dim=16))
    bad("there is no encoding 'alibbi'. Did you mean 'alibi'", encoding="alibbi")
    bad("kerple has parameters: build it once", encoding="kerple")
    bad("encoding must be", encoding=3)
    bad(r"key_padding_mask must be \[B, Tk\] = \[2, 6\], not \[2, 5\]", key_padding_mask=x(2, 5, dtype=torch.bool))
    bad("key_padding_mask must be bool, True for real tokens, not torch.float32", key_padding_mask=x(2, 6))
    bad("True for real tokens, not torch.complex64", key_padding_mask=x(2, 6, dtype=torch.complex64))
    bad("batch must be 1, not 2", cu_seqlens=torch.tensor([0, 6]))
    one = {"q": x(1, 4, 6, 8), "k": x(1, 4, 6, 8), "v": x(1, 4, 6, 8)}
    borders = "cu_seqlens must be one row of document borders, whole numbers from 0 to 6"
    bad(borders, cu_seqlens=torch.tensor([[0, 6]]), **one)
    bad(borders, cu_seqlens=torch.tensor([0.0, 6.0]), **one)
    for wrong in ([2, 6], [0, 5], [0, 4, 3, 6]):
        bad(r"cu_seqlens must rise from 0 to 6, the number of tokens; it is \[", cu_seqlens=torch.tensor(wrong), **one)
    bad("pass no key_padding_mask", cu_seqlens=torch.tensor([0, 6]), key_padding_mask=x(1, 6) == 0, **one)
    bad("pass no key_padding_mask or positions", cu_seqlens=torch.tensor([0, 6]), positions=x(1, 6).long(), **one)
    bad("q_offset=7 puts 6 queries outside 6 keys", q_offset=7)
    bad("q_offset=-1 puts", q_offset=-1)
    bad("9 queries cannot be the last of 6 keys", q=x(2, 4, 9, 8))
    bad(r"q_offset must be an int or \[B\] = \[2\], not \[3\]", q_offset=torch.tensor([0, 0, 0]))
    bad(r"positions must be \[1 or B, Tk\] = \[2, 6\], not \[2, 5\]", positions=x(2, 5).long())
    bad("window must be at least 1", window=0)
    bad("window must be at least 1, and below 2\\^63, not 1000", window=10**30)
    bad("window must be a whole number, not 2.5", window=2.5)
    bad("window must be a whole number, not '5'", window="5")
    bad("q_offset must be a whole number, not 1.5", q_offset=1.5)
    bad("q_offset must be whole numbers, not torch.float32", q_offset=x(2))
    bad("q_offset=4 puts 3 queries outside 6 keys", q=x(2, 4, 3, 8), q_offset=torch.tensor([0, 4]))
    bad("q_offset=-1 puts", q=x(2, 4, 3, 8), q_offset=torch.tensor([-1, 0]))
    bad("positions must be whole numbers, not torch.float32", encoding="rope", positions=torch.arange(6) / 2)
    bad("positions must be whole numbers, not torch.bool", positions=x(2, 6, dtype=torch.bool))
    far = torch.arange(6) + 10000
    bad("there are 10006", encoding="xpos", positions=far, q=x(2, 4, 6, 8).half(), k=x(2, 4, 6, 8).half())
    far = {name: x(1, 1, 6000, 8).half() for name in "qkv"}
    bad("there are 6000", encoding="xpos", cu_seqlens=torch.tensor([0, 6000]), **far)
    bad("there is no implementation 'flash'", impl="flash")
    bad("there is no implementation None", impl=None)
    bad("impl='fused' cannot run here", impl="fused")
    bad("impl='blockwise' never holds the weights", impl="blockwise", return_weights=True)
    bad("sinks is not supported", sinks=x(4))
    bad("soft-capping is not supported", softcap=30.0)
    bad("dropout is not supported", dropout=0.1)
    cable = build("cable", heads=4, head_dim=HEAD_DIM)
    bad(r"cable reads the layer's input: pass hidden=\[B, Tk, 32\]", encoding=cable)
    bad("hidden has 31 features; cable was built for 32", encoding=cable, hidden=x(2, 6, 31))
    bad("hidden has 5 tokens but there are 6 keys: pass state too", encoding=cable, hidden=x(2, 5, 32))
    bad("hidden has 5 tokens; expected 6", encoding=cable, hidden=x(2, 5, 32), state=x(2, 4, 6))
    for wrong in (torch.tensor(1.0), x(6, 32), x(2, 6, 32).long()):
        bad(r"hidden must be \[B, T, hidden_size\] of a floating point type", encoding=cable, hidden=wrong)
    bad("hidden has a batch of 3", encoding=cable, hidden=x(3, 6, 32))
    bad(r"state must be \[B, S, Tk\]", encoding=cable, hidden=x(2, 6, 32), state=x(2, 4, 5))
    bad("fox is defined for causal attention only", encoding=build("fox", heads=4, head_dim=8), causal=False)
    bad("learned has 4 positions and the text needs 6", encoding=build("learned:max_positions=4", heads=4, head_dim=8))


def test_a_coarser_hidden_state_and_things_that_are_no_tensors():
    encoding = build("cable", heads=2, head_dim=8)
    q = torch.randn(1, 2, 5, 8)
    hidden = torch.randn(1, 5, 16)
    half = relpos.attention(q, q, q, encoding, hidden=hidden.bfloat16())
    torch.testing.assert_close(half, relpos.attention(q, q, q, encoding, hidden=hidden.bfloat16().float()))
    for match, wrong in (
        ("state must be", {"hidden": hidden, "state": torch.zeros(1, 2, 3)}),
        ("key_padding_mask must be a tensor", {"hidden": hidden, "key_padding_mask": [True] * 5}),
        ("hidden must be a tensor", {"hidden": [1.0]}),
        ("scale must be a number", {"hidden": hidden, "scale": "x"}),
        ("scale must be a number above 0", {"hidden": hidden, "scale": 0.0}),
        ("scale must be a number above 0, not True", {"hidden": hidden, "scale": True}),
    ):
        with pytest.raises(UserError, match=match):
            relpos.attention(q, q, q, encoding, **wrong)


def test_everything_is_on_one_device():
    inputs = Inputs(4, 6, dtype=torch.float32)
    q, away = inputs.q, {"device": "meta"}
    one = {"q": q[:1], "k": q[:1], "v": q[:1]}
    bad("k is on meta and q on cpu: move one of them", k=q.to("meta"))
    bad("key_padding_mask is on meta", key_padding_mask=torch.ones(2, 6, dtype=torch.bool, **away))
    bad("cu_seqlens is on meta", cu_seqlens=torch.tensor([0, 6], **away), **one)
    bad("q_offset is on meta", q_offset=torch.zeros(2, dtype=torch.long, **away))
    bad("positions is on meta", positions=torch.zeros(6, dtype=torch.long, **away))
    bad("hidden is on meta", encoding=build("cable", heads=4, head_dim=8), hidden=torch.zeros(2, 6, 32, **away))
    bad("the encoding kerple is on meta", encoding=build("kerple", heads=4, head_dim=8).to("meta"))


def test_a_mask_of_whole_numbers_is_one_of_real_tokens():
    """Segment ids too: what is not 0 is real."""
    inputs = Inputs(4, 6, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 2, 2, 3, 0], [0, 2, 2, 2, 2, 2]])
    cable = build("cable", heads=4, head_dim=8)
    rope = "rope:scaling=dynamic,factor=2,original_max_position_embeddings=3"
    for encoding, hidden in (("alibi", None), (cable, torch.randn(2, 6, 32)), (rope, None)):
        for impl in ("reference", "blockwise"):
            out, same = (
                relpos.attention(
                    inputs.q, inputs.k, inputs.v, encoding, hidden=hidden, key_padding_mask=given, impl=impl
                )
                for given in (mask, mask.bool())
            )
            assert torch.equal(out, same)


def test_blockwise_says_that_it_has_no_rule_for_transforms():
    q = torch.randn(1, 2, 6, HEAD_DIM)
    with pytest.raises(UserError, match="impl='blockwise' has no rule for torch.func"):
        torch.func.grad(lambda q: relpos.attention(q, q, q, "alibi", impl="blockwise").sum())(q)


def test_bad_input_of_a_bias_matrix():
    for match, *wrong in (
        ("length must be a whole number", "alibi", True),
        ("10000000000 x 10000000000 for each head is too large", "alibi", 10**10),
        (r"hidden must be a tensor \[B,T,hidden_size\], not list", build("cable", heads=2, head_dim=8), 6, [[0.0]]),
    ):
        with pytest.raises(UserError, match=match):
            relpos.bias_matrix(*wrong)
