"""The fused kernels against the reference in float64: output and every gradient, off by at most twice what eager code
in the same dtype is off.

On a GPU the kernels run at real sizes. Elsewhere Triton's interpreter runs the same kernels on the CPU at small ones:
`TRITON_INTERPRET=1 pytest tests/test_fused.py`, as `make test` does. What it does with bfloat16 is mended first.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

import bfloat16
import pytest
import torch
from cases import CASES, Case
from children import together
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import relpos
from relpos import UserError, encodings
from relpos.attention import attend as attend_terms
from relpos.attention import decode, fused, reference, rotary
from relpos.encodings import build
from relpos.models import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM

GPU = torch.cuda.is_available()
if not GPU and not fused.interpreted():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter", allow_module_level=True)
if not GPU:
    bfloat16.mend()

DEVICE = "cuda" if GPU else "cpu"
LENGTH = 333 if GPU else 37  # not a multiple of any block
# The interpreter takes seconds for what a GPU does at once: two heads there, where nothing else is asked for.
HEADS = {"heads": 4, "key_heads": 2} if GPU else {"heads": 2, "key_heads": 1}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
HALF = torch.bfloat16


def fusable(case: Case) -> bool:
    """By what the kernels say of the encoding's terms, not by its name."""
    encoding = build(case.spec, heads=2, head_dim=8).to(DEVICE)
    q = torch.zeros(1, 2, 4, 8, device=DEVICE)
    layout = relpos.terms.Layout(Tq=4, Tk=4, device=q.device)
    hidden = torch.zeros(1, 4, 16, device=DEVICE) if encoding.content else None
    _, terms = relpos.attention.__globals__["prepare"](encoding, layout, hidden, None, torch.float32)
    return fused.obstacle(q, q, q, terms, layout, rescores=encoding.rescores) is None


# To the kernels all encodings without a bias are one: the first case of each name stands for its variants.
FIRST = {case.name: case for case in reversed(CASES)}
FUSABLE = [case for case in CASES if case.distinct and (case.bias or FIRST[case.name] is case) and fusable(case)]
IDS = [case.spec for case in FUSABLE]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks small enough that a short text has full, masked and far tiles."""
    if not GPU:
        blocks = {"backward_k": (16, 32, 4, 1, 0), "profile_gradient": (fused.PARTS, fused.PARTS, 4, 1, 0)}
        blocks["backward_distance"] = (16, 16, 4, 1, 0)

        def small(kernel: str, q: torch.Tensor, kind: int) -> fused.Blocks:
            return blocks.get(kernel, (16, 16, 4, 1, 0) if kind == fused.BANK else (32, 16, 4, 1, 0))

        monkeypatch.setattr(fused, "_blocks", small)
        monkeypatch.setattr(fused, "PROGRAMS", 64)  # as many as there is work for would take minutes


def attend(spec: str, dtype, impl: str, *, heads=4, key_heads=2, head_dim=8, T=LENGTH, Tq=None, B=2, **options) -> dict:
    """Output and gradients of one call whose operands are the same for every implementation and dtype."""
    generator = torch.Generator().manual_seed(1)
    Tq = T if Tq is None else Tq

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = build(spec, heads=heads, head_dim=head_dim)
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    operands = [
        normal(B, heads, Tq, head_dim),
        normal(B, key_heads, T, head_dim),
        normal(B, key_heads, T, head_dim),
        normal(B, T, heads * head_dim).float(),
    ]
    cotangent = normal(B, heads, Tq, head_dim).to(DEVICE)
    if impl == "exact":
        operands, cotangent, encoding = [x.double() for x in operands], cotangent.double(), encoding.double()
    encoding = encoding.to(DEVICE)
    q, k, v, hidden = (x.to(DEVICE).requires_grad_() for x in operands)
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out = relpos.attention(q, k, v, encoding, hidden=hidden, impl="reference" if impl == "exact" else impl, **options)
    out.backward(cotangent)
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "hidden": hidden.grad}
    found |= {name: parameter.grad for name, parameter in encoding.named_parameters()}
    return {name: x for name, x in found.items() if x is not None}


def compare(spec: str, dtype: torch.dtype, **options) -> None:
    ours, eager, exact = (attend(spec, dtype, impl, **options) for impl in ("fused", "reference", "exact"))
    assert ours.keys() == exact.keys()
    for name, truth in exact.items():
        size = truth.norm().item()
        error, allowed = ((x[name].double() - truth).norm().item() for x in (ours, eager))
        # Sums over all tokens that nearly cancel: in float32 the order of the terms alone moves them by this much.
        # Those that cancel whole, with one token, leave the rounding of their terms, which depends on the CPU.
        floor = (1e-5 * size if dtype == torch.float32 else 1e-6 * size) + (1e-7 if size else 1e-6)
        assert error <= 2 * allowed + floor, f"{name}: off by {error:.3g}, eager by {allowed:.3g}, of {size:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FUSABLE, ids=IDS)
def test_causal_with_grouped_heads(case, dtype):
    compare(case.spec, dtype, **HEADS if dtype != torch.float32 else {})


@pytest.mark.parametrize("case", [c for c in FUSABLE if c.bidirectional], ids=lambda c: c.spec)
def test_bidirectional(case):
    compare(case.spec, torch.float32, causal=False, **HEADS)


@pytest.mark.parametrize("case", FUSABLE, ids=IDS)
def test_padding_left_right_and_holes(case):
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :7] = False
    mask[1, -5:] = False
    mask[1, 11:14] = False
    compare(case.spec, HALF, key_padding_mask=mask, heads=HEADS["heads"], key_heads=2)


@pytest.mark.parametrize("case", FUSABLE, ids=IDS)
def test_packed_documents(case):
    compare(case.spec, torch.float32, B=1, cu_seqlens=torch.tensor([0, 1, 20, LENGTH]), **HEADS)


# One encoding for each way a bias reaches the kernels: none, slope, key, gate, logarithm, profiles of a logarithm and
# of a power, knots, a table as long as the text and one that is shorter, a bank.
KINDS = ["none", "alibi:learn=true", "fox", "cable", "cable:form=kernel", "kerple", "kerple:form=power",
         "fire:width=8,length=9", "t5:form=clipped,clip=999", "t5:form=clipped,clip=5",
         "inkling:rank=3,length=50"]  # fmt: skip


@pytest.mark.parametrize("spec", KINDS)
def test_queries_in_the_middle(spec):
    compare(spec, HALF, Tq=11, q_offset=17)
    compare(spec, torch.float32, Tq=11, q_offset=torch.tensor([3, 20]))


def test_offsets_of_a_dtype_that_holds_no_length():
    offset = torch.tensor([3, 100], dtype=torch.int8)
    compare("none", torch.float32, T=130, Tq=5, heads=1, key_heads=1, q_offset=offset)


@pytest.mark.parametrize("spec", KINDS)
def test_window(spec):
    compare(spec, HALF, window=9)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_shows_all(causal):
    compare("alibi", HALF, T=40, heads=2, key_heads=2, window=(1 << 31) - 1, causal=causal)


@pytest.mark.parametrize("spec", KINDS)
def test_whole_blocks(spec):
    """Loads go without masks, and a profile has tiles on one piece, with one rho and with many."""
    compare(spec, HALF, T=128, B=1, heads=2, key_heads=1)


@pytest.mark.parametrize("spec", ["alibi", "t5:buckets=8,max_distance=40", "t5:form=clipped,clip=999", "cable"])
def test_whole_blocks_that_begin_elsewhere(spec):
    for offset in (5, 64):
        compare(spec, HALF, T=256, Tq=128, B=1, heads=2, key_heads=1, q_offset=offset)
    compare(spec, HALF, T=128, B=2, heads=1, key_heads=1, causal=False)


def test_one_rho_for_the_first_queries():
    """There a profile's values are a table by distance."""
    for dtype, T, length in ((HALF, 128, 500), (torch.float32, 77, 500), (HALF, 256, 150)):
        compare(f"fire:width=8,length={length}", dtype, T=T, B=2 if T == 77 else 1, heads=2, key_heads=1)
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[0, :7] = False
    mask[1, -5:] = False
    compare("fire:width=8,length=500", HALF, T=77, heads=2, key_heads=1, key_padding_mask=mask)
    compare("fire:width=8,length=500", HALF, T=77, Tq=40, heads=2, key_heads=1, q_offset=20)


