"""The study: its list and recipe, one model's files, a real kill and restart, the time limit, the generated page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from relpos import capture, encodings, study
from relpos.data import prepare
from relpos.describe import fusable
from relpos.errors import UserError
from relpos.study import Clock, Job, NoTime, Study

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import study_page  # noqa: E402

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "source"
    prepare("stdlib", folder, "bytes", max_tokens=300_000, validation=0.1)
    return folder


def small(data: Path, out: Path, **changes) -> Study:
    """Sixteen steps of a model with 27,000 parameters."""
    base = Study(
        data=str(data), out=str(out), size="nano", length=32, tokens=4096, dense_tokens=1024, tokens_per_step=256,
        lengths=(32, 64, 256), eval_tokens=2049, config=SMALL,
        encodings=("kerple:share=false", "rope", "dape:version=2,base=kerple"),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def make(one: Study, job: Job, clock: Clock | None = None) -> dict:
    (Path(one.out) / study.WORK).mkdir(parents=True, exist_ok=True)
    return json.loads(study.one(one, job, clock or Clock()).read_text())


@pytest.fixture(scope="module")
def results(data, tmp_path_factory) -> Path:
    """A whole small study, made in this process."""
    out = tmp_path_factory.mktemp("study")
    one = small(data, out)
    for job in study.plan(one):
        make(one, job)
    for seed in (1, 2):
        make(one, Job("rope", seed, one.tokens, False))
    return out


# The list and the recipe.


def test_default_list_and_budgets():
    one = Study(data="nowhere", tokens=96_000_000)
    jobs = study.plan(one)
    main, dense = ([job for job in jobs if job.dense is kind] for kind in (False, True))
    assert len(main) == 12 and all(fusable(encodings.build(job.spec)) for job in main)
    assert {job.tokens for job in main} == {96_000_000} and {job.tokens for job in dense} == {12_000_000}
    # What a dense encoding is built around has its smaller budget too, one module per layer as inside it.
    assert [job.spec for job in dense] == [*study.ENCODINGS[12:], "kerple:share=false", "cable"]
    assert len({job.name for job in jobs}) == len(jobs) == 16
    assert jobs[0].name == "cable-96M-seed0"
    same = study.plan(dataclasses.replace(one, dense_tokens=one.tokens))
    assert [job.spec for job in same] == list(study.ENCODINGS) and [job.dense for job in same] == [False] * 12 + [
        True
    ] * 2
    both = study.plan(dataclasses.replace(one, seeds=(3, 1), encodings=("rope", "none")))
    assert [(job.spec, job.seed) for job in both] == [("rope", 3), ("none", 3), ("rope", 1), ("none", 1)]
    assert study.base_of("rope") is None and study.base_of("dape:base=t5:buckets=16") == "t5:buckets=16,share=false"


def test_one_encoding_where_a_list_is_expected():
    with pytest.raises(UserError, match=r"encodings must be a list, of one too: \['rope'\], not 'rope'"):
        study.plan(Study(data="nowhere", encodings="rope"))


def test_recipe_of_the_issue():
    fixed = study.recipe(Study(data="nowhere"), Job("rope", 0, 48_000_000, False))
    assert (fixed["steps"], fixed["tokens"], fixed["warmup_steps"]) == (733, 733 * 65_536, 37)
    assert fixed["learning_rate"] == 6e-4 and fixed["tokens"] >= 48_000_000


@pytest.mark.parametrize("text, count", [("96M", 96_000_000), ("1.5B", 1_500_000_000), ("500k", 500_000), ("7", 7)])
def test_counts(text, count):
    assert study.parse_count(text, "--tokens") == count and study.parse_count(study.short(count), "") == count


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tokens", "many"], ["--tokens", "96M"]),
        (["--tokens", "0.3"], ["0.3"]),
        (["--seeds", "1,x"], ["--seeds"]),
        (["--seeds", "1,1"], ["different"]),
        (["--encodings", "rope,rope"], ["twice"]),
        (["--encodings", "ropy"], ["ropy", "rope"]),
        (["--size", "large"], ["large"]),
        (["--length", "500"], ["65536", "windows"]),
        (["--length", "0"], ["length must be a whole number from 1 on"]),
        (["--tokens-per-step", "0"], ["tokens_per_step"]),
        (["--learning-rate", "-1"], ["above 0"]),
        (["--eval-data", "nothing.bin"], ["nothing.bin"]),
        (["--data", "nowhere"], ["nowhere"]),
        (["--lengths", ""], ["length"]),
        (["--ahead", "-1"], ["ahead must be at least 0, not -1"]),
    ],
)
def test_mistakes_get_one_message(arguments, words, data, tmp_path, capsys):
    import relpos_cli

    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["study", "--data", str(data), "--out", str(tmp_path / "out"), *arguments])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and len(said.err.strip().splitlines()) == 1
    assert all(word in said.err for word in words), said.err
    assert not (tmp_path / "out").exists()


def test_other_json_in_the_folder_of_a_study(tmp_path):
    (tmp_path / "notes.json").write_text("[1, 2]")
    assert study.load(tmp_path) == []
    (tmp_path / "cut.json").write_text("{cut")
    with pytest.raises(UserError, match="cut.json' is not valid JSON"):
        study.load(tmp_path)


def test_nothing_to_test_on(tmp_path):
    (tmp_path / "a.txt").write_text("one " * 200)
    prepare(str(tmp_path / "a.txt"), tmp_path / "data", "bytes", validation=0.0)
    one = small(tmp_path / "data", tmp_path / "out")
    with pytest.raises(UserError, match="--eval-data"):
        study.check(one, study.plan(one))


# One model.


def test_result_holds_everything(results):
    value = json.loads((results / "kerple-share-false-4096-seed0.json").read_text())
    assert value["encoding"] == "kerple:share=false" and value["group"] == "main" and value["seed"] == 0
    assert len(value["loss"]) == len(value["grad_norm"]) == 16 and value["loss"][0] > value["loss"][-1] > 1
    assert value["tokens_per_second"] > 0 and value["tokens_per_second_whole_run"] > 0 and value["device"]
    assert value["versions"]["torch"] and "git" in value and value["data"]["fingerprint"]
    assert value["model"]["encoding_parameters"] == 2 * 2 * 4 and value["model"]["fingerprint"].startswith("sha256:")
    [tested] = value["evaluation"]
    assert set(tested["protocols"]) == {"blocks", "last"} and tested["data"]["split"] == "validation"
    for entry in tested["protocols"].values():
        assert [row["status"] for row in entry["results"]] == ["ok"] * 3 and entry["same_tokens_at_every_length"]
    assert tested["protocols"]["blocks"]["scored"]["tokens"] == 2048 and tested["model"]["fingerprint"]
    # The prompt has no room in them: no limit of the model, and not called one.
    assert [row["status"] for row in value["passkey"]["results"]] == ["too short", "too short", "ok"]
    assert "prompt needs at least" in value["passkey"]["results"][0]["reason"]
    assert (results / "kerple-share-false-4096-seed0.json").stat().st_size < 40_000
    # Dense ones, and what they are built around, read less: a sixteenth of the steps here, a quarter of the text.
    for name in ("dape-version-2-base-kerple-1024-seed0", "kerple-share-false-1024-seed0"):
        value = json.loads((results / f"{name}.json").read_text())
        assert value["group"] == "dense" and len(value["loss"]) == 4
        assert value["evaluation"][0]["data"]["tokens"] == 513
    assert not list(results.rglob("*model*.safetensors")) and not (results / study.WEIGHTS).exists()
    assert list((results / study.WORK).iterdir()) == [results / study.WORK / "turn.lock"]


def test_numbers_are_those_of_the_other_commands(data, tmp_path):
    """Kept weights, loaded by `relpos evaluate`'s code on the same text, give the perplexity in the file."""
    from relpos.evaluation import Settings, evaluate, open_text
    from relpos.evaluation.scoring import load_model

    one = small(data, tmp_path, keep_weights=True)
    value = make(one, Job("rope", 0, one.tokens, False))
    folder = tmp_path / study.WEIGHTS / "rope-4096-seed0"
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    text = open_text(data, max_tokens=one.eval_tokens)
    again = evaluate(model, text, Settings(lengths=one.lengths, protocols=("blocks",)))
    found = [row["loss"] for row in again["protocols"]["blocks"]["results"]]
    kept = [row["loss"] for row in value["evaluation"][0]["protocols"]["blocks"]["results"]]
    assert found == pytest.approx(kept, abs=1e-5)
    assert again["model"]["fingerprint"] == value["model"]["fingerprint"]
    assert (folder / "tokenizer.json").is_file() and (folder / "run.json").is_file()


