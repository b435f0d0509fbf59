"""The explorer's page in a real Chromium: what people do with it, and what it shows against the arrays."""

from __future__ import annotations

import json
import re
import threading
import zipfile
from collections.abc import Callable
from io import BytesIO

import httpx
import numpy as np
import pytest
import torch
from explorer_support import FLAGS, browser_path, model_folder

from relpos import explore
from relpos.explorer import Library
from relpos.explorer.export import page as exported_page
from relpos.explorer.server import Running
from relpos.files import write_text

try:
    from playwright.sync_api import Page, expect, sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

PATH = browser_path()
pytestmark = [
    pytest.mark.xdist_group("explorer"),
    pytest.mark.skipif(not (PATH and sync_playwright), reason="no Chromium, or no playwright, on this machine"),
]
LENGTH = 96
STORED = ["tests/stored/kerple.json", "tests/stored/learned.json"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    folder = tmp_path_factory.mktemp("models")
    models = [model_folder(folder / "small"), model_folder(folder / "other", "kerple:share=false", seed=1)]
    return Library([*models, "alibi", *STORED], length=LENGTH)


@pytest.fixture(scope="module")
def server(library):
    with Running(library) as url:
        yield url


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails its test when anything is written to the console or goes wrong in a script.

    A test puts into `expected` words of what the browser itself notes of a request that shall fail. Such a note may
    come before or after the page has shown the failure, so none is waited for.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    made = context.new_page()
    made.set_default_timeout(15000)
    said: list[str] = []
    made.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: said.append(str(error)))
    made.expected = []
    yield made
    context.close()
    said = [line for line in said if not any(words in line for words in made.expected)]
    assert not said, said


def until(page: Page, holds: Callable[[], bool]) -> None:
    """Wait for what the page does a moment after an event: a drawing in the next frame, an address put right later."""
    for _ in range(300):
        if holds():
            return
        page.wait_for_timeout(50)
    assert holds()


def ready(page: Page, key: str) -> None:
    """Wait until source/layer/kind/second is drawn, and the values behind the readout are there."""
    page.wait_for_selector(f'html[data-ready="{key}"]', state="attached")


def cell(page: Page, panel: str, i: int, j: int, length: int = LENGTH) -> None:
    """Point at query i and key j of a small map, and wait for the frame that shows them."""
    box = page.locator(f"{panel} .map canvas").bounding_box()
    page.mouse.move(box["x"] + (j + 0.5) / length * box["width"], box["y"] + (i + 0.5) / length * box["height"])
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def read(page: Page, kind: str, side: str = "a") -> float:
    return float(page.locator(f"#readout tr[data-side={side}] td[data-kind={kind}]").get_attribute("data-value"))


def close(found: float, whole: torch.Tensor, i: int, j: int) -> None:
    """Within 1/65535 of the head's range [T, T]."""
    seen = whole[~whole.isneginf()]
    assert abs(found - float(whole[i, j])) <= float(seen.max() - seen.min()) / 65535 + 1e-6 * abs(found)


