"""Training: the run folder, a real kill, two processes, sharding, the comparison, and each mistake's message."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from children import finish, start, together
from functorch.compile import make_boxed_func
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd
from transformers import TrainerCallback

from relpos.data import prepare, tokenizer
from relpos.encodings import Encoding
from relpos.errors import UserError
from relpos.files import final
from relpos.models import RelPosConfig, RelPosForCausalLM
from relpos.training import Settings, decayed, presets, train
from relpos.training.presets import parse_config, parse_overrides, shape
from relpos.training.trainer import last_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "data"
    prepare("stdlib", folder, "bytes", max_tokens=400_000, validation=0.1)
    return folder


def settings(data: Path, out: Path, **changes) -> Settings:
    """Twelve steps of a model with 27,000 parameters."""
    base = Settings(
        encoding="kerple", data=str(data), out=str(out), length=32, tokens_per_step=256, steps=12, seed=3, config=SMALL
    )
    overrides = {"save_steps": 4, "eval_strategy": "no", "save_total_limit": 10, "use_cpu": True}
    overrides |= changes.pop("overrides", {})
    return dataclasses.replace(base, **changes, overrides=overrides)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# The run folder.


def test_run_folder_holds_everything(data, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "run"
    changes = {"eval_strategy": "steps", "eval_steps": 40, "save_steps": 40, "save_total_limit": 2}
    [folder] = train(settings(data, out, steps=120, learning_rate=1e-2, overrides=changes))
    assert folder == out
    found = lines(out)
    assert [x["step"] for x in found] == list(range(1, 121))
    assert all(set(x) == {"step", "loss", "grad_norm", "learning_rate", "tokens"} for x in found)
    assert found[-1]["tokens"] == 120 * 256
    # The paper's schedule: (step + 1) / warm-up, then a cosine to a tenth.
    assert found[0]["learning_rate"] == pytest.approx(1e-2 / 12) and found[11]["learning_rate"] == pytest.approx(1e-2)
    assert found[-1]["learning_rate"] == pytest.approx(1e-3, rel=0.02)
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "complete" and run["data"]["fingerprint"] and run["versions"]["torch"] and run["command"]
    assert run["settings"]["encoding"] == "kerple" and "git" in run
    assert run["train_loss"] < 0.95 * run["data"]["unigram_entropy"]
    assert run["train_loss"] == pytest.approx(sum(x["loss"] for x in found[-6:]) / 6)
    assert [json.loads(x)["step"] for x in (out / "validation.jsonl").read_text().splitlines()] == [40, 80, 120]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG" and (out / "sample.txt").stat().st_size > 20
    assert any(p.name.startswith("events.") for p in (out / "tensorboard").iterdir())
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-120", "checkpoint-80"]
    names = {p.name for p in out.rglob("*")}
    assert "training_args.bin" not in names and not any(n.endswith(".bin") for n in names), "a pickle"
    model, tok = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = tok("import os", return_tensors="pt").input_ids
    assert tok.decode(ids[0]) == "import os" and model(ids).logits.shape == (1, 9, 320)
    again = AutoModelForCausalLM.from_pretrained(out / "checkpoint-120")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    said = capsys.readouterr().err
    assert "tokens/s" in said and "MFU" in said and "left" in said and "unigram entropy" in said and "a sample" in said


def test_order_and_loss_of_the_trainer_are_those_of_a_plain_loop(data, tmp_path):
    """Accumulation included: the Trainer's losses are those of ten lines of PyTorch over the same windows."""
    from relpos.data import TokenData, Windows

    out = tmp_path / "run"
    recipe = dict(rows=2, steps=4, overrides={"warmup_steps": 2, "save_strategy": "no"})
    train(settings(data, out, **recipe))
    config = RelPosConfig.preset(
        "nano", "kerple", **SMALL, vocab_size=320, train_length=32, bos_token_id=256, eos_token_id=256, pad_token_id=257
    )
    torch.manual_seed(3)
    model = RelPosForCausalLM(config).train()
    matrices = set(decayed(model))
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in matrices], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    windows = Windows(TokenData(data).train, 32, seed=3)
    for step, expected in enumerate(lines(out)):
        ids = torch.stack([windows[step * 8 + i]["input_ids"] for i in range(8)])
        loss = model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = expected["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
        assert norm.item() == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_no_parameter_of_an_encoding_is_decayed():
    for spec in ("cable", "fire", "kerple", "none"):
        model = RelPosForCausalLM(RelPosConfig.preset("nano", spec, **SMALL))
        own = {
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if isinstance(module, Encoding)
            for name, _ in module.named_parameters()
        }
        spared, paper = decayed(model), decayed(model, decay_encodings=True)
        assert not own & set(spared)
        assert set(paper) == {n for n, p in model.named_parameters() if p.dim() >= 2}
        assert set(paper) - set(spared) == own & set(paper)
        assert "model.embed_tokens.weight" in spared and "model.norm.weight" not in spared
    assert own == set()
    fire = RelPosForCausalLM(RelPosConfig.preset("nano", "fire", **SMALL))
    assert len(decayed(fire, True)) > len(decayed(fire))


# Kills.


def _train(options: Settings, resume: bool = False) -> None:
    train(options, resume=resume, given=set() if resume else None)


def test_killed_run_resumes_bit_for_bit(data, tmp_path):
    """SIGKILL between two checkpoints and SIGKILL while one is being written; the lines are those of a whole run."""
    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "log"
    recipe = dict(steps=60, overrides={"save_steps": 10})
    finish(start(_train, settings(data, whole, **recipe), log=log), log)
    process = start(_train, settings(data, out, **recipe), log=log)
    metrics = out / "metrics.jsonl"
    while process.is_alive() and not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 24):
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (out / "checkpoint-20").is_dir()
    assert not (out / "model.safetensors").exists()
    caught = 0
    for step in (30, 40, 50):  # while checkpoint-N is being written
        process = start(_train, settings(data, out, **recipe), True, log=log)
        staged, final = out / f".checkpoint-{step}", out / f"checkpoint-{step}"
        while process.is_alive() and not staged.exists() and not final.exists():
            pass
        process.kill()
        process.join()
        caught += staged.exists() and not final.exists()
    assert caught, "no kill fell into a save"
    # A checkpoint that a copy cut short, and one without its list, are passed over.
    last = max((p for p in out.glob("checkpoint-*")), key=lambda p: int(p.name.split("-")[1]))
    shutil.copytree(last, out / "checkpoint-58")
    os.truncate(out / "checkpoint-58" / "optimizer.pt", 100)
    shutil.copytree(last, out / "checkpoint-59", ignore=shutil.ignore_patterns("checkpoint.json"))
    finish(start(_train, settings(data, out, **recipe), True, log=log), log)
    assert "passing over" in log.read_text()
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    run = json.loads((out / "run.json").read_text())
    assert not list(out.glob(".*")) and run["resumed_at"]
    # Killed after the last step, before the final model was there.
    (out / "model.safetensors").unlink()
    (out / "run.json").write_text(json.dumps(run | {"status": "running"}))
    train(settings(data, out, **recipe), resume=True, given=set())
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_only_a_whole_model_is_taken_from_a_run(data, tmp_path, monkeypatch):
    """By the commands that read a run that has not ended, as by --resume."""
    out, plain = tmp_path / "run", os.replace

    def killed(source, target):
        plain(source, target)
        if Path(target) in (out / "config.json", out / "model.safetensors"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        train(settings(data, out))
    assert final(out) == out / "checkpoint-12" == last_checkpoint(out)[1]  # half of the model lies in the run itself
    os.truncate(out / "checkpoint-12" / "model.safetensors", 100)
    assert final(out) == out / "checkpoint-8" == last_checkpoint(out)[1]
    (out / "checkpoint-8" / "checkpoint.json").unlink()
    assert final(out) == out / "checkpoint-4" == last_checkpoint(out)[1]
    shutil.rmtree(out / "checkpoint-4")
    assert final(out) == out and last_checkpoint(out)[1] is None
    (out / "run.json").unlink()  # a trainer that lists no files
    assert final(out) == out / "checkpoint-8"
    train(settings(data, tmp_path / "whole"))
    assert final(tmp_path / "whole") == tmp_path / "whole"


class FullDisk(TrainerCallback):
    """After the first checkpoint no file may grow beyond a few kilobytes: the next write fails as on a full disk."""

    def on_save(self, args, state, control, **kwargs):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))