def test_seed_decides_and_encodings_share_the_order(data, results, tmp_path):
    losses = {path.stem: json.loads(path.read_text())["loss"] for path in results.glob("rope-*.json")}
    again = make(small(data, tmp_path), Job("rope", 0, 4096, False))
    assert again["loss"] == losses["rope-4096-seed0"] != losses["rope-4096-seed1"]
    # Before the first update nothing but chance differs: the same text gives nearly the same loss.
    other = json.loads((results / "kerple-share-false-4096-seed0.json").read_text())["loss"]
    assert abs(other[0] - losses["rope-4096-seed0"][0]) < abs(
        losses["rope-4096-seed1"][0] - losses["rope-4096-seed0"][0]
    )


def test_capture_is_one_that_can_ship(results):
    held = capture.load(results / "rope-4096-seed0.safetensors")
    assert held.length == 32 and held.heads == 4 and list(held.layers) == [1] and len(held.pieces) == 32
    assert "".join(held.pieces).startswith("The lighthouse")
    for fact in ("model", "recipe", "data", "steps", "perplexity", "commit", "text"):
        assert held.provenance.get(fact), fact
    assert held.map("scores").shape == (4, 32, 32)


# Time.


def test_no_time_when_the_turn_comes(data, tmp_path):
    one, job = small(data, tmp_path), Job("none", 0, 4096, False)
    with pytest.raises(NoTime, match="left"):  # at 1 token a second it would take an hour
        make(one, job, Clock(deadline=time.time() + 60, speed=1.0))
    assert not (tmp_path / study.WORK / job.name / "metrics.jsonl").exists()
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.safetensors"))


