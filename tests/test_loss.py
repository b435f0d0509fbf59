"""The loss without the logits against the plain one: value, gradients, dtypes, counts, compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from relpos import RelPosConfig, RelPosForCausalLM, RelPosForMaskedLM, UserError
from relpos.attention.fused import interpreted
from relpos.models import loss as module
from relpos.models import softmax
from relpos.models.loss import IGNORE, chunked_loss, linear_cross_entropy, plain_loss, shifted, token_losses

N, D, V = 37, 16, 53


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELLS", 8 * V)  # rows of 8, and 37 is no multiple of it


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(1, N, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    add = torch.randn(V).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, (1, N))
    targets[0, [0, 5, 36]] = IGNORE
    return hidden, weight, add, targets


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("items", [None, 100, torch.tensor(50)])
def test_value_and_gradients_are_those_of_the_plain_loss(bias: bool, items: Tensor | int | None) -> None:
    hidden, weight, add, targets = inputs(bias=bias)
    leaves = [x for x in (hidden, weight, add) if x is not None]
    plain = plain_loss(F.linear(hidden, weight, add), targets, items)
    chunked = chunked_loss(hidden, weight, add, targets, items)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(chunked, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    by_hand = -F.linear(hidden, weight, add).log_softmax(-1)[0, range(N), targets[0].clamp(min=0)][targets[0] != IGNORE]
    expected = by_hand.mean() if items is None else by_hand.sum() / items
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12)


def test_gradients_numerically() -> None:
    hidden, weight, add, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, b, targets[:, :9]), (hidden[:, :9], weight, add)
    )


def test_in_bfloat16_it_is_no_worse_than_the_plain_loss() -> None:
    """Both against float64; the sums over chunks are kept in float32."""
    exact = inputs(torch.float64)
    rounded = [x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x for x in exact]
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in rounded]
    of = lambda f, xs: torch.autograd.grad(f(xs), xs[:3])  # noqa: E731
    truth = of(lambda x: plain_loss(F.linear(*x[:3]), x[3], None), exact)
    plain = of(lambda x: plain_loss(F.linear(*x[:3]), x[3], None), rounded)
    ours = of(lambda x: chunked_loss(*x, None), rounded)
    for t, p, o in zip(truth, plain, ours, strict=True):
        assert o.dtype == torch.bfloat16
        assert (o.double() - t).abs().max() <= 2 * (p.double() - t).abs().max()


def test_under_autocast_the_matmuls_are_bfloat16_and_the_loss_float32() -> None:
    hidden, weight, add, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_loss(hidden, weight, add, targets, None)
        plain = plain_loss(F.linear(hidden, weight, add), targets, None)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, add)) for x in (ours, plain)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.skipif(not (torch.cuda.is_available() or interpreted()), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_gives_losses_and_gradients_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width, scale in ((53, 1.0), (softmax.BLOCK + 904, 8.0), (1, 1.0)):
        logits = (scale * torch.randn(5, width)).to("cuda" if torch.cuda.is_available() else "cpu", dtype)
        targets = torch.randint(0, width, (5,), device=logits.device)
        targets[3] = IGNORE
        if width > 1:  # words that cannot come: the first of a row, and all but one of another
            logits[0, : width // 2] = logits[1] = float("-inf")
            logits[1, width - 2] = 3.0
            targets[:2] = width - 2
        wide = logits.double()
        truth = F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="none")
        slope = (wide.softmax(-1) - F.one_hot(targets.clamp(min=0), width)) * (targets != IGNORE)[:, None]
        losses, d = softmax.rows(logits, targets, IGNORE, grad=True)
        assert losses.dtype == torch.float32 and d.dtype == dtype
        torch.testing.assert_close(losses.double(), truth, rtol=1e-6, atol=1e-6)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(d.double(), slope, rtol=max(rounding, 1e-5), atol=max(rounding / 1000, 1e-7))
        only, nothing = softmax.rows(logits, targets, IGNORE, grad=False)
        assert torch.equal(only, losses) and not nothing.numel()
    for unknown in (1, -1):  # of a vocabulary of one
        losses, d = softmax.rows(logits, torch.full_like(targets, unknown), IGNORE, grad=True)
        assert losses.isnan().all() and d.isnan().all()


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_that_is_no_word(label: int) -> None:
    hidden, weight, add, targets = inputs()  # float64, which the kernel does not take
    targets[0, 1] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_loss(hidden, weight, add, targets, None)


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, add, targets = inputs(torch.float32)
    rows, linear = [], F.linear
    monkeypatch.setattr(module.F, "linear", lambda h, *rest: rows.append(h.shape[0]) or linear(h, *rest))
    chunked_loss(hidden, weight, add, targets, None).backward()
    assert rows == [8, 8, 8, 8, 5]


def test_losses_of_single_tokens() -> None:
    hidden, weight, add, targets = inputs()
    expected = F.cross_entropy(F.linear(hidden, weight, add)[0], targets[0], ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, add, targets), expected[None].detach())


def test_it_compiles_without_a_break() -> None:
    hidden, weight, add, targets = inputs(torch.float32)
    compiled = torch.compile(chunked_loss, fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(f(hidden, weight, add, targets, None), (hidden, weight, add))
        for f in (chunked_loss, compiled)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_no_second_derivative() -> None:
    hidden, weight, add, targets = inputs()
    with pytest.raises(UserError, match="the loss without logits has no second derivative"):
        torch.autograd.grad(chunked_loss(hidden, weight, add, targets, None), hidden, create_graph=True)


def test_nothing_counts() -> None:
    hidden, weight, add, targets = inputs()
    nothing = torch.full_like(targets, IGNORE)
    total = chunked_loss(hidden, weight, add, nothing, None)
    total.backward()
    assert total == 0 and hidden.grad.abs().max() == 0


def test_the_shift_stops_at_the_end_of_a_document() -> None:
    labels = torch.tensor([[10, 11, 12, 13, 14]])
    assert shifted(labels).tolist() == [[11, 12, 13, 14, IGNORE]]
    documents = torch.tensor([[1, 1, 2, 3, 3]])
    assert shifted(labels, documents).tolist() == [[11, IGNORE, IGNORE, 14, IGNORE]]


# In the models.


def tiny(kind: type) -> RelPosForCausalLM | RelPosForMaskedLM:
    torch.manual_seed(0)
    return kind(RelPosConfig(vocab_size=V, hidden_size=16, layers=1, heads=2, encoding="alibi"))


@pytest.mark.parametrize("kind", [RelPosForCausalLM, RelPosForMaskedLM])
def test_logits_are_skipped_in_training_only(kind: type) -> None:
    model, ids = tiny(kind), torch.randint(0, V, (2, 11))
    model.train()
    out = model(ids, labels=ids)
    assert out.logits is None and model(ids).logits.shape == (2, 11, V)
    shown = model(ids, labels=ids, skip_logits=False)
    assert shown.logits.shape == (2, 11, V)
    torch.testing.assert_close(out.loss, shown.loss)
    model.config.skip_logits = False
    assert model(ids, labels=ids).logits is not None
    model.config.skip_logits = None
    model.eval()
    assert model(ids, labels=ids).logits is not None
    assert model(ids, labels=ids, skip_logits=True).logits is None
    items = torch.tensor(40)
    for skip in (True, False):
        halved = model(ids, labels=ids, num_items_in_batch=items, skip_logits=skip).loss
        count = 20 if kind is RelPosForCausalLM else 22
        torch.testing.assert_close(halved, shown.loss * count / 40)


def test_the_causal_loss_is_that_of_transformers() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, ids = tiny(RelPosForCausalLM).eval(), torch.randint(0, V, (2, 11))
    labels = ids.clone()
    labels[0, :4] = IGNORE
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.loss, ForCausalLMLoss(out.logits, labels, V))
    torch.testing.assert_close(model(ids, labels=labels, skip_logits=True).loss, out.loss)
    last = model(ids, labels=labels, logits_to_keep=3)
    torch.testing.assert_close(last.loss, out.loss)
    torch.testing.assert_close(last.logits, out.logits[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, out.logits[:, -3:])
    each = model.token_losses(ids)
    assert each.shape == (2, 10)
    torch.testing.assert_close(each.mean(), model(ids, labels=ids).loss)
