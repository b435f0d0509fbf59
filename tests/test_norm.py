"""The residual sum with its norm, and GPT-2's GELU: the forms for a compiled step against the plain ones. The kernels
run on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy

import bfloat16
import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from relpos import RelPosConfig, RelPosForCausalLM
from relpos.attention.fused import installed, interpreted
from relpos.models import gelu
from relpos.models import norm as module
from relpos.models.gelu import TanhGELU
from relpos.models.norm import Owing, add_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if interpreted():
    bfloat16.mend()
kernel = pytest.mark.skipif(
    not (torch.cuda.is_available() and installed() or interpreted()),
    reason="the kernel needs a GPU, or TRITON_INTERPRET=1 in a process of its own",
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted():  # which runs them one after the other
        monkeypatch.setattr(module, "PROGRAMS", 16)


def problem(size: int, bias: bool = True, rows: int = 37) -> tuple[nn.LayerNorm, Tensor, Tensor, Tensor, Tensor]:
    """A norm, the stream, what is added to it, and a gradient for each of the results; float64."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(size, bias=bias, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.copy_(torch.randn(size) + 0.5)
    hidden, x, d_total, d_out = torch.randn(4, 2, rows, size, dtype=torch.float64, device=DEVICE).unbind()
    return norm, 3 * hidden + 1, x, d_total, d_out


def run(how, norm: nn.LayerNorm, hidden: Tensor, x: Tensor, d_total: Tensor, d_out: Tensor) -> list[Tensor]:
    """Both results and every gradient, that of a bias in x among them."""
    hidden, x = hidden.detach().requires_grad_(), x.detach().requires_grad_()
    bias = torch.zeros(x.shape[-1], dtype=norm.weight.dtype, device=x.device, requires_grad=True)
    leaves = [hidden, x, bias, *norm.parameters()]
    total, out = how(hidden, Owing(x, bias), norm)
    grads = torch.autograd.grad([total, out], leaves, [d_total.to(total.dtype), d_out.to(out.dtype)])
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
    return [total, out, *grads]