@pytest.mark.parametrize(
    ("T", "Tq", "B", "length", "dtype"),
    [(128, 128, 3, 20, HALF), (128, 128, 2, 20, torch.float16), (75, 75, 2, 20, HALF), (256, 256, 2, 140, HALF)]
    + [(90, 60, 1, 9, HALF)],
)
def test_a_profile_near_the_diagonal(T, Tq, B, length, dtype, monkeypatch):
    """Where blocks are as long as wide, texts share what knots make of the tiles there; and their gradient is summed by
    a kernel of its own, in shares of the texts."""
    if not GPU:
        real = fused._blocks

        def square(kernel: str, *of) -> fused.Blocks:
            return (16, 16, 4, 1, 0) if kernel != "profile_gradient" else real(kernel, *of)

        monkeypatch.setattr(fused, "_blocks", square)
    launched = set()
    launch = fused._Call.launch

    def noted(call: fused._Call, kernel: str, *of, **flags) -> None:
        launched.add(kernel)
        launch(call, kernel, *of, **flags)

    monkeypatch.setattr(fused._Call, "launch", noted)
    compare(f"fire:width=8,length={length}", dtype, T=T, Tq=Tq, B=B, heads=2, key_heads=1, q_offset=0)
    assert {"profile_band", "backward_band"} <= launched


@pytest.mark.parametrize("rate", [0.0, 1e-8, 1e-4, 1e-2, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_series_is_the_profile(dtype, rate, monkeypatch):
    """Coefficients times polynomials: psi, at all distances but the nearest."""
    monkeypatch.setattr(fused, "_blocks", lambda *_: (64, 64, 4, 1, 0))
    q = torch.zeros(1, 1, 1000, 16, device=DEVICE, dtype=dtype)
    parts = [rate], [0.5], [[1.0, 2.0]], [[0.0, -0.5]]
    a, knots, slope, offset = (torch.tensor(x, device=DEVICE) for x in parts)
    rho = torch.linspace(1, 0.5, 1000, device=DEVICE)[None]
    how = (None, None, fused.PROFILE, 0, True, 0, 0, 0.25, False)
    _, beside = fused._calls(q, q, a, rho, knots, slope, offset, *how)
    series, n = beside.series[0].double().cpu(), 64
    distance = torch.arange(2 * n, len(series))[:, None] - torch.arange(n)
    true = torch.log1p(a.double().cpu() * distance)
    unit = torch.log1p(a.double().cpu() * 2 * n) if dtype == torch.float16 else 1.0
    assert ((series[2 * n :] @ series[:n].T * unit - true).abs() <= 2e-5 * true).all()


def test_how_many_of_the_first_queries_have_one_rho():
    q = torch.zeros(1, 1, 2500, 16, device=DEVICE, dtype=HALF)
    a, knots, slope, offset = (torch.tensor(x, device=DEVICE) for x in ([0.1], [0.5], [[1.0, 2.0]], [[0.0, -0.5]]))
    counts = (1, 1023, 1024, 1025, 2048, 2499, 2500)
    rho = torch.ones(len(counts), 2500, device=DEVICE)
    for row, count in zip(rho, counts):
        row[count:] = torch.linspace(0.5, 1, 2500, device=DEVICE)[count:]  # of which the very last is 1 again
    how = (None, None, fused.PROFILE, 0, True, 0, 0, 0.25, False)
    call, _ = fused._calls(q, q, a, rho, knots, slope, offset, *how)
    assert call.term[7].tolist() == [2500 if count == 2499 else count for count in counts]


def test_many_shares_of_the_first_queries(monkeypatch):
    monkeypatch.setattr(fused, "TILES", 1)
    monkeypatch.setattr(fused, "PROGRAMS", 2000)
    compare("fire:width=8,length=500", torch.float32, T=77, B=4, heads=2, key_heads=1)


@pytest.fixture
def described(monkeypatch):
    """For each launch that walks tiles: the kernel, and whether they come by TMA."""
    found = []
    launch = fused._Call.launch

    def noted(call: fused._Call, kernel: str, *of, **flags) -> None:
        if "TMA" in flags:
            found.append((kernel, flags["TMA"]))
        launch(call, kernel, *of, **flags)

    monkeypatch.setattr(fused._Call, "launch", noted)
    return found


BY_TMA = ["none", "alibi:learn=true", "t5:form=clipped,clip=9", "kerple", "fire:width=8,length=30", "cable", "fox"]


@pytest.mark.parametrize("spec", [*BY_TMA, "cable:form=kernel"])
def test_tiles_that_the_hardware_copies(spec, described):
    """With whole blocks and without, and keys and queries that lie in one tensor."""
    compare(spec, HALF, T=LENGTH if GPU else 50, heads=2, key_heads=1, head_dim=64)
    if spec in ("none", "fire:width=8,length=30"):
        compare(spec, torch.float16, T=256 if GPU else 128, heads=2, key_heads=2, head_dim=64, B=1)
    by_tma = not GPU or torch.cuda.get_device_capability() >= (9, 0)
    assert {kernel for kernel, how in described if how is by_tma} == {"backward_q", "backward_k"}


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"window": 13}, {"cu_seqlens": (0, 7, 7, 31, 50)}, {"Tq": 20, "q_offset": 11}],
    ids=lambda options: next(iter(options)),
)
def test_tiles_that_the_hardware_copies_in_part(options, described):
    if "cu_seqlens" in options:
        options = {"B": 1, "cu_seqlens": torch.tensor(options["cu_seqlens"])}
    compare("kerple", HALF, T=50, heads=2, key_heads=1, head_dim=64, **options)
    assert described


