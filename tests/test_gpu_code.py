"""Every kernel compiles for a Hopper GPU at the sizes it is tuned for. Triton's compiler needs no GPU, and refuses what
its interpreter, in which the other tests of kernels run where there is none, lets pass."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from torch import nn

from relpos.attention import decode, fused, prepare, rotary
from relpos.encodings import build
from relpos.models import gelu, norm, softmax
from relpos.terms import Layout

if not fused.installed() or fused.interpreted():
    pytest.skip("needs Triton, and its compiler instead of its interpreter", allow_module_level=True)

SHARED = 227 << 10  # bytes that a program may have on an H200
LENGTH = 4096


@pytest.fixture
def compiled(monkeypatch):
    """What is launched is compiled instead, for compute capability 9.0: name and compiled kernel, in order."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    target = GPUTarget("cuda", 90, 32)
    hopper = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0
    )
    found: list = []
    run = jit.JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, kernel))
        return kernel

    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # limits of registers are asked for
    monkeypatch.setattr(driver, "_active", hopper)
    return found


def check(found: list, names: list[str], folder: Path) -> None:
    assert [name for name, _ in found] == names
    for name, kernel in {id(kernel): (name, kernel) for name, kernel in found}.values():
        assert kernel.asm["cubin"] and kernel.metadata.target.arch == 90
        assert kernel.metadata.shared <= SHARED, (name, kernel.metadata.shared)
        if sass.nvdisasm().is_file():
            assert not sass.lost(kernel.asm["cubin"], folder), name
            assert not sass.strayed(kernel.asm["cubin"], folder), name


def terms_of(spec: str, head_dim: int, Tq: int, Tk: int = LENGTH, B: int = 1, heads: int = 2):
    encoding = build(spec, heads=heads, head_dim=head_dim)
    hidden = torch.randn(B, Tk, heads * head_dim) if encoding.content else None
    layout = Layout(Tq=Tq, Tk=Tk, device=torch.device("cpu"))
    return prepare(encoding, layout, hidden)[1], layout


SPECS = ["none", "alibi:learn=true", "t5", "kerple", "fire", "cable", "cable:form=kernel", "inkling"]


