"""The page of the kernels' speed: made of the result files, tolerant of what is not measured, current."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import attention_page  # noqa: E402
import study_page  # noqa: E402


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("attention-h200.json", "training-step-h200.json", "nanogpt-h200.json"):
        shutil.copy(ROOT / "results" / name, tmp_path)
    return tmp_path


def change(path: Path, edit) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def line(text: str, heading: str, begins: str) -> str:
    section = text.split(f"### {heading}\n")[1].split("\n### ")[0]
    return next(x for x in section.splitlines() if x.startswith(f"| {begins} |"))


def test_it_follows_the_files(folder):
    def edit(value):
        for row in value["rows"]:
            if (row["name"], row["head_dim"]) == ("relpos fox", 64):
                row["ratio"] = 0.951 if row["length"] == 4096 else 0.5
                row["extra_mib"] = 1e6
            if row["name"] == "relpos t5":
                row["ratio"] = 1.25
        value["rows"] = [r for r in value["rows"] if (r["name"], r["length"]) != ("relpos rope", 1024)]
        value["rows"].append(dict(value["rows"][0], name="a new peer"))

    change(folder / "attention-h200.json", edit)
    text = attention_page.page(folder)
    fox = line(text, "Forward and backward", "`fox`")
    assert "**0.951**" in fox and "**0.500**" not in fox and fox.endswith("| <= 0.95 | no, at 4,096 |")
    assert line(text, "Forward and backward", "`t5`").endswith("| <= 1.25 | yes |")
    rope = line(text, "Forward and backward", "`rope`")
    assert "| - |" in rope and rope.endswith("| <= 0.95 | not measured at 1,024 |")
    verdict = next(x for x in text.splitlines() if x.startswith("**The targets**"))
    assert "`fox` (at 4,096)" in verdict and "`rope` (not measured at 1,024)" in verdict
    assert verdict.endswith("not met by `fox`.") and "`t5`" in verdict.split("Not met")[0]
    assert "no, at 512" in line(text, "Peak memory", "`fox`")
    short = attention_page.summary(folder).splitlines()  # the README's
    assert "| `fox` | 0.500 | 0.951 | 0.500 |" in short
    assert next(x for x in short if x.startswith("| `rope` |")).startswith("| `rope` | - |")
    # Peers stand before ours wherever the file has them.
    table = text.split("### Forward and backward\n")[1]
    assert table.index("| a new peer |") < table.index("| `none` |")


def test_training_rows_that_are_missing_slow_or_failed(folder):
    rows = [
        {"encoding": "rope", "length": n, "tokens_per_s": speed, "peak_gib": 14.0}
        for n, speed in ((512, 530e3), (1024, 510e3), (4096, 390e3))
    ]
    rows += [
        {"encoding": "fox", "length": 512, "tokens_per_s": 530e3, "peak_gib": 23.0},
        {"encoding": "t5", "length": 512, "tokens_per_s": 400e3, "peak_gib": 14.0, "note": "timed in a hurry"},
        {"encoding": "fire", "length": 512, "error": "OutOfMemoryError: no"},
    ]
    peer = {"encoding": "plain GPT-2", "peer": True, "length": 4096, "tokens_per_s": 300e3, "peak_gib": 18.0}
    change(folder / "training-step-h200.json", lambda value: value.update(rows=[*rows, peer]))
    text = attention_page.page(folder)

    def row(begins: str) -> str:
        return line(text, "A training step", begins)

    assert row("`rope`").endswith("| yes |") and "| 530k (102%) |" in row("`rope`")
    assert "| 390k (101%, 130%) |" in row("`rope`")  # beside the peer of the same run, where there is one
    assert row("plain GPT-2, no bias") == "| plain GPT-2, no bias | - | - | 300k (78%) | - | - | 18.0 |  |"
    assert row("`fox`").endswith("| no, at 512 |")  # fast, but in too much memory
    assert row("`t5`").endswith("| no, at 512 |") and "- Timed in a hurry: `t5` at 512" in text
    assert "| failed |" in row("`fire`") and "Failed: OutOfMemoryError: no: `fire` at 512" in text
    assert "| 521k | 501k | 387k | 22 |" in row("nanoGPT, no bias (given)")
    change(folder / "training-step-h200.json", lambda value: value.update(rows=[]))
    text = attention_page.page(folder)
    assert "nanoGPT, no bias (given)" in text


def test_training_through_the_command_where_it_was_timed(folder):
    def timed(spec: str, ratio: float) -> dict:
        bare = {"encoding": spec, "length": 1024, "tokens_per_s": 500e3, "peak_gib": 14.0}
        speed = ratio * 500e3
        return bare | {"train_tokens_per_s": speed, "train_mean_ratio": 0.99 * ratio, "train_ratio": ratio}

    path = folder / "training-step-h200.json"
    change(path, lambda value: value.update(rows=[timed("rope", 0.98), timed("fox", 0.96)]))
    text = attention_page.page(folder)
    assert line(text, "Through `relpos train`", "`rope`") == "| `rope` | 490k (98.0%) | 97.0% | yes |"
    assert line(text, "Through `relpos train`", "`fox`").endswith("| no, at 1,024 |")
    assert "| 500k (100%) |" in line(text, "A training step", "`rope`")
    change(path, lambda value: value.update(rows=[{k: v for k, v in timed("rope", 1).items() if "train" not in k}]))
    assert "Through `relpos train`" not in attention_page.page(folder)


def test_the_picture_shows_the_results_that_are_there(folder, tmp_path):
    with Image.open(attention_page.PICTURE) as shipped:
        assert shipped.info["Source"] == attention_page.digest(), "run `make docs`"
    change(folder / "attention-h200.json", lambda value: value["rows"][0].update(both_ms=9.0))
    with Image.open(attention_page.picture(folder, tmp_path / "a.png")) as made:
        assert made.info["Source"] == attention_page.digest(folder) != attention_page.digest()
        assert made.size[0] > 800


def test_what_is_written_by_hand_names_no_measurement_and_only_kernels_that_exist():
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- speed:.*<!-- /speed -->", "", text, flags=re.DOTALL)
    assert by_hand != text and not study_page.bare_numbers(by_hand) and " ms" not in by_hand
    kernels = (ROOT / "relpos" / "attention" / "kernels.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:forward|backward)_\w+)`", by_hand))
    assert named and all(f"def {name}(" in kernels for name in named)