@pytest.mark.parametrize("how", ["shifted", "narrow", "expanded", "padded"])
def test_tiles_that_the_hardware_cannot_copy(how, described):
    """From odd places, with odd strides, with no stride at all, and where padding is to be left out."""
    T, D = 40, 64
    x = torch.randn(4, 2, T, 2 * (D + 1) + 8, dtype=HALF, device=DEVICE)
    q, k, v = (x[n].unflatten(-1, (2, -1))[..., :D].transpose(1, 2) for n in range(3))
    do = torch.randn(2, 2, T, D, dtype=HALF, device=DEVICE)
    mask = None
    if how == "shifted":
        q, k, v = (torch.randn(2 * 2 * T * D + 1, dtype=HALF, device=DEVICE)[1:].view(2, 2, T, D) for _ in range(3))
    elif how == "expanded":
        q, k, v = torch.randn(3, 2, 2, T, D, dtype=HALF, device=DEVICE)
        do = do[:, :1].expand_as(do)
    elif how == "padded":
        q, k, v = (y.contiguous() for y in (q, k, v))
        mask = torch.ones(2, T, dtype=torch.bool, device=DEVICE)
        mask[0, :5] = False
    found = []
    for impl, dtype in (("fused", HALF), ("reference", HALF), ("reference", torch.float64)):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (q, k, v)]
        out = relpos.attention(*leaves, "none", impl=impl, key_padding_mask=mask)
        found.append((out, *torch.autograd.grad(out, leaves, do.to(dtype))))
    for ours, eager, exact in zip(*found, strict=True):
        error, allowed = ((y.double() - exact).norm() for y in (ours, eager))
        assert error <= 2 * allowed + 1e-6
    assert described == [("backward_q", False), ("backward_k", False)]


@pytest.mark.parametrize("spec", ["alibi", "t5", "fire", "inkling", "cable"])
def test_nothing_to_attend(spec):
    """An empty batch, no queries, no tokens: gradients are zeros."""
    for B, Tq, T in ((0, 20, 20), (2, 0, 20), (2, 0, 0)):
        found = attend(spec, HALF, "fused", B=B, T=T, Tq=Tq, **({"q_offset": 0} if Tq != T else {}))
        assert found["out"].shape == (B, 4, Tq, 8) and not any(x.any() for x in found.values())
    mask = torch.ones(0, 20, dtype=torch.bool)
    assert attend(spec, HALF, "fused", B=0, T=20, key_padding_mask=mask)["out"].shape == (0, 4, 20, 8)
    mask = torch.ones(2, 20, dtype=torch.bool)
    assert attend(spec, HALF, "fused", Tq=0, T=20, q_offset=0, key_padding_mask=mask)["out"].shape == (2, 4, 0, 8)
    encoding = build(spec, heads=4, head_dim=8).to(DEVICE)
    for B, Tq, T in ((0, 1, 20), (2, 0, 20), (2, 0, 0)):  # decoding
        q, k = (torch.zeros(B, 4, n, 8, device=DEVICE) for n in (Tq, T))
        hidden = torch.zeros(B, T, 32, device=DEVICE)
        with torch.no_grad():
            out = relpos.attention(q, k, k, encoding, hidden=hidden, impl="fused", q_offset=T - Tq)
        assert out.shape == (B, 4, Tq, 8)


def test_what_the_kernels_do_not_do_is_said():
    q, k = (torch.randn(1, 2, n, 8, device=DEVICE) for n in (1, 20))
    narrow, many = torch.randn(1, 2, 20, 4, device=DEVICE), torch.empty(1 << 15, 2, 4, 8, device=DEVICE)
    with pytest.raises(UserError, match="values as wide as queries, and these have 4 and 8 features"):
        relpos.attention(q, k, narrow, "alibi", impl="fused")
    assert relpos.attention(q, k, narrow, "alibi").shape == (1, 2, 1, 4)
    with pytest.raises(UserError, match="these are torch.float32 and torch.float16"):
        relpos.attention(q.half(), k.half(), k, "alibi", impl="fused")
    assert relpos.attention(q.half(), k.half(), k, "alibi").dtype == torch.float32
    with pytest.raises(UserError, match="at most 65,535 heads of all texts together"):
        relpos.attention(many, many, many, "alibi", impl="fused")
    apart = 3 * torch.arange(20, device=DEVICE)[None]
    with pytest.raises(UserError, match="explicit positions"):  # unlike decoding, which takes no gradients
        relpos.attention(q, k, k.clone().requires_grad_(), "alibi", positions=apart, impl="fused")
    with pytest.raises(UserError, match="those of a window"):
        relpos.attention(q, k, k.clone().requires_grad_(), "none", positions=apart, window=9, impl="fused")


def test_second_derivatives_are_refused():
    q = torch.randn(1, 2, 20, 8, device=DEVICE, requires_grad=True)
    for impl in ("fused", "blockwise"):
        loss = relpos.attention(q, q, q, "alibi", impl=impl).square().sum()
        with pytest.raises(UserError, match=f"{impl} attention has no second derivative"):
            torch.autograd.grad(loss, q, create_graph=True)
    cos, sin = torch.randn(2, 1, 20, 4, device=DEVICE)

    def second(turn, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x, c, s = q.detach().to(dtype).requires_grad_(), cos.to(dtype), sin.to(dtype)
        (first,) = torch.autograd.grad(turn(x, c, s, False).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].double()

    # A rotation has one, as exact as plain code's.
    exact = second(reference.rotate, torch.float64)
    eager = (second(reference.rotate) - exact).norm()
    assert 0 < eager < 1e-5 * exact.norm() and (second(rotary.turn) - exact).norm() <= 2 * eager


def test_inside_functorch_and_forward_mode():
    encoding = build("rope", heads=2, head_dim=8).to(DEVICE)
    q, t = torch.randn(2, 1, 2, 3, 8, device=DEVICE)
    k = torch.randn(1, 2, 20, 8, device=DEVICE)

    def loss(q: torch.Tensor, impl: str = "auto") -> torch.Tensor:
        return relpos.attention(q, k, k, encoding, impl=impl).square().sum()

    expected = torch.autograd.functional.jvp(lambda q: loss(q, "reference"), q, t)[1]
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (t,))[1], expected)
    torch.testing.assert_close((torch.func.grad(loss)(q) * t).sum(), expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(q, t))).tangent
    torch.testing.assert_close(tangent, expected)
    with pytest.raises(UserError, match="no rule for its kernels"):
        torch.func.grad(lambda q: loss(q, "fused"))(q)