@pytest.mark.parametrize(("spec", "head_dim"), [*((spec, 64) for spec in SPECS), ("inkling", 128)])
def test_attention(spec, head_dim, compiled, tmp_path):
    terms, layout = terms_of(spec, head_dim, LENGTH)
    q, k, v = (torch.zeros(1, 2, LENGTH, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = fused.attend(q, k, v, terms, layout, 0.125)
    out.backward(torch.zeros_like(out))
    names = ["forward", "backward_q", "backward_k"]
    if spec == "t5":
        names = [*names, "backward_distance"]
    if spec == "inkling":
        names = [*names[:2], "bank_gradient", *names[2:]]
    if spec == "fire":
        near = ["profile_table", "profile_band"]
        sums = ["backward_distance", "backward_band", "profile_parts", "profile_gradient"]
        names = [*near, "forward", "backward_q", "backward_k", *sums]
    check(compiled, names, tmp_path)


@pytest.mark.parametrize("spec", ["t5", "fire"])
def test_a_single_token(spec, compiled, tmp_path):
    """With tiles that come by TMA, ptxas broke down."""
    terms, layout = terms_of(spec, 64, 1, 1)
    q, k, v = (torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = fused.attend(q, k, v, terms, layout, 0.125)
    out.backward(torch.zeros_like(out))
    check([x for x in compiled if x[0] in ("backward_q", "backward_k")], ["backward_q", "backward_k"], tmp_path)


@pytest.mark.parametrize("rank", [20, 128])
def test_banks_of_many_profiles(rank, compiled, tmp_path):
    """With 20 profiles and 64 queries a tile, ptxas took predicates for an address."""
    terms, layout = terms_of(f"inkling:rank={rank},length=40", 8, 333, 333, 2, heads=4)
    q, k, v = (torch.zeros(2, heads, 333, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    fused.attend(q, k, v, terms, layout, 0.125).sum().backward()
    check(compiled, ["forward", "backward_q", "bank_gradient", "backward_k"], tmp_path)


@pytest.mark.parametrize(("spec", "D"), [("rank=3,length=50", 8), ("rank=5,length=130", 24), ("rank=128", 80)])
def test_banks_with_small_tiles(spec, D, compiled, tmp_path):
    """With tiles of 64 ptxas put strides and predicates where operands should lie."""
    terms, layout = terms_of(f"inkling:{spec}", D, 333, 333)
    q, k, v = (torch.zeros(1, heads, 333, D, dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1, 1))
    fused.attend(q, k, v, terms, layout, 0.125).sum().backward()
    check(compiled, ["forward", "backward_q", "bank_gradient", "backward_k"], tmp_path)


def test_products_that_stray_are_found(compiled, monkeypatch, tmp_path):
    """In what ptxas 12.8 made of such tiles. If a later one does better, the rule in `_Call.blocks` may go."""
    monkeypatch.setattr(fused._Call, "blocks", lambda *_: (64, 64, 4, 1, 0))
    terms, layout = terms_of("inkling:rank=3,length=50", 8, 150, 150)
    q, k, v = (torch.zeros(1, heads, 150, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1, 1))
    fused.attend(q, k, v, terms, layout, 0.125).sum().backward()
    if not sass.nvdisasm().is_file():
        pytest.skip("there is no nvdisasm here")
    found = {name: sass.strayed(kernel.asm["cubin"], tmp_path) for name, kernel in compiled}
    assert len(found["backward_k"]) == 3 and not found["forward"]


@pytest.mark.parametrize("spec", SPECS)
def test_decoding(spec, compiled, tmp_path):
    """Several stretches, and with a mask and a window; one stretch, and positions of one's own."""
    q = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 2, LENGTH, 64, dtype=torch.bfloat16)
    masked = {"window": 900, "key_padding_mask": torch.ones(1, LENGTH, dtype=torch.bool)}
    names = 2 * ["partial", "combine"]
    with torch.no_grad():
        terms, layout = terms_of(spec, 64, 1)
        fused.attend(q, k, k, terms, layout, 0.125)
        fused.attend(q, k, k, terms, replace(layout, **masked), 0.125)
        if spec in ("none", "fire"):  # one row, and a row for each query head
            many = decode.PROGRAMS
            fused.attend(q.expand(many, -1, -1, -1), *2 * [k[:, :1].expand(many, -1, -1, -1)], terms, layout, 0.125)
            fused.attend(q, k, k, terms, replace(layout, positions=torch.arange(LENGTH)[None]), 0.125)
            names += ["partial", "partial", "combine"]
    check(compiled, names, tmp_path)


@pytest.mark.parametrize("spec", ["t5", "cable", "fox"])
def test_generating_compiles_once(spec, compiled):
    """Lengths, strides and places in a cache change with every token."""
    with torch.no_grad():
        for T in range(200, 209):
            terms, layout = terms_of(spec, 64, 1, T, 2)
            q, k = torch.zeros(2, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(2, 2, T, 64, dtype=torch.bfloat16)
            fused.attend(q, k, k, terms, replace(layout, window=150), 0.125)
    assert len(compiled) == 18 and len({id(kernel) for _, kernel in compiled}) == 2


def test_the_rest_of_a_model(compiled, tmp_path):
    x = torch.zeros(256, 768, dtype=torch.bfloat16)
    layer = nn.LayerNorm(768)
    total, out, mean, rstd = norm._add_norm(x.float(), x, layer.weight, layer.bias, 1e-5, torch.bfloat16, None)
    norm._backward(total, out, total, mean, rstd, layer.weight, torch.bfloat16)
    bias = torch.zeros(768, dtype=torch.bfloat16)
    gelu._bias_gelu(x, bias)
    gelu._backward(x, x, bias)
    softmax._rows(torch.zeros(4, 50304, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), -100, True)
    rotary._turn(torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), *torch.zeros(2, 1, 64, 32), False, False)
    check(compiled, ["norm_forward", "norm_backward", "gelu_forward", "gelu_backward", "row", "turn"], tmp_path)