@kernel
@pytest.mark.parametrize("size, bias", [(48, True), (64, False), (129, True), (768, True), (2100, True)])
@pytest.mark.parametrize(
    "stream, added",
    [
        ("float32", "float32"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
@pytest.mark.parametrize("programs", [80, 5])  # and 74 rows
def test_value_and_gradients(
    monkeypatch: pytest.MonkeyPatch, size: int, bias: bool, stream: str, added: str, programs: int
) -> None:
    """Within twice the error of the plain form, both against float64."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    norm, hidden, x, *grads = problem(size, bias)
    wide, narrow = getattr(torch, stream), getattr(torch, added)
    norm.to(torch.promote_types(wide, narrow))
    given = [hidden.to(wide), x.to(narrow), *(g.to(wide) for g in grads)]
    exact = run(add_norm, copy.deepcopy(norm).double(), *(t.double() for t in given))
    plain, ours = run(add_norm, norm, *given), run(module.fused, norm, *given)
    for a, b, e in zip(ours, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = 2 * (b.double() - e).norm() + 1e-6 * e.norm()
        assert (a.double() - e).norm() <= bound


@kernel
def test_under_autocast_the_norm_is_rounded_once() -> None:
    norm, hidden, x, d_total, d_out = problem(48)
    norm.float()
    given = [hidden.float(), x.bfloat16(), d_total.float(), d_out.bfloat16()]
    with torch.autocast(DEVICE, torch.bfloat16):
        total, out, *grads = run(module.fused, norm, *given)
        plain_total, plain_out, *plain = run(add_norm, norm, *given)
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    plain[2] = plain[0].sum((0, 1))  # of the bias: plain code has it rounded, and from rounded rows
    torch.testing.assert_close(total, plain_total, rtol=0, atol=0)
    torch.testing.assert_close(out, plain_out.bfloat16(), rtol=0.01, atol=1e-3)  # by the last bit of a rounding
    for a, b in zip(grads, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@kernel
def test_any_layout_and_no_rows() -> None:
    norm, hidden, x, d_total, d_out = problem(48, rows=6)
    norm.float()
    given = [hidden.float(), x.float(), d_total.float(), d_out.float()]
    turned = [g.transpose(0, 1).contiguous().transpose(0, 1) for g in given]
    for a, b in zip(run(module.fused, norm, *turned), run(module.fused, norm, *given), strict=True):
        assert torch.equal(a, b)
    _, _, d_hidden, d_x, d_more, d_weight, d_bias = run(module.fused, norm, *(g[:, :0] for g in given))
    assert d_hidden.numel() == d_x.numel() == 0 and not any(d.any() for d in (d_more, d_weight, d_bias))


SIZES = dict(vocab_size=61, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, skip_logits=False)


def compare(monkeypatch: pytest.MonkeyPatch, change=None, **inputs) -> tuple[int, int]:
    """Loss and gradients of a model, changed as wanted, eager and compiled; how often the compiled one launched each of
    the kernels that a backward pass has."""
    torch._dynamo.reset()  # which takes it that all models of one shape have the hooks of the first
    torch.manual_seed(0)
    model = RelPosForCausalLM(RelPosConfig(encoding="alibi", impl="reference", **SIZES)).to(DEVICE).train()
    if change is not None:
        change(model)
    tokens = torch.randint(0, 61, (2, 19), device=DEVICE)
    used: list[str] = []
    for kind in (module, gelu):

        def launch(number: int, *how, _real=kind._launch, _name=kind.__name__, **flags) -> None:
            used.extend([_name] * number)
            _real(number, *how, **flags)

        monkeypatch.setattr(kind, "_launch", launch)
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        out = call(input_ids=tokens, labels=tokens, **inputs)
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([out.loss, *grads, *(out.hidden_states or ())])
        if len(found) == 1:
            assert not used
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    return used.count(module.__name__), used.count(gelu.__name__)


@kernel
def test_a_compiled_model_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All norms but the first, which adds nothing, and the last, behind the blocks."""
    assert compare(monkeypatch) == (5, 3)


def checkpoint(model: RelPosForCausalLM) -> None:
    model.gradient_checkpointing_enable()


def hooked(name: str):
    def change(model: RelPosForCausalLM) -> None:
        model.get_submodule(f"model.layers.1{name}").register_forward_hook(
            lambda m, given, out: (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2
        )

    return change


def patched(model: RelPosForCausalLM) -> None:
    inner = model.model.layers[1].mlp.inner
    inner.forward = lambda x: nn.functional.linear(x, inner.weight) * 3


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def adapted(model: RelPosForCausalLM) -> None:
    model.model.layers[1].mlp.inner.__class__ = Adapted


def bare(model: RelPosForCausalLM) -> None:
    model.model.layers[1].mlp_norm = nn.LayerNorm(48, elementwise_affine=False, device=DEVICE)


def foreign(model: RelPosForCausalLM) -> None:
    model.model.layers[1].mlp_norm = nn.Identity()


def frozen(model: RelPosForCausalLM) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


@kernel
@pytest.mark.parametrize(
    "change, norms, gelus",
    [
        (checkpoint, 3, 3),  # blocks hand over the whole stream: checkpointing keeps one tensor of each
        (hooked(""), 3, 3),
        (hooked(".mlp.inner"), 5, 2),
        (hooked(".mlp.act"), 5, 2),
        (hooked(".attention_norm"), 4, 3),
        (patched, 5, 2),
        (adapted, 5, 2),
        (bare, 4, 3),
        (foreign, 4, 3),
        (frozen, 3, 2),  # what no gradient passes through
    ],
)
def test_modules_that_do_more_than_their_class_says_are_called(
    monkeypatch: pytest.MonkeyPatch, change, norms: int, gelus: int
) -> None:
    assert compare(monkeypatch, change) == (norms, gelus)


@kernel
def test_inside_torch_func_the_modules_are_called() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = RelPosForCausalLM(RelPosConfig(encoding="alibi", impl="reference", **SIZES)).to(DEVICE).train()
    tokens = torch.randint(0, 61, (2, 19), device=DEVICE)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, kwargs={"input_ids": tokens, "labels": tokens}).loss

    eager = torch.func.grad(loss)(weights)
    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")(weights)
    for name, grad in eager.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6)


def dropping(model: RelPosForCausalLM) -> None:
    for block in model.model.layers:
        block.dropout.p = 1.0


def unbiased(model: RelPosForCausalLM) -> None:
    model.model.layers[1].mlp.out.bias = None


@kernel
@pytest.mark.parametrize("change", [dropping, unbiased, hooked(".mlp"), hooked(".attention"), hooked(".attention.out")])
def test_biases_whose_gradient_the_norm_has(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """And where it must not: what is dropped has none, and a hook is given the module's own output."""
    compare(monkeypatch, change)


@kernel
def test_hidden_states_of_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, output_hidden_states=True) == (3, 3)


def test_hidden_states_are_the_stream_between_the_blocks() -> None:
    """Each is what the block behind it is given, and what a hook on the block before it sees."""
    model = RelPosForCausalLM(RelPosConfig(encoding="alibi", **SIZES)).eval()
    given, left = [], []
    for block in model.model.layers:
        block.register_forward_hook(lambda m, args, out: (given.append(args[0]), left.append(out[0]), None)[-1])
    states = model(torch.randint(0, 61, (2, 19)), output_hidden_states=True).hidden_states
    assert len(states) == 4 and len(given) == 3
    for n in range(3):
        assert torch.equal(states[n], given[n])
    assert torch.equal(states[1], left[0]) and torch.equal(states[2], left[1])
    assert torch.equal(states[3], model.model.norm(left[2]))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_gelu_of_gpt2(name: str) -> None:
    """Eager and compiled, against transformers' own and its gradient."""
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64).requires_grad_()
    plain = ACT2FN[name](x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    for form in (TanhGELU(), torch.compile(TanhGELU(), backend="aot_eager", fullgraph=True)):
        y = form(x)
        torch.testing.assert_close(y, plain, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=1e-9, atol=1e-12)
        assert form(x.detach().bfloat16()).dtype == torch.bfloat16


@kernel
@pytest.mark.parametrize("size", [48, 64, 129])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gelu_with_a_bias(size: int, dtype: str) -> None:
    """Value and gradients within twice the error of the plain form, both against float64."""
    torch.manual_seed(0)
    given = [
        torch.randn(*shape, device=DEVICE).to(getattr(torch, dtype))
        for shape in ((3, 27, size), (3, 27, size), (size,))
    ]

    def run(how, x: Tensor, d: Tensor, bias: Tensor) -> list[Tensor]:
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        y = how(x, bias)
        return [y, *torch.autograd.grad(y, [x, bias], d)]

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return ACT2FN["gelu_new"](x + bias)

    exact = run(plain, *(t.double() for t in given))
    for a, b, e in zip(run(gelu.fused, *given), run(plain, *given), exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - e).norm() <= 2 * (b.double() - e).norm() + 1e-6 * e.norm()
    turned = [*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in given[:2]), given[2]]
    for a, b in zip(run(gelu.fused, *turned), run(gelu.fused, *given), strict=True):
        assert torch.equal(a, b)
    empty = run(gelu.fused, *(t[:, :0] for t in given[:2]), given[2])
    assert empty[1].numel() == 0 and not empty[2].any()