def test_banks_on_a_gpu_with_less_shared_memory(monkeypatch):
    monkeypatch.setattr(fused, "_shared_memory", lambda device: 101376)
    compare("inkling:rank=100,length=30", torch.float32, head_dim=72)


def test_a_profile_in_any_unit():
    """Only the product of psi and rho counts, and where the knots lie on its scale."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3))
    found = []
    for unit in (1.0, 1e-12):
        rho = (unit / torch.arange(2, 42, device=DEVICE).log())[None].requires_grad_()
        rate = torch.tensor([0.5], device=DEVICE).requires_grad_()
        knots = torch.tensor([0.31, 0.77], device=DEVICE) * unit  # on which no query lies
        slope = (torch.tensor([[1.0, 3.0, -2.0]], device=DEVICE) / unit).expand(2, -1).clone().requires_grad_()
        jumps = torch.cat((torch.zeros(2, 1, device=DEVICE), ((slope[:, :-1] - slope[:, 1:]) * knots).cumsum(1)), 1)
        layout = relpos.terms.Layout(Tq=40, Tk=40, device=q.device)
        term = relpos.terms.Profile(rate, rho, knots, slope, jumps.detach())
        attend_terms(q, k, v, [term], layout, impl="fused").square().sum().backward()
        found.append([rate.grad, rho.grad * unit, slope.grad / unit])
    for one, small in zip(*found):
        torch.testing.assert_close(small, one, rtol=1e-3, atol=1e-3 * one.abs().max().item())


@pytest.mark.skipif(not GPU, reason="the interpreter has blocks of its own, smaller ones")
def test_blocks_for_long_texts(monkeypatch):
    monkeypatch.setattr(fused, "_LONG", {key: (1, blocks) for key, (_, blocks) in fused._LONG.items()})
    compare("fire:width=8,length=150", HALF, T=256, B=1, heads=2, key_heads=1)


@pytest.mark.parametrize("spec", ["none", "alibi", "fox", "cable", "kerple", "t5", "inkling:rank=3,length=50"])
def test_blocks_of_64(spec, monkeypatch):
    """For so many queries backward_q leaves backward_k no more than it needs."""
    # With one stage ptxas 12.8 takes operands of a bank from the wrong place: see `_Call.blocks`, which gives a bank
    # smaller blocks for heads below 32.
    monkeypatch.setattr(fused, "_blocks", lambda *_: (64, 64, 4, 3 if GPU else 1, 0))
    head_dim = 32 if spec.startswith("inkling") else 8
    compare(spec, HALF, T=150, B=1, heads=2, key_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("spec", ["cable", "kerple", "t5"])
def test_twelve_heads_one_token_and_a_block_plus_one(spec):
    compare(spec, HALF, heads=12, key_heads=12, T=33, B=1)
    compare(spec, HALF, T=1)


def decoded(spec: str, dtype, impl: str, *, heads: int, key_heads: int, T: int, Tq=1, head_dim=8, **options):
    """Output of a call for the last Tq tokens of T, whose operands are the same for every implementation and dtype."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        encoding = build(spec, heads=heads, head_dim=head_dim)
        for parameter in encoding.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    shapes = [(2, heads, Tq, head_dim), (2, key_heads, T, head_dim), (2, key_heads, T, head_dim)]
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
    hidden = torch.randn(2, T, heads * head_dim, generator=generator).to(DEVICE)
    if impl == "exact":
        (q, k, v, hidden), encoding, impl = (x.double() for x in (q, k, v, hidden)), encoding.double(), "reference"
    with torch.no_grad():
        return relpos.attention(q, k, v, encoding.to(DEVICE), hidden=hidden, impl=impl, **options).double()


def compare_decoded(spec: str, dtype: torch.dtype, **options) -> None:
    ours, eager, exact = (decoded(spec, dtype, impl, **options) for impl in ("fused", "reference", "exact"))
    error, allowed = (ours - exact).norm().item(), (eager - exact).norm().item()
    assert error <= 2 * allowed + 1e-6 * exact.norm().item(), f"off by {error:.3g}, eager by {allowed:.3g}"


@pytest.mark.parametrize("case", FUSABLE, ids=IDS)
def test_decoding_the_last_token(case, monkeypatch):
    """The kernel computes the term itself: grouped heads, a head of keys for each, one stretch and several, windows;
    padding on the left, in the middle and on the right, where a token that is padding sees nothing."""
    monkeypatch.setattr(decode, "STRETCH", 64)
    T = 500 if GPU else 70  # a table of learned vectors has 1,024
    compare_decoded(case.spec, torch.float32, heads=4, key_heads=2, T=T)
    compare_decoded(case.spec, torch.float16, heads=3, key_heads=3, T=37)
    if GPU:
        compare_decoded(case.spec, HALF, heads=4, key_heads=2, T=T)
    compare_decoded(case.spec, HALF, heads=4, key_heads=2, T=2 * T, window=70)
    mask = torch.ones(2, T, dtype=torch.bool, device=DEVICE)
    mask[0, :7] = mask[0, 30:33] = False
    compare_decoded(case.spec, torch.float32, heads=2, key_heads=1, T=T, key_padding_mask=mask)
    mask[1, -1] = False
    compare_decoded(case.spec, HALF, heads=2, key_heads=2, T=T, key_padding_mask=mask, window=40)


@pytest.mark.parametrize("spec", ["none", "t5", "fire"])
def test_decoding_with_twelve_heads_of_an_odd_size(spec):
    compare_decoded(spec, HALF, heads=12, key_heads=12, T=65, head_dim=24)