def test_load_switch_and_hover(page, server, library):
    page.goto(server)
    ready(page, "0/2/bias/")
    expect(page.locator("#heads .panel")).to_have_count(4)
    expect(page.locator("#title")).to_contain_text("CABLE, layer 3 of 3: bias")
    held = library.sources["0"].held()
    for panel, i, j in ((0, 70, 20), (3, 95, 0), (2, 50, 50)):
        page.locator(f'#heads [data-head="{panel}"]').click()
        cell(page, f'#heads [data-head="{panel}"]', i, j)
        expect(page.locator("#readout")).to_contain_text(f"distance {i - j}")
        expect(page.locator("#readout code").first).to_have_text(held.pieces[i].replace(" ", "␣").replace("\n", "↵"))
        for kind in ("bias", "scores", "weights"):
            close(read(page, kind), held.map(kind, 2)[panel], i, j)
        # Every linked panel shows its own value.
        shown = page.locator("#heads .now").all_text_contents()
        for head, text in enumerate(shown):
            wanted = float(held.map("bias", 2)[head, i, j])
            assert float(text.replace("−", "-")) == pytest.approx(wanted, rel=2e-3, abs=2e-3)
    page.keyboard.press("ArrowLeft")
    expect(page.locator('#heads [data-head="1"]')).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("ArrowDown")
    ready(page, "0/1/bias/")
    page.keyboard.press("w")
    ready(page, "0/1/weights/")
    close(read(page, "weights"), held.map("weights", 1)[1], 50, 50)
    page.keyboard.press("Shift+ArrowDown")
    expect(page.locator("#readout")).to_contain_text("distance 1")
    close(read(page, "scores"), held.map("scores", 1)[1], 51, 50)
    expect(page.locator("#profile svg")).to_have_attribute("aria-label", re.compile("weights against distance, head 2"))


def test_unseen_cells_and_the_whole_of_a_head(page, server, library):
    """What the page holds of a head, read back from its npz, is the array."""
    page.goto(f"{server}#a=1&layer=0")
    ready(page, "1/0/bias/")
    cell(page, '#heads [data-head="0"]', 10, 60)
    expect(page.locator("#readout")).to_contain_text("not seen")
    with page.expect_download() as waiting:
        page.locator("#save-npz").click()
    with open(waiting.value.path(), "rb") as file:
        found = np.load(BytesIO(file.read()))["bias"]
    whole = library.sources["1"].held().map("bias", 0).numpy()
    assert (np.isneginf(found) == np.isneginf(whole)).all()
    for head in range(4):
        seen = ~np.isneginf(whole[head])
        found_cells, cells = found[head][seen], whole[head][seen]
        assert np.abs(found_cells - cells).max() <= (cells.max() - cells.min()) / 65535 + 1e-6


def test_downloads_are_pictures(page, server):
    page.goto(server)
    ready(page, "0/2/bias/")
    with page.expect_download() as waiting:
        page.locator("#save-png").click()
    data = open(waiting.value.path(), "rb").read()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10000
    with page.expect_download() as waiting:
        page.locator("#save-svg").click()
    text = open(waiting.value.path(), encoding="utf-8").read()
    assert text.startswith("<svg") and text.count("<image") == 8 and "Head 4" in text


def test_scale_colours_and_order(page, server, library):
    page.goto(server)
    ready(page, "0/2/bias/")
    canvas = "document.querySelector('#heads canvas').toDataURL()"
    own = page.evaluate(canvas)
    page.select_option("#shared", "1")
    ends = page.locator("#heads .ends").all_text_contents()
    assert len(set(ends)) == 1
    page.select_option("#palette", "magma")
    until(page, lambda: page.evaluate(canvas) != own)
    page.select_option("#shared", "")
    page.select_option("#sort", "window")

    def windows() -> list[int]:
        return [int(text.removeprefix("window ")) for text in page.locator("#heads b span").all_text_contents()]

    until(page, lambda: windows() == sorted(windows()))
    page.locator("#numbers-box summary").click()
    expect(page.locator("#numbers tr")).to_have_count(5)


def zoomed(page: Page) -> list[float]:
    """What the address says of the enlarged part: first key, first query, how many; nothing where all is shown."""
    said = re.search(r"zoom=([^&]+)", page.url)
    return [float(number) for number in said.group(1).replace("%2C", ",").split(",")] if said else []


def test_zoom_shows_tokens(page, server):
    page.goto(server)
    ready(page, "0/2/bias/")
    canvas = page.locator("#large canvas")
    whole = page.evaluate("document.querySelector('#large canvas').toDataURL()")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for _ in range(8):
        page.mouse.wheel(0, -100)
        page.wait_for_timeout(30)
    until(page, lambda: zoomed(page) and zoomed(page)[2] < 25)
    x, y, size = zoomed(page)
    assert 8 <= size and 0 <= x <= LENGTH - size and 0 <= y <= LENGTH - size
    until(page, lambda: page.evaluate("document.querySelector('#large canvas').toDataURL()") != whole)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 2 + 60)
    page.mouse.up()
    until(page, lambda: zoomed(page)[0] < x)
    page.locator("#zoom-reset").click()
    until(page, lambda: "zoom" not in page.url)


