"""The package as a user meets it: the wheel, the command, the README, and the rooms that import only leftwards."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

import relpos
from relpos import encodings
from relpos.describe import describe, table

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, cwd: Path = ROOT, python: str = sys.executable, **kwargs) -> subprocess.CompletedProcess:
    """The command as a process of its own, from the source tree unless `python` is another."""
    env = dict(ENV) if python != sys.executable else {**ENV, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python, "-m", "relpos_cli", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )


# The wheel.


# With several workers, those that share this fixture run in one of them.
wheel_tests = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The Python of an empty environment with our wheel in it. Dependencies are lent by this environment through a .pth
    file, which adds a folder but not that folder's own .pth files: an editable relpos does not come along."""
    base = tmp_path_factory.mktemp("wheel")
    tree = base / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "relpos", tree / "relpos", ignore=ignore)
    for name in ("relpos_cli.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(base), str(tree)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = base.glob("relpos-*.whl")
    venv.create(base / "env", with_pip=False, symlinks=True)
    python = base / "env" / "bin" / "python"
    done = subprocess.run(
        [*pip, "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (site,) = (base / "env" / "lib").glob("python*/site-packages")
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return python


@wheel_tests
def test_wheel_draws_from_an_empty_folder(installed, tmp_path):
    where = subprocess.run(
        [str(installed), "-c", "import relpos, relpos_cli; print(relpos.__file__); print(relpos_cli.__file__)"],
        cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert where.returncode == 0, where.stderr
    for line in where.stdout.split():
        assert Path(line).is_relative_to(installed.parent.parent), f"{line} is not from the wheel"
    command = installed.parent / "relpos"
    done = subprocess.run(
        [str(command), "figure", "--out", "pictures", "--format", "png"],
        cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pictures = list((tmp_path / "pictures").glob("*.png"))
    assert len(pictures) >= 8 and (tmp_path / "pictures" / "contact-sheet.png") in pictures
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)


@wheel_tests
def test_wheel_says_what_it_is(installed):
    code = (
        "import importlib.metadata as m; d = m.metadata('relpos');"
        "print(d['Name'], d['Version'], d['License-Expression'], d['Requires-Python'])"
    )
    done = subprocess.run([str(installed), "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.stdout.split() == ["relpos", relpos.__version__, "MIT", ">=3.11"]
    (site,) = (installed.parent.parent / "lib").glob("python*/site-packages")
    assert (site / "relpos" / "py.typed").is_file()


# The rooms.

ROOMS = [
    {"errors"},
    {"files"},
    {"terms"},
    {"encodings"},
    {"attention"},
    {"models"},
    {"data", "training", "evaluation", "capture", "describe"},
    {"figures", "explorer"},
    {"study"},
]
# Rooms that stand side by side may use each other only in this direction.
NEIGHBOURS = {"training": {"data", "evaluation"}, "evaluation": {"data"}, "capture": {"data"}, "explorer": {"figures"}}


def imported_rooms(path: Path) -> set[str]:
    """Rooms of relpos that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("relpos.")}
    return found


def test_rooms_import_only_leftwards():
    order = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    wrong = []
    for path in sorted((ROOT / "relpos").rglob("*.py")):
        parts = path.relative_to(ROOT / "relpos").parts
        room = parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in order, f"{path}: {room} is a room that the plan does not have"
        for other in imported_rooms(path) & set(order):
            fine = other == room or order[other] < order[room] or other in NEIGHBOURS.get(room, set())
            if not fine:
                wrong.append(f"{'/'.join(parts)} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_nothing_outside_encodings_compares_an_encodings_name():
    names = "|".join(encodings.names())
    pattern = re.compile(rf"[=!]= *[\"']({names})[\"']")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*(ROOT / "relpos").rglob("*.py"), ROOT / "relpos_cli.py"]
        if "encodings" not in path.relative_to(ROOT).parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_command_imports_relpos_only_inside_functions():
    tree = ast.parse((ROOT / "relpos_cli.py").read_text(encoding="utf-8"))
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
        assert not any(n.split(".")[0] in ("relpos", "torch", "transformers", "matplotlib", "numpy") for n in names)


# The command.


def test_help_answers_at_once():
    best = min(_timed("--help") for _ in range(2))
    assert best < 2, f"relpos --help took {best:.2f} s"


def _timed(*arguments: str) -> float:
    start = time.perf_counter()
    done = run(*arguments)
    assert done.returncode == 0 and "Usage" in done.stdout
    return time.perf_counter() - start


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: status, stdout, stderr."""
    import relpos_cli

    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(list(arguments))
    return stop.value.code, *capsys.readouterr()


def test_encodings_lists_the_whole_registry(capsys):
    status, out, _ = command(capsys, "encodings")
    assert status == 0
    for name in encodings.names():
        assert re.search(rf"│ {name} ", out), name
    assert "(r_i P)[d], r = x W" in out  # square brackets are no markup


def test_info_shows_formulas_as_they_are(capsys):
    status, out, _ = command(capsys, "info", "dape:version=2,base=kerple")
    assert status == 0 and "f([q_i . k_j / sqrt(D); b_ij])" in out


def test_the_formula_is_that_of_the_options():
    assert "ln((S_i - S_j)^2 + 1)" in describe("cable:form=kernel").formula
    assert describe("cable:form=unweighted").formula.startswith("-|S_i - S_j|")
    assert describe("kerple:form=power").formula == "-a_h |d|^p_h"
    assert describe("t5:form=clipped,clip=8").formula == "table_h[clamp(d, -8, 8)]"
    assert "d >= 256" in describe("inkling:length=256").formula
    assert describe("cable").formula == encodings.get("cable").formula


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["info", "alibl"], ["alibl", "alibi"]),
        (["info", "ALIBI"], ["Did you mean 'alibi'?"]),
        (["info", "learned:max_positions=99999999999999"], ["too large for this machine"]),
        (["info", "inkling:rank=999999999999"], ["too large for this machine"]),
        (["info", "fire:length=99999999999999999999999999"], ["from 1 to 2147483647"]),
        (["info", "kerple:form=lgo"], ["form='lgo'", "log, power"]),
        (["info", "kerple:fom=log"], ["no option 'fom'", "'form'"]),
        (["info"], ["SPEC|RUN"]),
        (["info", "docs"], ["config.json"]),
        (["info", "runs/cable-nano"], ["there is no folder 'runs/cable-nano'"]),
        (["info", ""], ["an encoding is a string such as"]),
        (["figur"], ["figur", "figure"]),
        (["figure", "--length", "many"], ["--length"]),
        (["train", "--encoding", "rope", "--encoding", "alibl"], ["alibl", "alibi"]),
        (["train", "--encoding", "rope,alibi", "--encoding", "rope"], ["the same encoding twice"]),
        (["train", "--encoding", "t5:form=clipped", "--encoding", "clip=9"], ["no encoding 'clip=9'"]),
        (["--plugin", "nowhere.py", "encodings"], ["nowhere.py"]),
        (["--plugin", "LICENSE", "encodings"], ["'LICENSE' is no Python file"]),
        (["data", "prepare", "stdlib", "--tokenizer", "bytes", "--out", "LICENSE"], ["'LICENSE': File exists"]),
        (["explore", "--export", "LICENSE/page.html", "alibi"], ["cannot write 'LICENSE/page.html'"]),
    ],
)
def test_mistakes_get_one_message_and_status_2(arguments, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, out, err = command(capsys, *arguments)
    assert status == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and err.startswith("relpos: ")
    for word in words:
        assert word in err


def test_info_of_a_folder_never_imports_and_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    good = {"model_type": "relpos", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    for wrong, words in [
        ({"encoding": str(tmp_path / "own.py")}, "own.py"),
        ({"encoding": f"dape:base={tmp_path / 'own.py'}"}, "own.py"),
        ({"encoding": "rope", "num_attention_heads": None}, "num_attention_heads must be a number from 1 on, not None"),
        ({"encoding": "rope", "num_attention_heads": 0}, "not 0"),
        ({"encoding": "rope", "num_attention_heads": 5}, "5 heads do not divide a width of 64"),
        ({"encoding": "rope", "num_hidden_layers": "x"}, "not 'x'"),
        ({"encoding": 5}, "encoding must be a name or a list of them, not 5"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**good, **wrong}))
        status, out, err = command(capsys, "info", str(tmp_path))
        assert status == 2 and out == "" and words in err, (wrong, err)
    assert not (tmp_path / "ran").exists()


def test_info_of_a_run_that_has_not_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "relpos", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    for step, encoding in ((9, "alibi"), (100, "kerple"), (200, None)):  # the last is being written
        folder = tmp_path / "rope" / f"checkpoint-{step}"  # an encoding's name by chance
        folder.mkdir(parents=True)
        if encoding:
            (folder / "config.json").write_text(json.dumps({**config, "encoding": encoding}))
    status, out, err = command(capsys, "info", "rope")
    assert status == 0 and err == "" and "KERPLE  (kerple)" in out
    assert out.startswith("rope/checkpoint-100 ") and "has not ended; this is its last checkpoint" in out
    (tmp_path / "rope" / "config.json").write_text(json.dumps({**config, "encoding": "rope"}))
    status, out, err = command(capsys, "info", "rope")
    assert status == 0 and "RoPE  (rope)" in out and "checkpoint" not in out


def test_a_mistake_in_a_real_process():
    done = run("info", "alibl")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "'alibi'" in done.stderr


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--version"], ["encodings"], ["encodings", "--json"]])
def test_a_reader_that_has_gone(arguments):
    """`relpos train --help | head`: typer, rich and plain print each meet it in their own way."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "relpos_cli", *arguments], cwd=ROOT, env={**ENV, "PYTHONPATH": str(ROOT)},
        stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")  # as a command that SIGPIPE ends


@pytest.mark.parametrize("arguments", ["info rope", "info --help", "--version", "encodings --json"])
def test_a_closed_stdout(arguments):
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m relpos_cli {arguments} >&-'], cwd=ROOT,
        env={**ENV, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")  # as with a reader that has gone


def test_interrupt_is_quiet(monkeypatch, capsys):
    import relpos_cli

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("relpos.describe.table", interrupted)
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["encodings"])
    assert stop.value.code == 130 and capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback(monkeypatch):
    import relpos_cli

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("relpos.describe.table", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        relpos_cli.main(["encodings"])


def test_plugin_brings_an_encoding(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encodings, "_registered", dict(encodings._registered))
    (tmp_path / "steps.py").write_text(
        "import torch\n"
        "from relpos.encodings import DistanceEncoding\n\n"
        "class Steps(DistanceEncoding):\n"
        '    title = "Steps"\n'
        '    formula = "-floor(d / n)"\n\n'
        "    def __init__(self, *, heads, head_dim, hidden_size, n: int = 8, share: bool = False):\n"
        "        super().__init__(heads=heads, head_dim=head_dim, hidden_size=hidden_size, share=share)\n"
        "        self.n = n\n\n"
        "    def by_distance(self, d):\n"
        "        return -(d.abs() // self.n).float().expand(self.heads, *d.shape)\n"
    )
    status, out, err = command(capsys, "--plugin", "steps.py", "info", "steps:n=4")
    assert status == 0, err
    assert "-floor(d / n)" in out and "a whole number; default 8" in out


# What is told about an encoding.


@pytest.mark.parametrize(
    "spec, parameters",  # of a whole GPT-2 Small, from the papers' definitions
    [
        ("alibi", 0),
        ("t5", 32 * 12),
        ("t5:form=clipped", 12 * 513 * 12),
        ("kerple", 24),
        ("kerple:share=false", 288),
        ("fire", 12 * 462),
        ("cable", 221_472),
        ("cable:form=unweighted", 110_736),
        ("fox", 110_736),
        ("learned", 1024 * 768),
    ],
)
def test_parameters_of_gpt2_small(spec, parameters):
    assert describe(spec).parameters == parameters


def test_every_encoding_is_described():
    for row in table():
        assert row.title and row.formula and row.paper.startswith("https://"), row.name
        assert row.enters and row.decode_state and "reference" in row.implementations


# The README.


def test_readme_table_is_current():
    # A process of its own: other tests register encodings in this one.
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def snippets(language: str, path: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_python_runs(tmp_path):
    blocks = snippets("python") + snippets("python", "docs/figures.md")
    assert len(blocks) >= 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path, env={**ENV, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_readme_commands_run(tmp_path):
    blocks = snippets("sh")
    assert blocks
    # Outside a virtual environment there may be no `relpos` on the path; the module is the same command.
    script = f'set -e\nrelpos() {{ "{sys.executable}" -m relpos_cli "$@"; }}\n' + "\n".join(blocks)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path, env={**ENV, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_readme_shows_the_two_commands_and_its_links_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_screen = "\n".join(text.splitlines()[:30])
    assert "make figures" in first_screen and "make test" in first_screen
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_every_make_target_is_explained():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for target in phony.split():
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text() and os.access(ROOT / ".ci" / "run", os.X_OK)