@pytest.mark.parametrize("case", [c for c in CASES if c.distinct and not c.rescores], ids=lambda c: c.spec)
def test_decoding_a_few_queries(case, monkeypatch):
    """A few queries in a padded batch: the kernel is told what is added."""
    monkeypatch.setattr(decode, "STRETCH", 64)
    T = 500 if GPU else 70  # a table of learned vectors has 1,024
    mask = torch.ones(2, T, dtype=torch.bool, device=DEVICE)
    mask[0, :40] = False
    for dtype in (torch.float32, HALF):
        compare_decoded(case.spec, dtype, heads=4, key_heads=2, T=T, Tq=3, key_padding_mask=mask)


@pytest.mark.parametrize("spec", ["kerple", "cable"])
def test_decoding_against_many_stretches(spec, monkeypatch):
    """More than are joined at once."""
    monkeypatch.setattr(decode, "STRETCH", 64)
    T = 64 * 70 if GPU else 64 * 33 + 5
    compare_decoded(spec, HALF, heads=2, key_heads=1, T=T)


@pytest.mark.parametrize("spec", ["kerple", "fox", "inkling:rank=3,length=50"])
def test_decoding_compiled_whole(spec):
    encoding = build(spec, heads=4, head_dim=8).to(DEVICE)
    q, k, v = (torch.randn(1, h, t, 8, device=DEVICE) for h, t in ((4, 1), (2, 70), (2, 70)))
    hidden = torch.randn(1, 70, 32, device=DEVICE)

    def last(q: torch.Tensor) -> torch.Tensor:
        return relpos.attention(q, k, v, encoding, hidden=hidden, impl="fused")

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(last, fullgraph=True, backend="aot_eager")(q), last(q))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_decoding_with_a_potential_that_rises_and_falls(causal, log):
    """No encoding here has one, but a term may: where the future is seen, the size of the difference counts."""
    q, k, v = (torch.randn(1, 2, t, 8, device=DEVICE) for t in (1, 70, 70))
    potential = torch.randn(1, 2, 70, device=DEVICE)
    term = relpos.terms.Potential(potential[..., -1:], potential, torch.rand(1, 2, 1, device=DEVICE), log)
    layout = relpos.terms.Layout(Tq=1, Tk=70, causal=causal, device=q.device)
    with torch.no_grad():
        ours, plain = (attend_terms(q, k, v, [term], layout, impl=impl) for impl in ("fused", "reference"))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("key_heads", [2, 1])
def test_decoding_with_a_bank_of_large_values(key_heads):
    """Rounded to 16 bits they would be off by more than the products of q and k."""
    q, k, v = (torch.randn(1, h, t, 8, device=DEVICE, dtype=torch.float64) for h, t in ((2, 1), *2 * [(key_heads, 70)]))
    rows, bank = (x + 0.3 * torch.randn(*s, device=DEVICE).double() for x, s in ((2, (1, 2, 1, 5)), (6, (5, 40))))
    layout = relpos.terms.Layout(Tq=1, Tk=70, device=q.device)
    found = []
    for impl, dtype in (("fused", HALF), ("reference", HALF), ("reference", torch.float64)):
        q, k, v = (x.to(HALF).to(dtype) for x in (q, k, v))
        wide = torch.promote_types(dtype, torch.float32)
        with torch.no_grad():
            found.append(attend_terms(q, k, v, [relpos.terms.Bank(rows.to(wide), bank.to(wide))], layout, impl=impl))
    ours, eager = ((x.double() - found[2]).norm() for x in found[:2])
    assert 0 < ours <= 2 * eager


def test_decoding_with_knots_that_the_kernel_is_told_of():
    """Too many of them, or a rate for each head."""
    compare_decoded(f"fire:width={decode.KNOTS + 1}", HALF, heads=2, key_heads=2, T=70)
    q, k, v = (torch.randn(1, 2, t, 8, device=DEVICE, dtype=torch.float64) for t in (1, 70, 70))
    rate, rho = torch.tensor([0.1, 0.7]), torch.tensor([[0.3]])
    knots, slope, offset = torch.tensor([0.2, 0.6]), torch.randn(2, 3), torch.zeros(2, 3)
    offset[:, 1] = offset[:, 0] + (slope[:, 0] - slope[:, 1]) * 0.2
    offset[:, 2] = offset[:, 1] + (slope[:, 1] - slope[:, 2]) * 0.6
    layout = relpos.terms.Layout(Tq=1, Tk=70, device=q.device)

    def run(dtype: torch.dtype, impl: str) -> torch.Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        term = relpos.terms.Profile(*(x.to(DEVICE, wide) for x in (rate, rho, knots, slope, offset)))
        return attend_terms(q.to(dtype), k.to(dtype), v.to(dtype), [term], layout, impl=impl)

    with torch.no_grad():
        close = run(torch.float32, "fused").double() - run(torch.float64, "reference")
    assert close.abs().max() < 1e-5


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128])
@pytest.mark.parametrize("spec", ["cable", f"inkling:rank=5,length={130 if GPU else 7}"])
def test_head_sizes(spec, head_dim):
    compare(spec, HALF, head_dim=head_dim, heads=2, key_heads=1, T=LENGTH if GPU else 20)


@pytest.mark.parametrize("spec", ["t5", "kerple", "fire:width=8,length=9", "inkling:rank=16,length=50"])
def test_large_heads(spec):
    """Whose blocks are others on a GPU."""
    compare(spec, HALF, head_dim=128, heads=2, key_heads=1, T=256 if GPU else 20)


