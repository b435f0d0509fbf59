"""For the explorer's tests: a small model in a folder, and a browser where there is one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from relpos import RelPosConfig, RelPosForCausalLM
from relpos.data import tokenizer

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def browser_path() -> str | None:
    """A Chromium or Chrome of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for found in map(shutil.which, names) if found), None)


def model_folder(folder: Path, encoding: str = "cable", seed: int = 0) -> Path:
    """A model of three layers and four heads that reads bytes, as `relpos train` leaves one."""
    torch.manual_seed(seed)
    config = RelPosConfig(
        encoding=encoding, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=320, train_length=64
    )
    RelPosForCausalLM(config).save_pretrained(folder)
    tokenizer.load("bytes").save(folder)
    return folder
