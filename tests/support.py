"""Between the case table and relpos: build a case, make its inputs, and the oracle's answer for one text."""

from __future__ import annotations

import numpy as np
import torch
from cases import HEAD_DIM, Case, Setting
from torch import Tensor

from relpos import encodings
from relpos.encodings import Encoding


def make(case: Case, heads: int = 12, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Encoding:
    """The encoding with parameters moved away from their initial values, where many formulas are zero or equal."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        encoding = encodings.build(case.spec, heads=heads, head_dim=HEAD_DIM)
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return encoding.to(dtype)


class Inputs:
    """q [B,H,Tq,D], k and v [B,Hkv,Tk,D], hidden [B,Tk,hidden_size], all leaves that take a gradient."""

    def __init__(
        self,
        heads: int = 12,
        T: int = 7,
        *,
        B: int = 2,
        key_heads: int | None = None,
        seed: int = 1,
        dtype: torch.dtype = torch.float64,
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.q = normal(B, heads, T, HEAD_DIM)
        self.k, self.v = (normal(B, key_heads or heads, T, HEAD_DIM) for _ in range(2))
        self.hidden = normal(B, T, heads * HEAD_DIM)

    def leaves(self, encoding: Encoding) -> dict[str, Tensor]:
        """What a gradient may be asked for."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, **dict(encoding.named_parameters())}
        return {**tensors, "hidden": self.hidden} if encoding.content else tensors


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def setting(
    encoding: Encoding,
    inputs: Inputs,
    row: int = 0,
    *,
    causal: bool = True,
    tokens: slice | list[int] = slice(None),
    positions: list[int] | None = None,
) -> Setting:
    """One text of the batch, or some tokens of it, as the second formula sees it."""
    q, k = array(inputs.q[row])[:, tokens], array(inputs.k[row])[:, tokens]
    return Setting(
        positions=list(range(q.shape[1])) if positions is None else positions,
        heads=encoding.heads,
        causal=causal,
        parameters={name: array(p) for name, p in encoding.named_parameters()},
        hidden=array(inputs.hidden[row])[tokens],
        q=q,
        k=np.repeat(k, q.shape[0] // k.shape[0], 0),
    )


def oracle(case: Case, s: Setting, v: Tensor, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Output [H,T,D] and weights [H,T,T] of softmax attention over the second formula's scores, row by row."""
    scores = (case.scores or Setting.scores)(s)
    if case.bias is not None:
        scores = scores + case.bias(s)
    values = np.repeat(array(v), s.heads // v.shape[0], 0)
    weights = np.zeros_like(scores)
    for i in range(s.length):
        keys = [j for j in s.visible(i) if window is None or abs(s.distance(i, j)) < window]
        e = np.exp(scores[:, i, keys] - scores[:, i, keys].max(-1, keepdims=True))
        weights[:, i, keys] = e / e.sum(-1, keepdims=True)
    return weights @ values, weights


def close(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        actual.detach().double(), torch.as_tensor(expected).detach().double(), rtol=tolerance, atol=tolerance
    )