def test_where_the_knots_of_fire_lie():
    """All in one place as they are at first, some near distance 0, many in a tile, none; more than a thousand; and with
    rates that are tiny or huge. None where a distance lies, but 0: what the derivative is there rounding decides, and
    one weight more on one side would count for more than the rest of the error."""

    def clear(place: torch.Tensor, rate: float) -> torch.Tensor:
        i = torch.arange(T, dtype=torch.float64)
        rate = torch.tensor(rate, dtype=torch.float32).double()
        u = torch.log1p(rate * i) / (torch.log1p(rate * i.clamp(min=length)) + 1e-6)[:, None]
        u = u[i <= i[:, None]].sort().values
        moved = place.clone()
        for n in (place > 0).nonzero():
            for _ in range(1000):
                at = torch.searchsorted(u, moved[n].double()).clamp(max=len(u) - 1)
                if (u[(at - 1).clamp(min=0)] - moved[n]).abs() > 6e-7 and (u[at] - moved[n]).abs() > 6e-7:
                    break
                moved[n] += 3e-7
        return moved

    def gradients(impl: str, dtype: torch.dtype, place: torch.Tensor, rate: float) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        q, k, v, do = (torch.randn(2, 2, T, 16, generator=generator).to(dtype).to(DEVICE) for _ in range(4))
        torch.manual_seed(0)
        encoding = build(f"fire:width={len(place)},length={length}", heads=2, head_dim=16)
        with torch.no_grad():
            encoding.c.fill_(rate)
            encoding.inner.weight.fill_(1.0)
            encoding.inner.bias.copy_(-place)
            encoding.outer.weight.normal_()
        if impl == "exact":
            q, k, v, do, encoding = q.double(), k.double(), v.double(), do.double(), encoding.double()
        encoding = encoding.to(DEVICE)
        out = relpos.attention(q, k, v, encoding, impl="fused" if impl == "fused" else "reference")
        # The gradient of the outer bias is zero.
        found = torch.autograd.grad(out, [p for name, p in encoding.named_parameters() if name != "outer.bias"], do)
        return {str(n): x for n, x in enumerate((out.detach(), *found))}

    T, length = (1024, 200) if GPU else (64, 12)
    places = [torch.zeros(8), torch.linspace(0.0, 0.05, 8), torch.linspace(0.5, 0.9, 8), torch.full((8,), 2.0)]
    places += [torch.tensor([0.5, 0.51, 0.7, 0.71, 0.72, 0.9, 0.95, 3.0]), torch.linspace(-0.9, -0.01, 1024)]
    few = torch.tensor([0.5, 0.9, 0.99])
    cases = [*[(place, 0.1, HALF) for place in places], (few, 1e-5, HALF), (few, 1e18, HALF)]
    cases.append((torch.linspace(0.01, 0.1, 8), 1e-8, torch.float32))
    for place, rate, dtype in cases:
        place = clear(place, rate)
        ours, eager, exact = (gradients(impl, dtype, place, rate) for impl in ("fused", "reference", "exact"))
        for name, truth in exact.items():
            error, allowed = ((x[name].double() - truth).norm().item() for x in (ours, eager))
            assert error <= 2 * allowed + 1e-5 * truth.norm().item() + 1e-7, (place, rate, name, error, allowed)


@pytest.mark.parametrize(
    ("causal", "T", "alike", "step"), [(True, 70, 0, 0), (False, 70, 0, 0), (True, 256, 128, 0), (True, 128, 0, 32)]
)
def test_knots_with_a_rate_for_each_head_and_a_rho_for_each_text(causal, T, alike, step):
    """No encoding here has them, but a term may. And of the second text all queries may have one rho, while of the
    first only so many have it. And it may change so from one block of queries to the next that all of one lie before
    every knot, and nearly all of the next behind every one."""
    H, K = 2, 5
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    q, k, v, do = (draw(2, H, T, 16) for _ in range(4))
    knots, slope = draw(K).abs().sort().values, draw(H, K + 1)
    jumps = torch.cat((torch.zeros(H, 1), ((slope[:, :-1] - slope[:, 1:]) * knots).cumsum(1)), 1)
    rho = draw(2, T).abs() + 0.5
    if alike:
        rho[0, :alike] = rho[1] = rho[0, 0].clone()
    if step:
        rho[:, 1:] = torch.where(torch.arange(1, T) // step % 2 == 0, 0.02, 5.0)
    given = [torch.tensor([0.01, 0.8]), rho, slope, draw(H, 1) + jumps]

    def gradients(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, *given)]
        rate, rho, slope, offset = leaves[3:]
        layout = relpos.terms.Layout(Tq=T, Tk=T, causal=causal, device=leaves[0].device)
        term = relpos.terms.Profile(rate, rho, knots.to(DEVICE, dtype), slope, offset)
        out = attend_terms(*leaves[:3], [term], layout, impl=impl)
        found = [out, *torch.autograd.grad(out, leaves, do.to(DEVICE, dtype))]
        if alike:  # one quantity
            found[5] = torch.cat((found[5][0, :alike].sum()[None] + found[5][1].sum(), found[5][0, alike:]))
        return found

    for n, (ours, exact) in enumerate(
        zip(gradients("fused", torch.float32), gradients("reference", torch.float64), strict=True)
    ):
        assert (ours.double() - exact).norm() <= 2e-5 * exact.norm() + 1e-5, n