def test_no_time_once_the_speed_is_known(tmp_path):
    """A run that turns out slower than guessed is given up after its first steps, not at the end."""
    turn = study.Turn(tmp_path / "lock", Clock(deadline=time.time() + 60, speed=1e9), 256, 100, lambda model: None)
    step = dataclasses.make_dataclass("State", ["global_step"])
    turn.on_step_end(None, step(1), None)
    turn.on_step_end(None, step(turn.look), None)  # quick so far: fine
    turn.began -= 20.0  # twenty seconds for the first tenth
    with pytest.raises(NoTime, match="about 2[0-9][0-9] s"):
        turn.on_step_end(None, step(turn.look), None)
    turn.release()


def test_time_limit_starts_nothing_that_does_not_fit(data, results, capsys):
    """The speed of what is there says that a large budget does not fit and that a small one might."""
    one = small(data, results, encodings=("none",), tokens=10**9, time_limit=30.0)
    [outcome] = study.run(one)
    assert outcome.status == "left" and "in time" in outcome.error
    runner = study.Runner(one)
    assert not runner.fits(Job("none", 0, 10**9, False)) and runner.fits(Job("none", 0, 4096, False))


def test_a_study_leaves_the_work_of_another_alone(data, results, tmp_path):
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    theirs = tmp_path / study.WORK / "theirs"
    theirs.mkdir(parents=True)
    one = small(data, tmp_path)
    assert {outcome.status for outcome in study.run(one)} == {"there"} and theirs.is_dir()
    theirs.rmdir()
    study.run(one)
    assert not (tmp_path / study.WORK).exists()


def test_weights_that_were_not_kept_are_said_to_be_missing(data, results, tmp_path, capsys):
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    one = small(data, tmp_path, keep_weights=True)
    folder = tmp_path / study.WEIGHTS / "rope-4096-seed0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    outcomes = study.run(one)
    lacking = [outcome.job.name for outcome in outcomes if outcome.error]
    assert [outcome.status for outcome in outcomes] == ["there"] * 4
    assert lacking == [job.name for job in study.plan(one) if job.name != folder.name]
    note = f"its weights were not kept: delete {lacking[0]}.json to train it again"
    assert outcomes[0].error == note and f"{lacking[0]}: {note}" in capsys.readouterr().err
    assert not any(outcome.error for outcome in study.run(small(data, tmp_path)))


# All of them, in processes of their own.


def start(data: Path, out: Path, *more: str) -> subprocess.Popen:
    config = [part for key, value in SMALL.items() for part in ("--config", f"{key}={value}")]
    command = [
        sys.executable, "-m", "relpos_cli", "study", "--size", "nano", "--length", "32", "--tokens-per-step", "256",
        "--lengths", "32,64", "--eval-tokens", "1025", "--data", str(data), "--out", str(out), *config, *more,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent
    )