def test_compare_two_models(page, server, library):
    page.goto(server)
    ready(page, "0/2/bias/")
    page.select_option("#b", "1")
    ready(page, "0/2/bias/1")
    expect(page.locator("#large canvas")).to_have_count(3)
    page.locator('#heads [data-head="1"]').click()
    cell(page, '#heads [data-head="1"]', 80, 33)
    first, second = (library.sources[key].held().map("bias", 2)[1] for key in "01")
    close(read(page, "bias"), first, 80, 33)
    close(read(page, "bias", "b"), second, 80, 33)
    apart = page.locator("#readout tr[data-side=d] td").first.text_content().replace("−", "-")
    assert float(apart) == pytest.approx(float(second[80, 33] - first[80, 33]), rel=2e-3, abs=2e-3)
    page.select_option("#grid", "d")
    cell(page, '#heads [data-head="0"]', 80, 34)
    whole = [library.sources[key].held().map("bias", 2)[0, 80, 34] for key in "01"]
    difference = pytest.approx(float(whole[1] - whole[0]), rel=5e-3, abs=2e-3)
    shown = page.locator('#heads [data-head="0"] .now')
    until(page, lambda: shown.text_content() and float(shown.text_content().replace("−", "-")) == difference)
    page.select_option("#b", "2")
    expect(page.locator("#alert")).to_contain_text("heads")  # 4 and 12: no difference, and it says so
    page.select_option("#b", "")
    ready(page, "0/2/bias/")
    expect(page.locator("#alert")).to_be_hidden()


def test_playground(page, server):
    page.goto(f"{server}#view=play")
    expect(page.locator("#play-heads .panel")).to_have_count(12)
    expect(page.locator("#play-title")).to_contain_text("kerple: bias")
    canvas = "document.querySelector('#play-heads canvas').toDataURL()"
    ends = page.locator("#play-heads .ends").first
    before, drawn = ends.text_content(), page.evaluate(canvas)
    page.locator('[data-parameter="a"]').fill("3")
    expect(ends).not_to_have_text(before)
    assert page.evaluate(canvas) != drawn
    expect(page.locator('output[data-of="a"]')).to_contain_text("× 8")
    page.select_option('[data-option="form"]', "power")
    expect(page.locator("#play-title")).to_contain_text("kerple:form=power")
    page.select_option("#play-name", "none")
    expect(page.locator("#play-heads")).to_contain_text("nothing to draw")
    page.select_option("#play-name", "fire")
    expect(page.locator('[data-parameter="c"]')).to_be_visible()
    names = page.locator("#play-name option").evaluate_all("all => all.map(one => one.value)")
    from relpos import encodings

    assert names == encodings.names()
    page.expected.append("400 (Bad Request)")  # `none` has no bias


def test_a_link_reproduces_the_view(page, server, chromium):
    page.goto(server)
    ready(page, "0/2/bias/")
    page.select_option("#layer", "1")
    ready(page, "0/1/bias/")
    page.select_option("#kind", "scores")
    ready(page, "0/1/scores/")
    page.select_option("#shared", "1")
    page.locator('#heads [data-head="2"]').click()
    page.keyboard.press("+")
    cell(page, '#heads [data-head="2"]', 60, 20)
    until(page, lambda: re.search("at=60(,|%2C)20", page.url))
    url, picture = page.url, page.evaluate("document.querySelector('#large canvas').toDataURL()")
    other = page.context.new_page()
    other.goto(url)
    ready(other, "0/1/scores/")
    expect(other.locator('#heads [data-head="2"]')).to_have_attribute("aria-pressed", "true")
    assert other.locator("#readout").inner_text() == page.locator("#readout").inner_text()
    until(other, lambda: other.evaluate("document.querySelector('#large canvas').toDataURL()") == picture)
    other.goto(f"{server}#a=77&layer=q&head=-5&kind=%00&zoom=1,x&at=9e9,-1&view=zzz&play=%7B")
    expect(other.locator("#text-note")).to_contain_text("are shown")  # the first source, and its own kind
    expect(other.locator("#alert")).to_be_hidden()
    other.close()