def test_knots_have_no_gradient_of_their_own():
    q, k, v = (torch.randn(1, 2, 9, 16, device=DEVICE) for _ in range(3))
    rate, rho, knots = (torch.tensor(x, device=DEVICE) for x in ([0.3], [[1.0] * 9], [0.2, 0.5]))
    slope, offset = torch.randn(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    layout = relpos.terms.Layout(Tq=9, Tk=9, device=q.device)
    term = relpos.terms.Profile(rate, rho, knots.requires_grad_(), slope.requires_grad_(), offset)
    attend_terms(q, k, v, [term], layout, impl="fused").square().sum().backward()
    assert slope.grad.abs().max() > 0 and not knots.grad.any()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(layout, dtype):
    x = torch.randn(2, 3, 19, 16, device=DEVICE).to(dtype).requires_grad_()
    angle = torch.randn(1, 19, 6, device=DEVICE)
    arguments = (angle.cos() * 1.5, angle.sin() * 1.5, layout == "interleaved")
    cotangent = torch.randn(2, 3, 19, 16, device=DEVICE).to(dtype)
    results = []
    for turn in (rotary.turn, reference.rotate):
        out = turn(x, *arguments)
        results.append((out, *torch.autograd.grad(out, x, cotangent)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("spec", ["cable", "fire:width=4,length=9", "t5:form=clipped,clip=5"])
def test_the_same_bits_every_time(spec):
    first, second = (attend(spec, HALF, "fused", T=LENGTH if GPU else 20, heads=2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


class Largest(TorchDispatchMode):
    """The largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("spec", ["cable", "kerple:form=power", "t5:form=clipped,clip=9999", "fire:width=2"])
def test_nothing_is_quadratic(spec, monkeypatch):
    monkeypatch.undo()  # the real blocks
    found = []
    for T in (4096, 8192) if GPU else (192, 384):
        with Largest() as largest:
            attend(spec, HALF, "fused", T=T, heads=1, key_heads=1, head_dim=16, B=1)
        found.append(largest.numel)
    assert found[1] < 3 * found[0] and (not GPU or found[0] < 4096 * 4096 / 2)


@pytest.mark.parametrize("spec", ["rope", "cable", "kerple", "t5", "fire:width=4", "inkling:rank=2"])
def test_compiles_whole(spec):
    encoding = build(spec, heads=2, head_dim=16).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    hidden = torch.randn(1, 20, 32, device=DEVICE)

    def call(q, k, v):
        return relpos.attention(q, k, v, encoding, hidden=hidden, impl="fused")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for f, g in zip(
        torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v)),
        torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(f, g)


@pytest.mark.parametrize("spec", ["fire:width=4,length=10", "kerple"])
def test_compiled_for_any_length(spec):
    encoding = build(spec, heads=2, head_dim=64).to(DEVICE)
    torch._dynamo.reset()

    def call(q, k, v):
        return relpos.attention(q, k, v, encoding, impl="fused")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (20, 33):
        q, k, v = (torch.randn(2, 2, T, 64, device=DEVICE, dtype=HALF, requires_grad=True) for _ in range(3))
        found = [torch.autograd.grad(f(q, k, v).float().square().sum(), (q, k, v)) for f in (compiled, call)]
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_the_operator_is_well_formed():
    q, k, v = (torch.randn(1, 2, 9, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, device=DEVICE, requires_grad=True)
    arguments = (q, k, v, slopes, *[None] * 6, fused.SLOPE, 0, True, 0, 0, 0.25, False)
    packed = torch.randn(1, 9, 4 * 16, device=DEVICE, requires_grad=True)  # two heads of q, one of k, one of v
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fused._attend, (*arguments, 0, 0, None), test_utils=checks)
    bias = torch.randn(4 * 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(fused._attend, (packed, None, None, *arguments[3:], 2, 16, bias), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_the_gradient_of_a_bias(dtype):
    """Which is in q, k and v: of q the sum of its gradient, of k zero, of v the sum of the output's gradient."""
    packed = torch.randn(2, 20, 4 * 16, device=DEVICE).to(dtype).requires_grad_()  # two heads of q, one of k, one of v
    bias = torch.randn(4 * 16, device=DEVICE, requires_grad=True)
    how = (*[None] * 9, fused.NONE, 0, True, 0, 0, 0.25, False, 2, 16, bias)
    out, *_ = fused._attend(packed, *how)
    do = torch.randn_like(out)
    of_packed, of_bias = torch.autograd.grad(out, (packed, bias), do)
    of_v = do.double().sum((0, 2)).sum(0)
    truth = torch.cat([of_packed[..., :32].double().sum((0, 1)), torch.zeros_like(of_v), of_v])
    torch.testing.assert_close(of_bias.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [20, 64, 128])
def test_banks_of_many_profiles(rank):
    """Whose tiles need the most shared memory."""
    compare(f"inkling:rank={rank},length=40", HALF)


def test_a_bank_beside_small_products():
    """In float16 the bias may not be divided by a small scale on its way."""
    ours = attend("inkling:rank=16", torch.float16, "fused", scale=1e-5)
    exact = attend("inkling:rank=16", torch.float16, "exact", scale=1e-5)
    for name, truth in exact.items():
        assert (ours[name].double() - truth).norm() <= 1e-2 * truth.norm() + 1e-7, name


@pytest.mark.parametrize("spec", ["cable", "kerple", "t5", "fire:width=4", "inkling:rank=2,length=8", "inkling"])
def test_gradients_are_laid_out_as_promised(spec, monkeypatch):
    """A compiled model plans with the strides that the fake operator gives."""
    seen = []
    backward = fused._backward
    monkeypatch.setattr(fused, "_backward", lambda *given: [seen.append(given), backward(*given)][1])
    encoding = build(spec, heads=2, head_dim=16).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    hidden = torch.randn(1, 20, 32, device=DEVICE)
    relpos.attention(q, k, v, encoding, hidden=hidden, impl="fused").sum().backward()
    *given, wants = seen[0]
    assert wants
    for summed in (False, True):
        arguments = (*(x.detach() if isinstance(x, torch.Tensor) else x for x in given), 0, 0, wants, summed)
        torch.library.opcheck(fused._attend_backward, arguments, test_utils=("test_schema", "test_faketensor"))


def passes(model: torch.nn.Module, run, backend=None, **inputs) -> dict[str, torch.Tensor]:
    """Gradients of every parameter."""
    torch._dynamo.reset()
    run = run if backend is None else torch.compile(run, fullgraph=True, backend=backend)
    model.zero_grad()
    run(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Counted:
    """A compiler that counts the products of the forward pass."""

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, graph, inputs):
        return aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)(graph, inputs)

    def forward(self, graph, inputs):
        products = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
        self.products += sum(node.target in products for node in graph.graph.nodes)
        return self.backward(graph, inputs)

    def backward(self, graph, inputs):
        return make_boxed_func(graph)


@pytest.mark.parametrize(
    "spec, settings, padded",
    [
        ("cable", {}, False),
        ("cable", {}, True),  # whose tokens are brought to the front: no longer one tensor
        ("kerple", {"bias": False}, False),
        ("rope", {}, False),
        ("fire:length=7", {}, False),
        ("inkling", {"bias": False}, False),
        ("inkling", {}, True),
        *[(case.spec, {}, False) for case in FUSABLE if build(case.spec).rows is not None],
    ],
)
def test_a_compiled_model(spec, settings, padded):
    """q, k and v come from one projection: the compiled step takes and gives back that one tensor, with the rows of a
    bank in it, and has the gradient of the projection's bias from attention."""
    config = RelPosConfig.preset(
        "nano", spec, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, impl="fused",
        **settings,
    )  # fmt: skip
    model = RelPosForCausalLM(config).to(DEVICE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(0, 250, (2, 37), device=DEVICE)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :5] = 0
    backend = Counted()
    eager, compiled = passes(model, model, **inputs), passes(model, model, backend, **inputs)
    assert eager.keys() == compiled.keys()
    for name, grad in eager.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6)
        assert grad.abs().max() > 0, name
    of_keys = slice(64, 96)
    packed = not padded and spec != "rope"
    if "bias" not in settings:
        assert (not compiled["model.layers.0.attention.qkv.bias"][of_keys].any()) == packed
    rows = build(spec, heads=4, head_dim=16).rows
    beside = packed and rows is not None and fused.packs_rows(rows.out_features // 4)  # of others zeros are wanted
    apart = spec == "cable" or (rows is not None and not beside)  # a product of the encoding's own
    assert backend.products == 4 + 3 + apart  # those of the layer; the logits and their gradients


def test_a_compiled_encoder():
    """The same both ways, with a word that no other sees in its column."""
    config = RelPosConfig.preset(
        "nano", "alibi", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, impl="fused", vocab_size=250
    )
    model = RelPosForMaskedLM(config).to(DEVICE).train()
    ids = torch.randint(0, 250, (3, 21), device=DEVICE)
    inputs = {"input_ids": ids, "labels": ids}
    eager, compiled = passes(model, model, **inputs), passes(model, model, "aot_eager", **inputs)
    for name, grad in eager.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6)
    assert not compiled["model.layers.0.attention.qkv.bias"][64:128].any()


def test_checkpointing_and_autocast():
    encoding = build("cable", heads=2, head_dim=16).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    hidden = torch.randn(1, 20, 32, device=DEVICE)

    def call(q, k, v):
        return relpos.attention(q, k, v, encoding, hidden=hidden, impl="fused")

    plain = torch.autograd.grad(call(q, k, v).sum(), (q, k, v, encoding.step.weight))
    again = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    for f, g in zip(torch.autograd.grad(again.sum(), (q, k, v, encoding.step.weight)), plain, strict=True):
        assert torch.equal(f, g)
    with torch.autocast(DEVICE, HALF):
        assert call(q, k, v).dtype == HALF


@pytest.mark.parametrize(
    ("cuda", "hip", "warp", "capability", "said"),
    [
        ("13.0", None, 32, (7, 5), "8.0"), ("13.0", None, 32, (9, 0), None),
        (None, "7.0", 32, (11, 0), "RDNA"), (None, "7.0", 64, (9, 4), None),
    ],
)  # fmt: skip
def test_gpus_that_cannot_run_them(cuda, hip, warp, capability, said, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(fused, "_properties", lambda device: types.SimpleNamespace(warp_size=warp))
    monkeypatch.setattr(fused, "_capability", lambda device: capability)
    torch._dynamo.reset()
    found = fused._unfit()
    assert found is None if said is None else said in found
    traced = torch.compile(lambda x: x + len(fused._unfit() or ""), backend="eager", fullgraph=True)
    assert traced(torch.zeros(())) == len(found or "")


def _losses(how: str, spec: str) -> list[float]:
    """Of two steps: in one process, or with the batch divided over those there are."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, world = (0, 1) if how == "alone" else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
    model = RelPosForCausalLM(RelPosConfig.preset("nano", spec, impl="fused", **sizes)).to(DEVICE).train()
    if how == "replicated":
        model = DistributedDataParallel(model)
    if how == "sharded":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        ids = torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        mine = ids.view(world, -1, 17)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def _divided(folder: Path, specs: list[str]) -> None:
    import torch.distributed as dist

    fused.PROGRAMS = 64
    dist.init_process_group("nccl" if GPU else "gloo")
    found = {f"{how} {spec}": _losses(how, spec) for how in ("replicated", "sharded") for spec in specs}
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_in_several_processes(tmp_path):
    """Under DistributedDataParallel and fully_shard, which divides the parameters of encodings too."""
    specs = ["fire:width=4,length=9", "kerple"]
    together(_divided, tmp_path, specs, folder=tmp_path, processes=1 if GPU else 2, gpu=GPU)
    found = json.loads((tmp_path / "losses.json").read_text())
    alone = {spec: _losses("alone", spec) for spec in specs}
    assert found == {name: pytest.approx(alone[name.partition(" ")[2]], rel=1e-5) for name in found}
    assert len(found) == 2 * len(specs) and all(losses[0] != losses[1] for losses in alone.values())


def test_it_says_why_it_cannot():
    q = torch.randn(1, 2, 6, 16, device=DEVICE)

    def refuses(match: str, spec: str = "alibi", x=q, **options) -> None:
        with pytest.raises(UserError, match=match):
            encoding = build(spec, heads=x.shape[1], head_dim=x.shape[-1]).to(x.device)
            relpos.attention(x, x, x, encoding, impl="fused", **options)

    refuses("float64", x=q.double())
    refuses("at most 128", x=torch.randn(1, 2, 6, 160, device=DEVICE))
    refuses("rescores", "dape:base=alibi")
    refuses("gaps", positions=torch.arange(6, device=DEVICE)[None] * 2)
    refuses("weights", return_weights=True)
    refuses("soft-cap", softcap=30.0)
    refuses("sinks", sinks=torch.zeros(2, device=DEVICE))
    refuses("dropout", dropout=0.1)
    rate, slope = torch.ones(2), torch.ones(2, 2)
    term = relpos.terms.Profile(rate, torch.ones(1, 6), torch.ones(1), slope, slope, power=True)
    layout = relpos.terms.Layout(Tq=6, Tk=6, device=q.device)
    assert "logarithm" in (fused.unsupported([term], layout) or "")


@pytest.mark.parametrize("spec", ["fire:width=4,length=300", "kerple", "cable", "t5"])
def test_an_encoding_in_float64_beside_narrower_queries(spec):
    encoding = build(spec, heads=2, head_dim=8).to(DEVICE).double()
    q, k, v, hidden = (torch.randn(1, 2, 20, 8, device=DEVICE) for _ in range(4))
    hidden = hidden.transpose(1, 2).flatten(2).double()
    ours, plain = (
        relpos.attention(q, k, v, encoding, hidden=hidden, impl=impl).float() for impl in ("fused", "reference")
    )
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "origin"), [(1, 0), (9, 3), (60, 20)])
def test_tables_of_any_size(size, origin, causal):
    """Of one entry, and with more of the past than of the future."""
    layout = relpos.terms.Layout(Tq=37, Tk=37, device=torch.device(DEVICE), causal=causal)
    q, k, v, cotangent = (torch.randn(1, 2, 37, 8, device=DEVICE) for _ in range(4))
    values = torch.randn(2, size, device=DEVICE, requires_grad=True)
    grads = []
    for impl in ("fused", "reference"):
        out = attend_terms(q, k, v, [relpos.terms.Distance(values, origin, None)], layout, impl=impl)
        grads.append(torch.autograd.grad(out, values, cotangent)[0])
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_a_new_encoding_meets_the_kernels(tmp_path):
    (tmp_path / "root.py").write_text(
        "import torch\n"
        "from relpos.encodings import DistanceEncoding\n"
        "class Root(DistanceEncoding):\n"
        "    def __init__(self, *, heads: int, head_dim: int, hidden_size: int, share: bool = False):\n"
        "        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)\n"
        "        self.scale = torch.nn.Parameter(torch.empty(heads))\n"
        "    def reset_parameters(self):\n"
        "        torch.nn.init.ones_(self.scale)\n"
        "    def by_distance(self, d):\n"
        "        return -self.scale.view(-1, *[1] * d.dim()) * d.abs().sqrt()\n"
    )
    try:
        compare(str(tmp_path / "root.py"), HALF)
    finally:
        encodings._registered.pop("root", None)
