"""Time the kernel that turns rows of logits into losses and gradients, against its floor and torch.compile's form.

    python benchmarks/loss.py --rows 16384 --vocabulary 50304

The floor reads the logits once and writes their gradient once, at the speed of a copy. The settings are how many logits
a program of the kernel holds and how many of them a thread: they decide how many rows are under way at once, and
whether these fit the GPU's cache. The winner goes into relpos/models/softmax.py by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from relpos.models import softmax  # noqa: E402
from relpos.models.loss import IGNORE  # noqa: E402

from attention import ceilings, median_ms  # noqa: E402  isort: skip - the benchmark beside this one

SETTINGS = [(4096, 32), (8192, 32), (8192, 16), (16384, 64), (16384, 32), (16384, 16), (32768, 64), (32768, 32)]


def plain(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch."""
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    words = torch.arange(logits.shape[1], device=logits.device)
    d = (wide - lse).exp() - (words == targets[:, None]).float()
    return (lse - wide.gather(-1, targets[:, None]))[:, 0], d.to(logits.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=50304)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    torch.manual_seed(0)
    logits = 3 * torch.randn(args.rows, args.vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, args.vocabulary, (args.rows,), device="cuda")
    floor = 2 * logits.numel() * logits.element_size() / ceilings()["copy_tb_s"] / 1e9
    print(f"{torch.cuda.get_device_name()}, {args.rows:,} rows of {args.vocabulary:,}, bfloat16; floor {floor:.3f} ms")

    def show(name: str, ms: float) -> None:
        print(f"{name:<44} {ms:.3f} ms, {ms / floor:.2f} x the floor", flush=True)

    compiled = torch.compile(plain)
    show("torch.compile", median_ms(lambda: compiled(logits, targets)))
    truth = plain(logits[:64], targets[:64])
    shipped = softmax.BLOCK, softmax.THREAD
    for block, thread in [shipped, *(one for one in SETTINGS if one != shipped)]:
        softmax.BLOCK, softmax.THREAD = block, thread
        losses, d = softmax.rows(logits, targets, IGNORE, grad=True)
        torch.testing.assert_close(losses[:64], truth[0])
        torch.testing.assert_close(d[:64], truth[1])
        ms = median_ms(lambda: softmax.rows(logits, targets, IGNORE, grad=True))
        show(f"{block:,} logits a program, {thread} a thread" + ", as shipped" * (shipped == (block, thread)), ms)


if __name__ == "__main__":
    main()