def test_a_link_to_sources_this_page_does_not_have(page, server):
    page.goto(f"{server}#a=99&b=98")
    ready(page, "0/2/bias/")
    expect(page.locator("#text-note")).to_contain_text("does not have")


def test_a_typed_text(page, server, library):
    page.goto(server)
    ready(page, "0/2/bias/")
    page.fill("#text", "one two one two one two")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#title")).to_contain_text("23 tokens")
    expect(page.locator("#text-note")).to_contain_text("23 tokens in")
    page.wait_for_selector('html[data-ready^="t"]', state="attached")
    cell(page, '#heads [data-head="0"]', 20, 4, length=23)
    made = library.sources["0"].read("one two one two one two")
    close(read(page, "weights"), made.map("weights", 2)[0], 20, 4)
    expect(page.locator("#readout code").first).to_have_text("t")
    until(page, lambda: "text=" in page.url)
    again = page.context.new_page()
    again.goto(page.url)  # a link reads the text again
    expect(again.locator("#title")).to_contain_text("23 tokens")
    again.close()
    page.locator("#text-back").click()
    expect(page.locator("#title")).to_contain_text(f"{LENGTH} tokens")


def test_extrapolation_curves(page, server):
    page.goto(f"{server}#view=curves")
    expect(page.locator("#curves svg polyline")).to_have_count(2)
    for button in ("protocol", "curves-png", "curves-svg", "curves-npz"):
        expect(page.locator(f"#{button}")).to_be_visible()
    expect(page.locator("#curves-table")).to_contain_text("learned:max_positions=32")
    stored = json.load(open(STORED[0]))["protocols"]["blocks"]["results"][0]["perplexity"]
    assert f"{stored:.4g}" in page.locator("#curves-table").inner_text()
    page.select_option("#protocol", "last")
    expect(page.locator("#curves-note")).to_contain_text("95% intervals")
    with page.expect_download() as waiting:
        page.locator("#curves-npz").click()
    assert zipfile.ZipFile(waiting.value.path()).testzip() is None


def test_no_buttons_without_curves(page, tmp_path):
    unmeasured = json.load(open(STORED[0]))
    for entry in unmeasured["protocols"].values():
        entry["results"] = [{"length": 32, "status": "failed", "reason": "out of memory"}]
    (tmp_path / "unmeasured.json").write_text(json.dumps(unmeasured))
    for results, said in (([], "results were given. relpos evaluate RUN"), (["unmeasured.json"], "No length")):
        with Running(Library(["alibi", *(tmp_path / name for name in results)], length=16)) as url:
            page.goto(f"{url}#view=curves")
            expect(page.locator("#curves")).to_contain_text(said)
            for element in ("protocol", "curves-png", "curves-svg", "curves-npz"):
                expect(page.locator(f"#{element}")).to_be_hidden()