def test_kill_and_restart(data, tmp_path):
    out = tmp_path / "out"
    # The second has too short a table, which only its own process finds out.
    arguments = ("--encodings", "none,learned:max_positions=16,rope", "--tokens")
    first = start(data, out, "--encodings", "none,rope", "--tokens", "30k")  # rope trains for minutes
    done, doomed = out / "none-30k-seed0.json", out / ".work" / "rope-30k-seed0" / "metrics.jsonl"
    end = time.time() + 200
    while not doomed.exists() and time.time() < end and first.poll() is None:
        time.sleep(0.02)
    assert done.is_file() and doomed.exists(), first.communicate()[0]
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)  # its child goes with it: it would hold the pipe open
    assert not (out / "rope-30k-seed0.json").exists()
    before = done.read_text()
    again = start(data, out, *arguments, "30k")
    said = again.communicate(timeout=240)[0]
    assert again.returncode == 2, said
    assert done.read_text() == before and "already there: none-30k-seed0" in said
    value = json.loads((out / "rope-30k-seed0.json").read_text())
    assert len(value["loss"]) == math.ceil(30_000 / 256) and all(math.isfinite(x) for x in value["loss"])
    assert "there   none" in said and "done    rope" in said and "failed  learned" in said and "table of 16" in said
    assert not (out / ".work" / "rope-30k-seed0").exists()


def test_another_recipe_is_not_taken_for_this_one(data, results):
    with pytest.raises(UserError, match="another recipe"):
        study.run(small(data, results, learning_rate=1.0))
    with pytest.raises(UserError, match="another recipe"):
        study.run(small(data, results, lengths=(32, 64)))
    outcomes = study.run(small(data, results))
    assert [outcome.status for outcome in outcomes] == ["there"] * 4


# The page.


def test_page_is_made_of_the_results(results, tmp_path):
    reading = tmp_path / "reading.md"
    reading.write_text(
        "## Reading\n<!-- not shown -->RoPE has {blocks rope 32} and {last rope 64}, grows by {growth rope 64}, "
        "spreads by {spread rope 32}, begins at {loss rope 1}, ends at {loss rope}, runs at {speed rope}, finds "
        "{passkey rope 256}; DAPE has {dense dape:version=2,base=kerple 32}; {record sinusoidal-unscaled steps -1 0}.\n"
    )
    text = study_page.page(results, reading)
    value = json.loads((results / "rope-4096-seed0.json").read_text())
    for protocol in ("blocks", "last"):
        for row in value["evaluation"][0]["protocols"][protocol]["results"]:
            assert f"{row['perplexity']:.2f}" in text
    for heading in (
        "What was run",
        "Perplexity by length",
        "Beyond the training length",
        "Effective context",
        "Passkey",
    ):
        assert f"## {heading}" in text
    for heading in ("Speed and memory", "Noise between seeds", "Encodings that need dense attention", "The figures"):
        assert f"## {heading}" in text
    assert "not shown" not in text and "{" not in text.split("## Reading")[1]
    assert f"RoPE has {study.at(value, 'blocks', 32)['perplexity']:.2f} and" in text
    assert f"begins at {value['loss'][0]:.2f}, ends at {value['train_loss']:.3f}," in text and "; 504." in text
    assert "| `rope` | 4096 | 0, 1, 2 | mean ± sd |" in text and "DAPE + KERPLE" in text
    assert study_page.page(results, reading) == text
    # It follows the files: another number there is another page.
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in results.glob("*.json"):
        (changed / path.name).write_text(path.read_text())
    value["tokens_per_second"] = 123_456.0
    (changed / "rope-4096-seed0.json").write_text(json.dumps(value))
    assert "123k" in study_page.page(changed, reading) and "123k" not in text


def test_reading_names_only_what_there_is(results, tmp_path):
    reading = tmp_path / "reading.md"
    for wrong in (
        "{blocks rope 999}", "{blocks alibi 32}", "{memory rope}", "{colour rope}", "{spread none 32}",
        "{loss rope 99}", "{record nothing at all}", "{record sinusoidal-unscaled steps 99}",
    ):  # fmt: skip
        reading.write_text(wrong)
        with pytest.raises(UserError, match="reading of the study"):
            study_page.page(results, reading)
    assert study_page.bare_numbers("12 heads, {blocks rope 32}, arXiv 2503.08067") == []
    assert study_page.bare_numbers("it has 12.5 <!-- 1.5 -->") == ["12.5"]
    shipped = study_page.READING.read_text(encoding="utf-8")
    assert not study_page.bare_numbers(shipped), "name the numbers of the reading, do not type them"


def test_results_that_differ_make_no_table(results, tmp_path):
    for path in results.glob("*.json"):
        value = json.loads(path.read_text())
        if value["encoding"] == "rope":
            value["recipe"]["learning_rate"] = 0.5
        (tmp_path / path.name).write_text(json.dumps(value))
    with pytest.raises(UserError, match="learning_rate"):
        study_page.page(tmp_path)


