"""The pictures: their numbers, their tick labels, their blank cells, and mistakes."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.testing.compare import compare_images

import relpos
import relpos_cli
from relpos import capture, encodings, figures
from relpos.data import tokenizer as tokenizers
from relpos.figures import maps as drawing
from relpos.figures import sources, style
from relpos.models import RelPosConfig, RelPosForCausalLM

STORED = Path(__file__).parent / "stored"
# The colour-bar ticks printed in figure 12 of the CABLE paper, minus signs left out: first, last, step, decimals.
FIGURE_12 = [
    (0, 300, 50, 0), (0, 200, 25, 0), (0, 120, 20, 0), (0, 80, 10, 0), (0, 50, 10, 0), (0, 30, 5, 0),
    (0, 20, 2.5, 1), (0, 12, 2, 0), (0, 7, 1, 0), (0, 5, 1, 0), (0, 3, 0.5, 1), (0, 1.75, 0.25, 2),
]  # fmt: skip


def labels(bar) -> list[str]:
    """The tick labels a reader sees: those between the ends of the bar."""
    bar.figure.draw_without_rendering()
    low, high = bar.get_ylim()
    shown = [(at, text.get_text()) for at, text in zip(bar.get_yticks(), bar.get_yticklabels(), strict=True)]
    return [text for at, text in shown if low <= at <= high]


def panels(fig) -> list[tuple]:
    """(map, colour bar) of each head."""
    return list(zip(fig.axes[0::2], fig.axes[1::2], strict=True))


def test_alibi_has_the_tick_labels_of_the_papers_figure_12():
    fig = relpos.figure("alibi:slopes=geometric")
    found = panels(fig)
    assert [ax.get_title() for ax, _ in found] == [f"Head {h}" for h in range(1, 13)]
    for (_, bar), (first, last, step, decimals) in zip(found, FIGURE_12, strict=True):
        count = round((last - first) / step) + 1
        expected = sorted((f"{first + step * n:.{decimals}f}" for n in range(count)), key=float, reverse=True)
        assert [label.replace("−", "") for label in labels(bar)] == expected


def test_layout_of_the_paper():
    fig = relpos.figure("kerple")
    ax, bar = panels(fig)[0]
    boxes = [ax.get_position() for ax, _ in panels(fig)]
    assert len({round(box.y0, 6) for box in boxes}) == 4 and len({round(box.x0, 6) for box in boxes}) == 3
    assert [t for t in ax.get_xticks() if 0 <= t <= 511] == [0, 100, 200, 300, 400, 500]
    assert bar.get_position().height * fig.get_figheight() >= 2.7


def test_masked_cells_are_blank_and_zero_is_not():
    ax, _ = panels(relpos.figure("kerple", length=32))[0]
    (image,) = ax.get_images()
    cells = image.get_array()
    above = np.triu(np.ones((32, 32), bool), 1)
    assert np.array_equal(np.ma.getmaskarray(cells), above)
    colours = image.cmap(image.norm(cells))
    assert (colours[above][:, 3] == 0).all() and (colours[~above][:, 3] == 1).all()
    norm, cmap = style.colours(-1, 1, "bias", True)
    assert min(cmap(norm(0.0))[:3]) < 0.95  # zero is grey, so that it cannot be taken for blank


# Numbers.


@pytest.mark.parametrize("spec", ["kerple", "alibi:slopes=geometric", "t5:form=clipped"])
def test_sidecar_is_bias_matrix(spec, tmp_path):
    written = figures.write([spec], out=tmp_path, format="png", length=96)
    name = encodings.slug(spec)
    assert sorted(path.name for path in written) == [f"{name}.npz", f"{name}.png"]
    numbers = np.load(tmp_path / f"{name}.npz")
    expected = relpos.bias_matrix(capture.from_spec(spec).encoding(0), 96)
    assert numbers["bias"].dtype == np.float32 and np.array_equal(numbers["bias"], expected.detach().numpy())
    assert np.isneginf(numbers["bias"][:, 0, 1:]).all()
    assert json.loads(str(numbers["provenance"]))["encoding"] == spec


def test_rope_scores_alone():
    """On q = k = 1 the score is the sum of the cosines, 2 / sqrt(D) times."""
    made = figures.collect(capture.from_spec("rope", length=64), figures.Options())
    assert made.kind == "scores"
    d = np.arange(64)[:, None] * 10000 ** (-2 * np.arange(32) / 64)
    expected = 2 * np.cos(d).sum(1) / 8
    np.testing.assert_allclose(made.array()[3, 63, ::-1], expected, atol=1e-4)


@pytest.mark.parametrize("length, pixels", [(100, 30), (64, 32), (33, 33)])
def test_downsampled_pixels_are_block_means_and_the_range_is_the_full_one(length, pixels):
    held = capture.from_spec("cable", length=length)
    made = figures.collect(held, figures.Options(length=length), pixels=pixels)
    whole = held.map("bias").double().numpy()
    block = math.ceil(length / pixels)
    assert made.block == block
    for a in range(made.values.shape[1]):
        for b in range(made.values.shape[2]):
            cells = whole[:, a * block : (a + 1) * block, b * block : (b + 1) * block].reshape(12, -1)
            seen = np.isfinite(cells[0])
            if seen.any():
                np.testing.assert_allclose(made.values[:, a, b], cells[:, seen].mean(1), rtol=1e-4, atol=1e-5)
            else:
                assert np.isnan(made.values[:, a, b]).all()
    finite = np.where(np.isfinite(whole), whole, np.nan)
    np.testing.assert_allclose(made.low, np.nanmin(finite, (1, 2)), rtol=1e-6)
    np.testing.assert_allclose(made.high, np.nanmax(finite, (1, 2)), atol=1e-6)
    assert ("mean of" in made.caption) == (block > 1)


def test_a_long_map_stays_small():
    made = figures.collect(capture.from_spec("alibi", length=4096), figures.Options(length=4096, heads="8"))
    assert made.values.shape == (1, 1024, 1024) and made.block == 4
    np.testing.assert_allclose(made.low, [-4095 / 256])


def test_profile_of_alibi_is_a_line_and_of_cable_a_band(tmp_path):
    figures.write(["alibi", "cable"], out=tmp_path, view="profile", length=64, format="svg")
    numbers = np.load(tmp_path / "alibi-profile.npz")
    slopes = -numbers["mean"][:, 1]
    np.testing.assert_allclose(numbers["mean"], -slopes[:, None] * np.arange(64), rtol=1e-6)
    assert (numbers["spread"] == 0).all() and numbers["distances"].tolist() == list(range(64))
    numbers = np.load(tmp_path / "cable-profile.npz")
    whole = capture.from_spec("cable", length=64).map("bias").numpy()
    for d in (0, 1, 30, 63):
        along = np.stack([np.diagonal(head, -d) for head in whole])
        np.testing.assert_allclose(numbers["mean"][:, d], along.mean(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(numbers["spread"][:, d], along.std(1), rtol=1e-3, atol=1e-4)


def test_window_and_entropy_of_uniform_attention(tmp_path):
    """A flat bias spreads the weight evenly: 90% of i + 1 keys, entropy ln(i + 1)."""
    flat = capture.from_spec("t5", length=40, heads=2)
    flat.layers[0].terms[0].values.zero_()
    figures.write([flat], out=tmp_path, view="window", format="png")
    numbers = np.load(tmp_path / "t5-window.npz")
    i = np.arange(20, 40)
    np.testing.assert_allclose(numbers["entropy"][1], np.log(i + 1), rtol=1e-5)
    assert np.abs(numbers["window"][0] - 0.9 * (i + 1)).max() <= 1


def test_difference(tmp_path):
    figures.write(["alibi", "alibi:slopes=geometric"], out=tmp_path, view="difference", length=32, format="png")
    numbers = np.load(tmp_path / "alibi-slopes-geometric-minus-alibi.npz")
    a, b = (relpos.bias_matrix(s, 32).numpy() for s in ("alibi", "alibi:slopes=geometric"))
    seen = np.tri(32, dtype=bool)
    np.testing.assert_allclose(numbers["difference"][:, seen], b[:, seen] - a[:, seen], atol=1e-5)
    assert np.isneginf(numbers["difference"][:, ~seen]).all()


# Models.


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two checkpoints, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "small-run"
    for step, seed in ((10, 0), (20, 1)):
        torch.manual_seed(seed)
        config = RelPosConfig(
            vocab_size=300, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, encoding="kerple:share=false"
        )
        model = RelPosForCausalLM(config)
        model.save_pretrained(folder / f"checkpoint-{step}")
        tokenizers.load("bytes").save(folder / f"checkpoint-{step}")
    model.save_pretrained(folder)
    tokenizers.load("bytes").save(folder)
    return folder


def test_any_layer_any_heads_any_kind(run, tmp_path):
    figures.write([run], out=tmp_path, layer=0, heads="2,5-6", kind="weights", length=48, format="png")
    numbers = np.load(tmp_path / "small-run-layer-0-weights.npz")
    assert numbers["heads"].tolist() == [2, 5, 6] and numbers["tokens"].shape == (48,)
    weights = np.where(np.isneginf(numbers["weights"]), 0, numbers["weights"])
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    model = RelPosForCausalLM.from_pretrained(run)
    with torch.no_grad():
        own = model(torch.tensor(numbers["tokens"][None]).long(), output_attentions=True).attentions[0][0]
    np.testing.assert_allclose(weights, own[[1, 4, 5]].numpy(), atol=1e-5)


def test_the_same_heads_through_training(run, tmp_path):
    figures.write([run], out=tmp_path, checkpoints=True, heads="1,2", length=32, format="png")
    numbers = np.load(tmp_path / "small-run-training.npz")
    assert numbers["steps"].tolist() == [10, 20] and numbers["bias"].shape == (2, 2, 32, 32)
    for index, step in enumerate((10, 20)):
        model = RelPosForCausalLM.from_pretrained(run / f"checkpoint-{step}")
        own = relpos.bias_matrix(model.base_model.encodings[-1], 32)
        np.testing.assert_array_equal(numbers["bias"][index], own[:2].detach().numpy())


def test_a_checkpoint_that_is_not_whole_is_not_drawn(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-20" / "checkpoint.json").write_text('{"files": {"model.safetensors": 1}}')
    figures.write([tmp_path / "run"], out=tmp_path, checkpoints=True, heads="1", length=16, format="png")
    assert np.load(tmp_path / "run-training.npz")["steps"].tolist() == [10]


def test_a_model_in_memory_and_a_capture_file(run, tmp_path):
    model = RelPosForCausalLM.from_pretrained(run)
    fig = relpos.figure(model, length=32)
    assert isinstance(fig, matplotlib.figure.Figure) and len(panels(fig)) == 6
    path = capture.from_model(run, length=32).save(tmp_path / "mine.safetensors")
    written = figures.write([path], out=tmp_path, format="svg")
    assert [p.name for p in written] == ["mine.svg", "mine.npz"]


# What ships.


def test_what_ships(tmp_path):
    files = sources.shipped()
    # q and k of one layer of GPT-2 Small are 1.5 MB, and three of the eight hold them.
    assert len(files) == 8 and sum(file.stat().st_size for file in files) < 7 << 20
    for file, spec in zip(files, sources.PAPER, strict=True):
        held = capture.load(file)
        assert held.length == 512 and held.heads == 12 and held.specs[0] == spec
        assert held.parameters or not held.encoding(0).parameter_count()
        for fact in ("model", "recipe", "data", "steps", "perplexity", "commit", "text"):
            assert held.provenance.get(fact), f"{file.name} does not say its {fact}"
        cells = held.map("bias" if held.has_bias() else "scores")
        assert cells.shape == (12, 512, 512) and bool(cells.isneginf().sum() == 12 * 512 * 511 // 2)


def test_shipped_text_is_long_enough():
    from relpos.capture.model import TEXT

    assert len(TEXT.read_text(encoding="utf-8").split()) > 800  # over a thousand tokens of GPT-2


# Pictures.


def test_picture_is_as_stored(tmp_path):
    """Against a stored picture, with a tolerance for other versions of matplotlib and FreeType. To renew it, delete the
    file, run this test and look at the new one."""
    held = capture.from_spec("kerple", length=128, heads=4)
    held.parameters = {"0.p": torch.tensor([0.5, 1.0, 1.5, 2.0]), "0.a": torch.tensor([1.0, 0.5, 0.2, 0.1])}
    held.layers = {}
    held.provenance = {"note": "stored picture"}
    made = tmp_path / "picture.png"
    relpos.figure(held).savefig(made, dpi=50)
    stored = STORED / "figure-kerple.png"
    if not stored.exists():
        stored.write_bytes(made.read_bytes())
        pytest.fail(f"there was no {stored.name}: it is written now, look at it")
    assert compare_images(str(stored), str(made), tol=8) is None


def test_picture_catches_a_shift(tmp_path):
    """The comparison above can fail: another encoding is far off its tolerance."""
    held = capture.from_spec("alibi", length=128, heads=4)
    held.provenance = {"note": "stored picture"}
    made = tmp_path / "picture.png"
    relpos.figure(held).savefig(made, dpi=50)
    stored = tmp_path / "stored.png"
    stored.write_bytes((STORED / "figure-kerple.png").read_bytes())
    assert compare_images(str(stored), str(made), tol=8) is not None


def test_a_notebook_sees_a_picture():
    assert relpos.figure("alibi", length=16, heads="1")._repr_png_()[:4] == b"\x89PNG"


def test_colours():
    norm, cmap = style.colours(-3, 0, "bias", False)
    assert cmap.name == style.SEQUENTIAL and (norm.vmin, norm.vmax) == (-3, 0)
    norm, cmap = style.colours(-3, 1, "bias", True)
    assert (norm.vmin, norm.vmax) == (-3, 3)  # zero in the middle where signs matter
    for signed in (False, True):
        assert style.colours(0, 0, "bias", signed)[0].vmin < 0  # a flat map is no division by zero
    assert style.signs_matter(np.array([-1.0, 0.0]), np.array([0.0, 2.0]))  # between heads
    assert style.signs_matter(np.array([-1.0]), np.array([0.2])) and not style.signs_matter(
        np.array([-1.0]), np.array([0.01])
    )


def test_diverging_colours_are_even_and_mirror_each_other():
    """Lightness falls in equal steps from the middle to both ends (in CIE L*, not the space they were made in)."""
    rgb = style.DIVERGING(np.linspace(0, 1, 65))[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    light = np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)
    steps = np.diff(light)
    assert (steps[:32] > 0.8).all() and (steps[32:] < -0.8).all()
    assert np.abs(steps[:32] / steps[:32].mean() - 1).max() < 0.25


def test_shared_range():
    own = relpos.figure("alibi", length=32)
    one = relpos.figure("alibi", length=32, shared=True)
    assert len({bar.get_ylim() for _, bar in panels(own)}) == 12
    assert len({bar.get_ylim() for _, bar in panels(one)}) == 1


def test_contact_sheet_of_several():
    fig = relpos.figure("alibi", "kerple", length=32)
    assert len(fig.axes) == 24


def test_bidirectional_model_draws_both_triangles():
    made = capture.from_spec("alibi", length=16, causal=False)
    cells = figures.collect(made, figures.Options()).array()
    assert np.isfinite(cells).all() and np.allclose(cells, cells.transpose(0, 2, 1))


# Mistakes.


def command(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["figure", *arguments])
    return stop.value.code, capsys.readouterr().err


def test_mistakes_get_one_message(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("a few words")
    cases = [
        (["alibl"], "Did you mean 'alibi'"),
        (["alibi", "--heads", "13"], "no head 13"),
        (["alibi", "--heads", "0"], "no head 0"),
        (["alibi", "--heads", "first"], "1,3,5-8"),
        (["alibi", "--heads", "1-99999999999"], "no head 13"),
        (["alibi", "--kind", "scores"], "draw them from a model"),
        (["cable", "--text", "nowhere.txt"], "no text file 'nowhere.txt'"),
        (["alibi", "--length", "32", "--out", "short.txt"], "cannot write"),
        (["alibi", "--layer", "3"], "no layer 3"),
        (["alibi", "--kind", "biass"], "Did you mean 'bias'"),
        (["alibi", "--format", "gif"], "no picture format 'gif'"),
        (["alibi", "--view", "map"], "Did you mean 'maps'"),
        (["alibi", "--length", "20000"], "between 1 and 16384"),
        (["rope", "--kind", "bias"], "adds nothing to the scores"),
        (["none"], "nothing to draw"),
        (["./nowhere"], "no file or folder './nowhere'"),
        (["nowhere.safetensors"], "no file or folder"),
        (["empty"], "holds no model"),
        (["alibi", "--view", "difference"], "takes two sources"),
        (["alibi", "--checkpoints"], "run folder with checkpoints"),
        (["empty", "--checkpoints"], "no checkpoints"),
        ([str(run), "--text", "short.txt"], "short.txt has 11 tokens"),
        (["alibi", "--length", "32", "--out", "/proc/relpos"], "cannot write"),
        (["alibi", "--text", "short.txt"], "no source reads a text"),
        (["alibi", "--view", "window", "--kind", "bias"], "those of the weights, not of bias"),
        (["alibi", "--view", "profile", "--shared"], "not for view 'profile'"),
        (["alibi", "--view", "profile", "--checkpoints"], "not as view 'profile'"),
        (["t5:scale=1e39", "--length", "32"], "hold NaN or infinity"),
        (["t5:scale=1e39", "--length", "32", "--view", "profile"], "hold NaN or infinity"),
        (["t5:scale=1e39", "--length", "32", "--view", "window"], "hold NaN or infinity"),
    ]
    for arguments, words in cases:
        status, err = command(capsys, *arguments)
        assert status == 2 and words in err and len(err.strip().splitlines()) == 1, (arguments, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "short.txt"]  # nothing half-written


def test_two_sources_of_one_name_do_not_overwrite_each_other(tmp_path):
    a, b = capture.from_spec("alibi", length=16), capture.from_spec("alibi", length=24)
    written = figures.write([a, b], out=tmp_path, format="png")
    assert [p.name for p in written] == ["contact-sheet.png", "alibi.png", "alibi.npz", "alibi-2.png", "alibi-2.npz"]

    c = capture.from_spec("kerple", length=16)
    c.name = "alibi-2"
    written = figures.write([a, b, c], out=tmp_path, format="png")
    assert len({p.name for p in written}) == len(written) == 7


def small(encoding: str, length: int = 16, **more) -> capture.Capture:
    """The capture of a model, q and k included."""
    sizes = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    model = RelPosForCausalLM(RelPosConfig(**sizes, encoding=encoding, **more)).eval()
    return capture.from_model(model, tokens=torch.arange(3, 3 + length), length=length, content=True)


def test_weights_without_q_and_k_are_said_to_be_of_the_bias_alone(tmp_path):
    held = small("kerple", 32)
    bare = capture.from_spec("kerple", length=32, heads=held.heads)
    alone = "of the bias alone, without content"
    for length, view in [(32, "maps"), (32, "profile"), (32, "window"), (64, "maps"), (64, "profile"), (64, "window")]:
        options = figures.Options(kind="weights", length=length, view=view)
        (drawn,) = figures._draw([held], options)
        said = " ".join(text.get_text() for text in drawn.fig.texts).replace("\n", " ")
        assert (alone in said) == (length == 64), (length, view)
    (drawn,) = figures._draw([held, bare], figures.Options(kind="weights", view="difference"))
    assert drawn.maps.caption.count(alone) == 1 and drawn.maps.caption.index(alone) > drawn.maps.caption.index("Second")
    with pytest.raises(relpos.UserError, match="holds q and k of 32 tokens; scores of 64 need a new one"):
        relpos.figure(held, kind="scores", length=64)


def test_the_caption_of_scores_says_their_scale():
    held = small("t5", scale=1.0)
    assert "Scores 1 q.k after" in figures.collect(held, figures.Options(kind="scores")).caption
    held = small("t5")
    assert "Scores q.k/sqrt(D) after" in figures.collect(held, figures.Options(kind="scores")).caption


def test_differences_of_two_kinds_are_two_files(tmp_path):
    pair = [small("kerple"), small("kerple")]
    pair[0].name, pair[1].name = "a", "b"
    written = [figures.write(pair, out=tmp_path, view="difference", kind=kind) for kind in ("bias", "scores")]
    assert written[0][0].name == "b-minus-a.png" and written[1][0].name == "b-minus-a-scores.png"


def test_rows_of_a_sheet_with_one_title_are_told_apart():
    fig = relpos.figure("kerple:form=power", "kerple", length=16)
    said = " ".join(text.get_text() for text in fig.texts) + " ".join(ax.get_ylabel() for ax in fig.axes)
    assert "kerple-form-power" in said


def test_a_file_or_folder_may_have_an_encodings_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alibi").write_text("notes")
    (tmp_path / "kerple").mkdir()
    assert command(capsys, "alibi", "kerple", "--length", "16", "--format", "png")[0] == 0
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["info", "kerple"])
    assert stop.value.code == 0


def test_long_specs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    factors = ";".join(["1.0299999713897705"] * 32)
    spec = f"rope:scaling=longrope,factor=4,short_factor={factors},long_factor={factors}"
    with pytest.raises(SystemExit) as stop:
        relpos_cli.main(["info", spec])
    assert stop.value.code == 0
    assert command(capsys, spec, "--length", "16", "--format", "png", "--out", "out")[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_an_encodings_file_as_the_base_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encodings, "_registered", dict(encodings._registered))
    (tmp_path / "straight.py").write_text(
        "from relpos.encodings import DistanceEncoding\n\n\nclass Straight(DistanceEncoding):\n"
        "    def by_distance(self, d):\n        return -d.abs().expand(self.heads, *d.shape)\n"
    )
    for spec in ("dape:base=./straight.py", "dape:base=straight.py"):
        assert command(capsys, spec, "--length", "16", "--format", "png") == (0, "")


def test_progress_within_a_source(tmp_path, monkeypatch):
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(figures.Progress, "__call__", lambda self, part, name: told.append((part, name)))
    monkeypatch.setattr(capture, "CELLS", 12 * 64 * 16)
    figures.write(["kerple"], out=tmp_path, length=64, format="png", progress=True)
    assert [part for part, _ in told] == [0, 0, 0.25, 0.5, 0.75, 1] and {name for _, name in told} == {"kerple"}


def test_titles_fit_the_picture():
    held = capture.from_spec("alibi", length=16)
    held.title = "a long name of a model, " * 4
    fig = relpos.figure(held, heads="1")
    fig.draw_without_rendering()
    title = fig.texts[0].get_window_extent()
    assert title.x1 <= fig.bbox.x1 and title.y1 <= fig.bbox.y1


def test_few_heads_leave_the_text_room(run):
    sheet = relpos.figure("t5", "t5:share=false", heads="1", length=16)
    steps = relpos.figure(run.parent / "small-run", checkpoints=True, heads="1", length=16)
    for fig in (sheet, steps):
        fig.draw_without_rendering()
        for text in fig.texts:
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= fig.bbox.x1, text.get_text()


def test_a_difference_of_two_encodings_names_both():
    pair = [small("cable"), small("kerple")]
    (drawn,) = figures._draw(pair, figures.Options(view="difference", length=16))
    assert drawn.maps.title == "Bias, kerple minus cable, layer 2 of 2"


def test_maps_with_one_value():
    held = capture.from_spec("cope", length=16)  # zero at its initial parameters
    drawing.draw(figures.collect(held, figures.Options())).savefig("/dev/null", format="png", dpi=20)


def test_a_dollar_sign_is_a_dollar_sign():
    """In a name or a note, where it is no mathematics, and would often be wrong as such."""
    fig = style.Figure(figsize=(2, 1))
    texts = [fig.text(0.1, 0.5, text) for text in ("costs $a_{ and $b", "$x$")]
    fig.savefig(io.BytesIO(), format="png")
    assert all(not text.get_parse_math() for text in texts)
    ax = fig.add_subplot()
    ax.set_yscale("log")
    fig.savefig(io.BytesIO(), format="png")
    labels = [label for label in ax.get_yticklabels() if label.get_text()]
    assert labels and all(label.get_parse_math() for label in labels)  # powers of ten stay mathematics


def test_one_source_where_a_list_is_expected(tmp_path):
    with pytest.raises(relpos.UserError, match=r"sources must be a list, of one too: \['alibi'\], not 'alibi'"):
        figures.write("alibi", out=tmp_path)  # not a, l, i, b, i
    with pytest.raises(relpos.UserError, match=r"of one too: \[Capture\], not Capture"):
        figures.write(capture.from_spec("alibi", length=16), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_arguments_of_the_wrong_type(tmp_path):
    encoding = encodings.build("alibi", heads=2, head_dim=8)
    for wrong in (3, None, ["alibi"], b"alibi", torch.zeros(2, 2), encoding):
        said = f"{type(wrong).__name__} is nothing that can be shown: give an encoding such as .*a folder with a model"
        with pytest.raises(relpos.UserError, match=said):
            relpos.figure("kerple", wrong, length=16, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()  # known before the first is drawn
        with pytest.raises(relpos.UserError, match=said):
            relpos.explore(wrong)
    for given, said in [
        ({"text": 3}, "text must be the name of a text file, not 3"),
        ({"heads": 1.5}, "heads are 'all' or numbers such as 1,3,5-8, not 1.5"),
        ({"heads": [None]}, "heads are 'all' or numbers"),
        ({"heads": ["x"]}, "heads are 'all' or numbers"),
        ({"kind": 3}, "there is no kind of map 3. Known: bias"),
        ({"view": None}, "there is no view None. Known: maps"),
        ({"format": 3}, "format must be names such as 'png,pdf', not 3"),
        ({"format": [3]}, "format must be names"),
        ({"out": 3}, "out must be the name of a folder, not 3"),
    ]:
        with pytest.raises(relpos.UserError, match=said):
            relpos.figure("alibi", length=16, **given)