def _fill_the_disk(options: Settings) -> None:
    with pytest.raises(UserError, match="checkpoint-8 could not be written.*checkpoint-4 is intact"):
        train(options, callbacks=[FullDisk()])


def test_full_disk_keeps_the_last_checkpoint(data, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    finish(start(_fill_the_disk, settings(data, out), log=log), log)
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-4"] and not list(out.glob(".checkpoint-*"))
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    train(settings(data, out), resume=True, given=set())  # room again
    assert len(lines(out)) == 12


def test_nan_stops_and_keeps_the_last_good_checkpoint(data, tmp_path):
    out = tmp_path / "out"

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 9:
                with torch.no_grad():
                    next(model.parameters())[0] = float("inf")

    with pytest.raises(UserError, match=r"not a number at step 10.*last good checkpoint is .*checkpoint-8"):
        train(settings(data, out), callbacks=[Poison()])
    assert [x["step"] for x in lines(out)] == list(range(1, 10))
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    kept = RelPosForCausalLM.from_pretrained(out / "checkpoint-8")
    assert all(p.isfinite().all() for p in kept.parameters())
    assert not (out / "model.safetensors").exists()
    with pytest.raises(UserError, match="not a number at step"):  # without help: a rate that no model survives
        train(settings(data, tmp_path / "wild", learning_rate=1e30))


def test_a_run_that_learns_nothing_stops(data, tmp_path):
    class Freeze(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(state.global_step)

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for parameter in model.parameters():
                parameter.register_hook(torch.zeros_like)

    seen = []
    with pytest.raises(UserError, match="no gradient reaches any weight"):
        train(settings(data, tmp_path / "out"), callbacks=[Freeze()])
    assert seen == [0]


# Several processes.


def test_two_processes_give_the_losses_of_one(data, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    recipe = dict(steps=6, encoding="cable", overrides={"save_steps": 3, "eval_strategy": "steps", "eval_steps": 6})
    train(settings(data, one, rows=8, **recipe))
    together(_train, settings(data, two, rows=2, **recipe), folder=tmp_path)  # two processes, accumulating twice
    spread = json.loads((two / "run.json").read_text())["spread"]
    assert spread == {"length": 32, "rows": 2, "accumulation": 2, "processes": 2}
    for a, b in zip(lines(one), lines(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    held = [json.loads((run / "validation.jsonl").read_text().splitlines()[-1])["loss"] for run in (one, two)]
    assert held[0] == pytest.approx(held[1], rel=1e-4)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {p.name for p in (two / "checkpoint-6").iterdir()}


def _sharded_losses(shard: bool) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = RelPosForCausalLM(RelPosConfig.preset("nano", "fire", **SMALL)).train()
    rank, world = (dist.get_rank(), dist.get_world_size()) if shard else (0, 1)
    if shard:
        # As accelerate lays it out: blocks, the tied embedding with the last norm, and the root with the encodings.
        for block in model.model.layers:
            fully_shard(block)
        fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False)
        fully_shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters()), "a parameter is not sharded"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(step))
        mine = ids.view(world, -1, 32)[rank]
        loss = model(mine, labels=mine).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if shard:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    if shard:
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return losses


def _run_sharded(folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    losses = _sharded_losses(True)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def test_fully_shard_gives_the_same_losses(tmp_path):
    together(_run_sharded, tmp_path, folder=tmp_path)
    sharded = json.loads((tmp_path / "losses.json").read_text())
    assert sharded == pytest.approx(_sharded_losses(False), rel=1e-5)


def test_fsdp_on_a_cpu_is_an_error(data, tmp_path, monkeypatch):
    for change in ({"fsdp": True}, {"overrides": {"fsdp": True}}):
        with pytest.raises(UserError, match="needs GPUs"):
            train(settings(data, tmp_path / "x", **change))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # what `accelerate launch --use_fsdp` sets
    with pytest.raises(UserError, match="needs GPUs"):
        train(settings(data, tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def _fsdp_on_gpu(options: Settings) -> None:
    from torch.distributed.tensor import DTensor

    class EveryParameterIsSharded(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert all(isinstance(p, DTensor) for p in model.parameters())

    train(options, callbacks=[EveryParameterIsSharded()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP2 through the Trainer needs a GPU")
def test_fsdp_through_the_trainer(data, tmp_path):
    one, sharded = tmp_path / "one", tmp_path / "sharded"
    # In plain PyTorch: this is about sharding, and float32 kernels take long to compile.
    recipe = dict(encoding="fire", steps=6, compile=False, config=SMALL | {"impl": "reference"})
    recipe["overrides"] = {"bf16": False, "save_steps": 3, "use_cpu": False}
    together(_train, settings(data, one, **recipe), folder=tmp_path, processes=1, gpu=True)
    together(_fsdp_on_gpu, settings(data, sharded, fsdp=True, **recipe), folder=tmp_path, processes=1, gpu=True)
    for a, b in zip(lines(one), lines(sharded), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
    assert RelPosForCausalLM.from_pretrained(sharded).config.encoding == "fire"
    shutil.rmtree(sharded / "checkpoint-6")  # as if killed after the first checkpoint
    run = json.loads((sharded / "run.json").read_text())
    (sharded / "run.json").write_text(json.dumps(run | {"status": "running"}))
    together(_train, settings(data, sharded, fsdp=True, **recipe), True, folder=tmp_path, processes=1, gpu=True)
    assert [x["step"] for x in lines(sharded)] == list(range(1, 7))
    assert lines(sharded)[-1]["loss"] == pytest.approx(lines(one)[-1]["loss"], rel=1e-5)


# Tasks, starts, comparisons.


def test_masked_language_modelling(data, tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    out = tmp_path / "run"
    train(settings(data, out, task="mlm", encoding="alibi", steps=40, learning_rate=5e-3))
    found = lines(out)
    assert found[-1]["loss"] < found[0]["loss"] - 1
    assert AutoModelForMaskedLM.from_pretrained(out).config.model_type == "relpos_encoder"
    assert AutoTokenizer.from_pretrained(out).mask_token_id == 258 and "filled:" in (out / "sample.txt").read_text()


def test_a_tokenizer_without_a_mask_gets_one(tmp_path):
    from transformers import AutoTokenizer

    prepare("stdlib", tmp_path / "d", "bpe:320", max_tokens=20_000, validation=0.0)
    train(settings(tmp_path / "d", tmp_path / "run", task="mlm", encoding="alibi", steps=2))
    tok = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tok.mask_token_id == 320 and json.loads((tmp_path / "run" / "config.json").read_text())["vocab_size"] == 384


def test_documents_do_not_meet(data, tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    train(settings(data, tmp_path / "run", documents=True, steps=4, rows=4, overrides=evaluates))
    assert all(math.isfinite(x["loss"]) for x in lines(tmp_path / "run"))


def test_start_from_another_model_with_the_encoding_swapped(data, tmp_path, capsys):
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    first = tmp_path / "first"
    train(settings(data, first, steps=4))
    again = settings(data, tmp_path / "again", encoding="fire", steps=2, init_from=str(first))
    train(again)
    new = json.loads((tmp_path / "again" / "run.json").read_text())["model"]["new_weights"]
    assert new and all("encodings" in name for name in new)
    same = settings(data, tmp_path / "same", steps=6, init_from=str(first))
    train(same)
    assert json.loads((tmp_path / "same" / "run.json").read_text())["model"]["new_weights"] == []
    assert lines(tmp_path / "same")[0]["loss"] < lines(first)[0]["loss"]
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "relpos" / "encodings" / "alibi.py").read_text())
    train(settings(data, tmp_path / "mine", encoding=f"{file}:learn=true", steps=1, init_from=str(first)))
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["encoding"] == "mine:learn=true"
    # A resumed run no longer needs the model it started from.
    before = lines(tmp_path / "same")
    shutil.rmtree(tmp_path / "same" / "checkpoint-6")
    run = json.loads((tmp_path / "same" / "run.json").read_text()) | {"status": "running"}
    (tmp_path / "same" / "run.json").write_text(json.dumps(run))
    shutil.move(first, tmp_path / "moved")
    train(same, resume=True)
    assert lines(tmp_path / "same") == before
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    gpt2.save_pretrained(tmp_path / "gpt2")
    train(settings(data, tmp_path / "from-gpt2", encoding="kerple", steps=2, init_from=str(tmp_path / "gpt2")))
    assert "new weights: model.encodings" in capsys.readouterr().err
    bert = BertForMaskedLM(
        BertConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    )
    bert.save_pretrained(tmp_path / "bert")
    options = dict(task="mlm", encoding="t5", steps=2, init_from=str(tmp_path / "bert"))
    train(settings(data, tmp_path / "from-bert", **options))
    new = json.loads((tmp_path / "from-bert" / "run.json").read_text())["model"]["new_weights"]
    assert new and all("encodings" in name for name in new)
    with pytest.raises(UserError, match="--task clm starts from relpos or gpt2"):
        train(settings(data, tmp_path / "wrong", init_from=str(tmp_path / "bert")))


def test_several_encodings_are_compared(data, tmp_path):
    out = tmp_path / "all"
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no"}
    folders = train(settings(data, out, encoding="alibi,t5:buckets=16,rope", steps=4, overrides=changes))
    assert [f.name for f in folders] == ["alibi", "t5-buckets-16", "rope"]
    with open(out / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["encoding"] for row in rows] == ["alibi", "t5:buckets=16", "rope"]
    for row, folder in zip(rows, folders):
        run = json.loads((folder / "run.json").read_text())
        assert float(row["validation loss"]) == pytest.approx(run["validation_loss"], abs=1e-4)
        assert run["settings"]["seed"] == 3 and run["data"]["fingerprint"]
    table = (out / "comparison.md").read_text().splitlines()
    assert len(table) == 5 and table[0].startswith("| encoding |")
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="twice"):
        train(settings(data, out, encoding="alibi,alibi"))


def test_any_trainer_argument_can_be_overridden(data, tmp_path):
    overrides = parse_overrides(["lr_scheduler_type=constant", "learning_rate=0.003", "weight-decay=0", "max_steps=3"])
    assert overrides == {"lr_scheduler_type": "constant", "learning_rate": 0.003, "weight_decay": 0, "max_steps": 3}
    train(settings(data, tmp_path / "run", steps=None, overrides=overrides))
    assert [x["learning_rate"] for x in lines(tmp_path / "run")] == [0.003] * 3
    with pytest.raises(UserError, match="Did you mean 'learning_rate'"):
        parse_overrides(["learnin_rate=1"])
    with pytest.raises(UserError, match="key=value"):
        parse_overrides(["bf16"])
    with pytest.raises(UserError, match="Did you mean 'hidden_size'"):
        parse_config(["hiden_size=8"])
    with pytest.raises(UserError, match="refuses these settings .*optim.*: adamwhat"):
        train(settings(data, tmp_path / "x", overrides={"optim": "adamwhat"}))
    assert not (tmp_path / "x").exists()


def test_recipe_of_the_presets():
    for name in ("tiny", "small", "medium"):
        p = presets.PRESETS[name]
        assert (p.length, p.tokens_per_step, p.warmup, p.learning_rate) == (1024, 524_288, 750, 6e-4)
        for processes in (1, 8, 64):
            assert shape(1024, 524_288, p.rows, processes).tokens_per_step == 524_288
    args = presets.arguments(
        out="x", base=p, spread=shape(1024, 524_288, 16, 1), steps=19_073, warmup=750, learning_rate=6e-4, seed=0,
        cuda=False, bf16=False, compiled=False, fsdp=False, evaluates=True, overrides={},
    )  # fmt: skip
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert args.max_grad_norm == 1.0 and args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert args.logging_nan_inf_filter is False  # it would read every loss back from the GPU


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_saved_model_keeps_its_cache(task, data, tmp_path):
    """The Trainer turns it off, for the training."""
    train(settings(data, tmp_path / "run", steps=2, task=task, overrides={"save_steps": 1}))
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    if task == "clm":
        ids = torch.zeros(1, 3, dtype=torch.int64)
        assert RelPosForCausalLM.from_pretrained(tmp_path / "run").eval()(ids).past_key_values is not None


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "cosine_warmup_with_min_lr"])
def test_other_schedules(kind, data, tmp_path):
    train(settings(data, tmp_path / "run", steps=3, overrides={"lr_scheduler_type": kind}))
    assert len(lines(tmp_path / "run")) == 3


# CUDA graphs.


def _mode(cuda: bool = True, compiled: bool = True, fsdp: bool = False, processes: int = 1, **overrides) -> str | None:
    args = presets.arguments(
        out="x", base=presets.PRESETS["nano"], spread=shape(256, 1024, 16, processes), steps=3, warmup=1,
        learning_rate=1e-3, seed=0, cuda=cuda, bf16=False, compiled=compiled, fsdp=fsdp, evaluates=False,
        overrides=overrides,
    )  # fmt: skip
    return args.torch_compile_mode if args.torch_compile else "not compiled"


def _no_graphs_here() -> None:
    assert _mode(processes=2, use_cpu=True) is None


def test_one_gpu_gets_cuda_graphs_and_an_override_wins(tmp_path):
    assert _mode() == _mode(compiled=False, torch_compile=True) == "reduce-overhead"
    assert _mode(torch_compile_mode="default") == "default"
    assert _mode(torch_compile=False) == _mode(compiled=False) == "not compiled"
    assert _mode(torch_compile_backend="eager") is _mode(cuda=False) is _mode(fsdp=True) is None
    together(_no_graphs_here, folder=tmp_path)


class Reused:
    """A compiler that hands its results out as CUDA graphs do: in the same memory every time, which the next pass
    writes all over."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, graph, inputs):
        return aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)(graph, inputs)

    def forward(self, graph, inputs):
        run = self.backward(graph, inputs)

        def spoiling(*given):
            for kept in self.kept:
                if kept.is_floating_point():
                    kept.fill_(math.nan)
            return run(list(given))

        return make_boxed_func(spoiling)

    def backward(self, graph, inputs):
        mine: list[torch.Tensor | None] = []

        def run(*given):
            results = graph(*given)
            if not mine:  # what is handed through, a parameter say, is not ours
                ours = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
                for x in results:
                    fresh = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in ours
                    mine.append(torch.empty_like(x) if fresh else None)
                self.kept += [x for x in mine if x is not None]
            return [x if kept is None else kept.copy_(x).detach() for x, kept in zip(results, mine, strict=True)]

        return make_boxed_func(run)


def test_what_outlives_a_pass_is_a_copy(data, tmp_path, monkeypatch):
    """With graphs the losses, norms and weights are those of a run without, bit for bit, whatever the passes a step."""
    real = torch.compile

    def run(name: str, rows: int, mode: str, reused: bool = True) -> list:
        backend = Reused() if reused else "aot_eager"
        monkeypatch.setattr(torch, "compile", lambda model, **kwargs: real(model, backend=backend))
        torch._dynamo.reset()
        changes = {"torch_compile": True, "torch_compile_mode": mode, "eval_strategy": "steps", "eval_steps": 2}
        train(settings(data, tmp_path / name, rows=rows, steps=5, overrides=changes))
        held = (tmp_path / name / "validation.jsonl").read_text()
        weights = load_file(tmp_path / name / "model.safetensors")
        return [lines(tmp_path / name), held, {key: value.tolist() for key, value in weights.items()}]

    for rows in (8, 2):  # one pass a step, and four
        expected = run(f"plain-{rows}", rows, "default", reused=False)
        assert run(f"graphs-{rows}", rows, "reduce-overhead") == expected
    assert run("careless", 2, "default") != expected  # the memory is really written over


def test_a_gradient_that_comes_late_is_a_copy_too(data, tmp_path, monkeypatch):
    """An encoding that only the later passes of a step use: their gradients add up as without graphs."""
    from relpos.encodings.kerple import Kerple

    real, terms = torch.compile, Kerple.terms
    monkeypatch.setattr(Kerple, "late", False, raising=False)
    monkeypatch.setattr(Kerple, "terms", lambda self, ctx: terms(self, ctx) if self.late else [])

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            Kerple.late = False

        def on_substep_end(self, args, state, control, **kwargs):
            Kerple.late = True

    def run(name: str, backend) -> list:
        monkeypatch.setattr(torch, "compile", lambda model, **kwargs: real(model, backend=backend))
        torch._dynamo.reset()
        changes = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
        train(settings(data, tmp_path / name, rows=2, steps=3, overrides=changes), callbacks=[Turns()])
        weights = load_file(tmp_path / name / "model.safetensors")
        return [lines(tmp_path / name), {key: value.tolist() for key, value in weights.items()}]

    assert run("graphs", Reused()) == run("plain", "aot_eager")


def test_a_skipped_step_is_no_mistake(data, tmp_path, monkeypatch):
    """As with float16, whose gradients overflow now and then: the optimizer leaves such a step out."""
    from accelerate.optimizer import AcceleratedOptimizer

    from relpos.training.trainer import RelPosTrainer

    norm, skipped = RelPosTrainer._get_grad_norm, []

    def overflowing(self, model, grad_norm=None):
        norm(self, model, grad_norm)
        skipped.append(self.state.global_step in (0, 2))
        self._norm_of_step = math.inf if skipped[-1] else self._norm_of_step

    monkeypatch.setattr(RelPosTrainer, "_get_grad_norm", overflowing)
    monkeypatch.setattr(AcceleratedOptimizer, "step_was_skipped", property(lambda self: bool(skipped and skipped[-1])))
    train(settings(data, tmp_path / "run", steps=4))
    assert [line["grad_norm"] is None for line in lines(tmp_path / "run")] == [True, False, True, False]


# Mistakes.


def test_mistakes_leave_nothing_behind(data, tmp_path):
    def fails(match: str, **changes) -> None:
        with pytest.raises(UserError, match=match):
            train(settings(data, tmp_path / "never", **changes))
        assert not (tmp_path / "never").exists()

    fails("no encoding 'kerpl'", encoding="kerpl")
    fails("no size 'smal'.*Did you mean 'small'", size="smal")
    fails("clm or mlm", task="lm")
    fails("no whole number of windows of 33", length=33)
    fails("do not divide into batches of 3", rows=3)
    fails("fewer than one window", length=1 << 20, tokens_per_step=1 << 20)
    fails("--vocab-size 100 is too small", vocab_size=100)
    fails("at least one step", steps=-1)
    fails("at least one step", steps=0)
    fails("length must be a whole number from 1 on, not 0", length=0)
    fails("rows must be a whole number from 1 on, not 0", rows=0)
    fails("learning rate must be above 0, not -1", learning_rate=-1.0)
    fails("learning rate must be above 0, not nan", learning_rate=math.nan)
    fails("warm-up must be 0 or more", warmup=-1)
    fails("seed must be from 0", seed=-1)
    fails("the memory of this machine does not hold", vocab_size=10**14)
    fails("intermediate_size must be a positive", config={**SMALL, "intermediate_size": 0})
    fails("initializer_range must be 0 or more", config={**SMALL, "initializer_range": -1})
    fails(r"the Trainer refuses these settings \(.*adam_beta1.*Invalid beta", overrides={"adam_beta1": 2})
    fails(r"the Trainer refuses these settings .*wandb", overrides={"report_to": "wandb"})
    fails(r"the Trainer refuses these settings .*unexpected keyword", overrides={"lr_scheduler_kwargs": {"best": 1}})
    fails("save_only_model leaves out the optimizer", overrides={"save_only_model": True})
    fails("num_train_epochs must be a number, not 'x'", steps=None, overrides={"num_train_epochs": "x"})
    fails("scale must be a number above 0, not 'abc'", config={**SMALL, "scale": "abc"})
    fails("is no folder with a model", init_from=str(tmp_path / "nowhere"))
    fails("table of 16 positions.*max_positions=32", encoding="learned:max_positions=16")
    fails("heads do not divide", config={**SMALL, "num_attention_heads": 5})
    with pytest.raises(UserError, match="windows a step do not divide among 3"):
        shape(32, 256, 8, 3)
    small = RelPosForCausalLM(RelPosConfig.preset("nano", "kerple", **SMALL, vocab_size=64))
    small.save_pretrained(tmp_path / "small")
    fails("is too small: 64", init_from=str(tmp_path / "small"))
    other = tmp_path / "other"
    RelPosForCausalLM(RelPosConfig.preset("nano", "kerple", **SMALL)).save_pretrained(other)
    tokenizer.load("bpe:300", ["some text to learn from " * 50]).save(other)
    fails("is not the one that made", init_from=str(other))


def test_mistakes_in_the_data_folder(data, tmp_path):
    bad = tmp_path / "bad"
    for match, change in (
        ("is missing", lambda: (bad / "train-00000.bin").unlink()),
        ("is truncated", lambda: os.truncate(bad / "train-00000.bin", 1000)),
        ("checksum", lambda: (bad / "train-00000.bin").write_bytes(b"\7" * (bad / "train-00000.bin").stat().st_size)),
        ("not written by", lambda: (bad / "index.json").unlink()),
    ):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(data, bad)
        change()
        with pytest.raises(UserError, match=match):
            train(settings(bad, tmp_path / "never"))
        assert not (tmp_path / "never").exists()


def test_mistakes_with_the_run_folder(data, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError, match="no run in"):
        train(settings(data, out), resume=True)
    train(settings(data, out, steps=4))
    with pytest.raises(UserError, match="already holds a run"):
        train(settings(data, out, steps=4))
    with pytest.raises(UserError, match="was started with steps=4"):
        train(settings(data, out, steps=8), resume=True)
    train(settings(data, out, steps=4), resume=True)  # complete: nothing to do
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        train(settings(data, tmp_path / "full"))
    (out / "final").mkdir()
    for name in ("notes.txt", "table.json", ".gitignore", "model_of_mine.png", "final/thesis.tex"):
        (out / name).write_text("mine")
    train(settings(data, out, steps=3), overwrite=True)
    assert len(lines(out)) == 3 and (out / "sample.txt").is_file()
    for name in ("notes.txt", "table.json", ".gitignore", "model_of_mine.png", "final/thesis.tex"):
        assert (out / name).read_text() == "mine"
    # Other data under the same name.
    shutil.rmtree(out / "checkpoint-3", ignore_errors=True)
    moved = json.loads((out / "run.json").read_text())
    moved["status"], moved["data"]["fingerprint"] = "running", "another"
    (out / "run.json").write_text(json.dumps(moved))
    with pytest.raises(UserError, match="fingerprint differs"):
        train(settings(data, out, steps=3), resume=True)


def test_a_resumed_run_takes_the_same_steps(data, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    out = tmp_path / "run"
    start = settings(data, out, steps=8, overrides={"learning_rate": 1e-3})
    with pytest.raises(KeyboardInterrupt):
        train(start, callbacks=[Stop()])
    before = (out / "run.json").read_text()
    with pytest.raises(UserError, match="with 256 tokens a step, and 2 windows of 32 tokens, 1 times on 1 .* are 64"):
        train(dataclasses.replace(start, rows=2, overrides={"gradient_accumulation_steps": 1}), resume=True)
    with pytest.raises(UserError, match="--steps 8 and --set max_steps=20 contradict each other"):
        train(dataclasses.replace(start, overrides={"max_steps": 20}), resume=True)
    assert (out / "run.json").read_text() == before
    train(dataclasses.replace(start, data=None, rows=2, overrides={"logging_steps": 2}), resume=True)
    found = lines(out)
    assert [line["tokens"] for line in found] == [256 * n for n in range(1, 9)]
    assert max(line["learning_rate"] for line in found[5:]) > 1e-4  # as set at the start


def test_the_best_model_is_the_one_described(data, tmp_path):
    """A run that gets worse, and ends with an earlier checkpoint's weights."""

    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += torch.randn_like(parameter)

    out = tmp_path / "run"
    changes = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4}
    train(settings(data, out, steps=8, overrides=changes), callbacks=[Spoil()])
    tested = [json.loads(line)["loss"] for line in (out / "validation.jsonl").read_text().splitlines()]
    assert tested[1] > tested[0] + 1
    assert json.loads((out / "run.json").read_text())["validation_loss"] == pytest.approx(tested[0], rel=1e-6)


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_a_short_table_ends_with_a_short_sample(data, tmp_path, task):
    out = tmp_path / "run"
    train(settings(data, out, steps=2, task=task, encoding="learned:max_positions=33"))
    assert json.loads((out / "run.json").read_text())["status"] == "complete" and (out / "sample.txt").is_file()


def test_a_damaged_record_is_said(data, tmp_path):
    out = tmp_path / "run"
    train(settings(data, out, steps=2))
    run = json.loads((out / "run.json").read_text()) | {"status": "running"}
    (out / "run.json").write_text(json.dumps(run))
    (out / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: .*'no JSON'"):
        train(settings(data, out, steps=2), resume=True)
    for text in ("{", "[]", "{}"):
        (out / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run.json is damaged"):
            train(settings(data, out, steps=2), resume=True)


def test_a_run_of_one_step_has_no_speed(data, tmp_path):
    train(settings(data, tmp_path / "run", steps=1))
    text = (tmp_path / "run" / "run.json").read_text()
    assert json.loads(text)["tokens_per_second"] is None and "NaN" not in text


def test_command(data, tmp_path):
    """The command itself: plain lines in a log, one clear message and status 2 for a mistake."""
    command = [sys.executable, str(ROOT / "relpos_cli.py"), "train", "--data", str(data), "--length", "32"]
    command += ["--steps", "2", "--tokens-per-step", "128"]
    command += ["--config", "hidden_size=24", "--config", "num_hidden_layers=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    out = str(tmp_path / "run")
    done = subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == out and "step 2/2" in done.stderr and "\x1b[" not in done.stderr
    assert "relpos_cli.py train" in json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    wrong = subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "already holds a run" in wrong.stderr and "Traceback" not in wrong.stderr