def test_the_exported_file_without_network(chromium, library, tmp_path):
    small = Library([library.sources["1"].what, "alibi", *STORED], length=32)
    path = write_text(tmp_path / "page.html", exported_page(small, layers="all"))
    assert not re.search(r"""(src|href)=["'](https?:)?//""", path.read_text(encoding="utf-8"))
    context = chromium.new_context(offline=True)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    ready(page, "0/2/bias/")
    cell(page, '#heads [data-head="0"]', 30, 3, length=32)
    held = small.sources["0"].held()
    close(read(page, "bias"), held.map("bias", 2)[0], 30, 3)
    close(read(page, "weights"), held.map("weights", 2)[0], 30, 3)
    page.keyboard.press("ArrowDown")
    ready(page, "0/1/bias/")
    expect(page.locator("#text-form")).to_be_hidden()
    page.locator("#tab-play").click()
    expect(page.locator("#play-heads .panel")).to_have_count(12)
    ends = page.locator("#play-heads .ends").first
    before = ends.text_content()
    page.locator('[data-parameter="p"]').fill("4")
    expect(ends).not_to_have_text(before)
    page.locator("#tab-curves").click()
    expect(page.locator("#curves svg polyline")).to_have_count(2)
    context.close()
    assert not said and not asked


def test_a_notebook_frame(chromium):
    context = chromium.new_context(offline=True)
    page = context.new_page()
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_content(explore("kerple", length=24, playground=False)._repr_html_())
    frame = page.frame_locator("iframe")
    expect(frame.locator("#heads .panel")).to_have_count(12)
    frame.locator('#heads [data-head="3"]').click()
    expect(frame.locator("#large figcaption")).to_contain_text("Head 4: bias from")
    context.close()
    assert not said


def test_more_tokens_than_pixels(page):
    """The grid shows block means, the enlarged head every cell."""
    library = Library(["cable"], length=1100)
    with Running(library) as url:
        page.goto(f"{url}#at=1000,577&head=2")
        ready(page, "0/0/bias/")
        expect(page.locator("#title")).to_contain_text("1100 tokens, each pixel the mean of 3 × 3")
        close(read(page, "bias"), library.sources["0"].held().map("bias", heads=[2])[0], 1000, 577)


def test_a_storm_of_bad_requests_leaves_the_page_working(page, server):
    page.goto(server)
    ready(page, "0/2/bias/")

    def storm(number: int) -> None:
        with httpx.Client(base_url=server, timeout=30) as client:
            for turn in range(25):
                client.get(f"/api/maps?source={turn}&layer=x{number}&kind=%ff")
                client.post("/api/playground", content=b"{" * turn, headers={"Content-Type": "application/json"})
                client.post("/api/text", json={"source": "0", "text": turn})
                client.get("/api/index", headers={"Host": "evil.example"})

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    page.select_option("#kind", "weights")
    ready(page, "0/2/weights/")
    for thread in threads:
        thread.join()
    page.select_option("#layer", "0")
    ready(page, "0/0/weights/")
    expect(page.locator("#alert")).to_be_hidden()


def test_a_stopped_server_is_said_and_the_picture_stays(page, library):
    with Running(Library(["alibi"], length=24)) as url:
        page.goto(url)
        ready(page, "0/0/bias/")
    page.evaluate("location.hash = '#kind=weights&a=0&shared=1'")
    page.locator("#tab-play").click()
    expect(page.locator("#play-heads")).to_contain_text("Is `relpos explore` still running?")
    page.locator("#tab-heads").click()
    expect(page.locator("#heads .panel")).to_have_count(12)
    page.expected.append("net::ERR_CONNECTION_REFUSED")


def test_keyboard_and_screen_reader(page, server):
    page.goto(server)
    ready(page, "0/2/bias/")
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, select, input, textarea, canvas[tabindex]')].filter((one) =>
           !one.closest('[hidden]') && !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).length"""
    )
    assert unnamed == 0
    label = page.locator('#heads [data-head="0"]').get_attribute("aria-label")
    assert re.fullmatch(r"Head 1: bias from \S+ to \S+, effective window \d+ tokens", label)
    page.locator("#tab-heads").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-play")).to_be_focused()
    expect(page.locator("#tab-play")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#view-heads")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_light_and_dark(chromium, server, scheme):
    context = chromium.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server)
    ready(page, "0/2/bias/")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    context.close()