def test_seeds_of_a_smaller_budget_stay_out_of_the_tables(results, tmp_path):
    """More seeds of what a dense encoding is built around, at its budget: they are noise, not rows."""
    before, base = study_page.Results(results), "kerple-share-false-1024-seed0.json"
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    found = []
    for seed in (0, 1, 2):
        value = json.loads((results / base).read_text())
        value["seed"] = value["recipe"]["seed"] = seed
        value["group"] = "main"  # the group of a study of that budget alone, for the one that is there already too
        row = study.at(value, "blocks", 32)
        row["perplexity"] += seed**2
        found.append(row["perplexity"])
        (tmp_path / base.replace("seed0", f"seed{seed}")).write_text(json.dumps(value))
    r = study_page.Results(tmp_path)

    def places(group: list[dict]) -> list[tuple[str, int, int]]:
        return [(v["encoding"], v["budget"], v["seed"]) for v in group]

    assert places(r.main) == places(before.main) == [("kerple:share=false", 4096, 0), ("rope", 4096, 0)]
    kerple = ("kerple:share=false", 1024)
    assert places(r.dense) == places(before.dense) == [(*kerple, 0), ("dape:version=2,base=kerple", 1024, 0)]
    assert [places(group) for group in before.noise] == [[("rope", 4096, seed) for seed in (0, 1, 2)]]
    assert [places(group) for group in r.noise] == [[(*kerple, seed) for seed in (0, 1, 2)], places(before.noise[0])]
    for part in (study_page.perplexities, study_page.growth, study_page.keys, study_page.cost, study_page.dense):
        assert part(r) == part(before)
    assert not r.rest()
    text = study_page.page(tmp_path, tmp_path / "no reading")
    mean, deviation = statistics.mean(found), statistics.stdev(found)
    assert f"| `kerple:share=false` | 1024 | 0, 1, 2 | mean ± sd | {mean:.2f} ± {deviation:.2f} |" in text
    assert f"|  |  |  | range | {found[0]:.2f} to {found[2]:.2f} |" in text
    assert study_page.quoted(r, "spread", ["kerple:share=false", "32"]) == f"{deviation:.2f}"
    # One that was tested otherwise is no third seed, and is not left unsaid either.
    value["asked"]["texts"] = ["another"]
    (tmp_path / base.replace("seed0", "seed2")).write_text(json.dumps(value))
    r = study_page.Results(tmp_path)
    assert [group[0]["encoding"] for group in r.noise] == ["rope"] and "## Noise between seeds" in study_page.seeds(r)
    assert places(r.rest()) == [(*kerple, 1), (*kerple, 2)] and "## Other budgets and seeds" in study_page.rest(r)


def test_bases_of_the_dense_group_are_taken_for_seeds(data, results):
    """With its short test a study of its budget alone finds them there, and has the other seeds to make."""
    one = small(data, results, tokens=1024, encodings=("kerple:share=false",), eval_tokens=513, seeds=(0, 1))
    assert [job.name for job in study.check(one, study.plan(one))] == ["kerple-share-false-1024-seed1"]


def test_pictures_and_what_ships(results, tmp_path):
    pictures = study_page.pictures(results, tmp_path / "images")
    assert [path.stem.removeprefix("study-") for path in pictures] == [
        "perplexity", "loss-by-position", "training-loss", "heads",
    ]  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    specs = ("rope", "kerple:share=false")
    written = study_page.ship(results, tmp_path / "shipped", specs)
    assert [path.stem for path in written] == ["rope", "kerple-share-false"]
    held = capture.load(written[1])
    assert held.specs[0] == specs[1] and "seed 0" in held.provenance["recipe"] and held.provenance["steps"] == "16"
    with pytest.raises(UserError, match="holds a capture of fox"):
        study_page.ship(results, tmp_path / "none", ("rope", "fox"))
    assert not (tmp_path / "none").exists()
    (tmp_path / "shipped" / "fox.safetensors").write_bytes(b"the one before")  # which stays
    assert [p.stem for p in study_page.ship(results, tmp_path / "shipped", ("rope", "fox"))] == ["rope"]


def test_without_results_nothing_is_made(tmp_path):
    assert study_page.page(tmp_path) == study_page.NOTHING and study_page.pictures(tmp_path, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_stored_page_is_current():
    """What stands in docs/study.md is what the files in results/study give, and its pictures are there."""
    stored = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    page = study_page.page()
    assert f"<!-- study: generated by `make docs` -->\n{page}\n<!-- /study -->" in stored, "run `make docs`"
    for line in page.splitlines():
        if line.startswith("!["):
            assert (ROOT / "docs" / line.split("](")[1].rstrip(")")).is_file(), line
    assert bool(study.load(study_page.RESULTS)) == (page != study_page.NOTHING)
