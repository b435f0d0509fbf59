"""docs/adding-an-encoding.md, done: its file and its case are added to a copy of the source tree; then the registry,
the tests over the case table, the kernel tests and the command line have the new encoding."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_encodings
import torch
from cases import Case
from support import Inputs, close, make
from test_attention import attention, decode

import relpos
from relpos import encodings

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/adding-an-encoding.md").read_text()
# The code blocks by the comment in their first line.
BLOCKS = {m[1]: m[2] for m in re.finditer(r"```python\n# ([\w./]+)\n(.*?)```", PAGE, re.S)}


def run(*command: str, cwd: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def registry(monkeypatch):
    """What a test registers does not outlive it."""
    monkeypatch.setattr(encodings, "_registered", dict(encodings._registered))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources with one file more and one entry more in the case table."""
    tree = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns("__pycache__", "*.safetensors", "stored")
    shutil.copytree(ROOT / "relpos", tree / "relpos", ignore=skip)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=skip)
    for name in ("relpos_cli.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "relpos/encodings/log_linear.py").write_text(BLOCKS["log_linear.py"])
    cases = (tree / "tests/cases.py").read_text().rstrip()
    assert cases.endswith("]") and cases.count("\n# The table.\n") == 1
    cases = cases.removesuffix("]") + BLOCKS["CASES"] + "]\n"
    cases = cases.replace("\n# The table.\n", "\n" + BLOCKS["tests/cases.py"] + "\n\n# The table.\n")
    (tree / "tests/cases.py").write_text(cases)
    return tree


def test_one_file_and_one_case_are_enough(tree):
    wanted = "log_linear or test_every_name_has_a_case"
    assert passed(tree, wanted, "tests/test_encodings.py", "tests/test_attention.py") > 30


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels need Triton")
def test_the_kernels_have_it(tree):
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert passed(tree, "log_linear", "tests/test_fused.py", **interpreter) >= 3


def passed(tree: Path, wanted: str, *files: str, **variables: str) -> int:
    """How many of the wanted tests passed; all must."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", wanted, *files)
    out = run(*command, cwd=tree, **variables)
    found = re.search(r"(\d+) passed", out)
    assert found is not None, out[-2000:]
    return int(found[1])


def test_the_command_line_has_it(tree):
    assert "log_linear" in run(sys.executable, "relpos_cli.py", "encodings", cwd=tree)


def test_a_file_of_ones_own(tmp_path, registry):
    path = tmp_path / "log_linear.py"
    path.write_text(BLOCKS["log_linear.py"])
    encoding = encodings.build(f"{path}:start=0.5", heads=12)
    assert "log_linear" in encodings.names() and encoding.parameter_count() == 12
    assert relpos.bias_matrix(encoding, 512).shape == (12, 512, 512)
    with pytest.raises(relpos.UserError, match="log_linear: start must be above 0"):
        encodings.build("log_linear:start=0")
    # The flag of the page, on the command as it is.
    command = (str(ROOT / "relpos_cli.py"), "--plugin", str(path), "info", "log_linear:start=0.5")
    info = run(sys.executable, *command, cwd=ROOT)
    assert "-s_h ln(1 + |d|)" in info and "start" in info
    with pytest.raises(AssertionError, match="log_linear"):
        test_encodings.test_every_name_has_a_case()


def test_the_one_that_reads_the_text(tmp_path, registry):
    path = tmp_path / "drift.py"
    path.write_text(BLOCKS["drift.py"])
    case = Case(str(path), content=True)
    encoding, inputs = make(case, 3), Inputs(3, 9)
    whole = attention(case, encoding, inputs)
    close(decode(case, encoding, inputs, [4, 1, 1, 3]), whole)
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    alone = relpos.attention(
        *(x[1:, :, 4:] for x in (inputs.q, inputs.k, inputs.v)), encoding, hidden=inputs.hidden[1:, 4:]
    )
    close(attention(case, encoding, inputs, key_padding_mask=mask)[1:, :, 4:], alone)
    assert not torch.allclose(whole, relpos.attention(inputs.q, inputs.k, inputs.v, "none"))


def test_a_hook_that_gives_the_wrong_thing_is_told_so(tmp_path, registry):
    for body, says in [
        ("def by_distance(self, d): return -d.abs()", r"wrong: by_distance must give .* = \[12, 8\], not \[8\]"),
        ("def by_distance(self, d): return -d.abs().expand(3, *d.shape)", r"= \[12, 8\], not \[3, 8\]"),
        ("pass", "Wrong must define by_distance"),
    ]:
        path = tmp_path / str(len(body)) / "wrong.py"
        path.parent.mkdir()
        head = "from relpos.encodings.base import DistanceEncoding\nclass Wrong(DistanceEncoding):\n    "
        path.write_text(f"{head}{body}\n")
        with pytest.raises(relpos.UserError, match=says):
            relpos.bias_matrix(encodings.build(str(path)), 8)
