"""The explorer's server on localhost: its numbers, its manners, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from pathlib import Path

import httpx
import matplotlib
import numpy as np
import pytest
import torch
from explorer_support import model_folder
from safetensors.numpy import load as load_bytes

from relpos import capture, encodings, explore
from relpos.errors import UserError
from relpos.explorer import Library, playground, wire
from relpos.explorer.server import MAX_BODY, Running
from relpos.explorer.sources import MAX_TEXT, MAX_TOKENS
from relpos.figures import style

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("explorer")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    folder = tmp_path_factory.mktemp("models")
    return Library([model_folder(folder / "small"), "kerple"], length=48)


@pytest.fixture(scope="module")
def server(library):
    with Running(library) as url:
        yield url


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server, timeout=30) as made:
        yield made


def values(data: bytes, kind: str, layer: int, n: int, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Maps from an answer, read a second time: [H, n, n] with NaN where nothing is seen, and the range [H, 2]."""
    tensors = load_bytes(data)
    cells, ends = tensors[f"layer.{layer}.map.{kind}"], tensors[f"layer.{layer}.map.{kind}.range"]
    out = np.full((len(cells), n, n), np.nan)
    for h in range(len(cells)):
        at = 0
        for i in range(n):
            for j in range(i + 1 if causal else n):
                u = int(cells[h, at])
                at += 1
                if u != 65535:
                    out[h, i, j] = ends[h, 0] + u / 65534 * (ends[h, 1] - ends[h, 0])
        assert at == cells.shape[1]
    return out, ends


def assert_same(found: np.ndarray, ends: np.ndarray, expected: torch.Tensor) -> None:
    """Equal within 1/65535 of each head's range, and unseen in the same cells."""
    wanted = expected.double().numpy()
    assert (np.isnan(found) == np.isneginf(wanted)).all()
    span = (ends[:, 1] - ends[:, 0])[:, None, None]
    seen = ~np.isnan(found)
    apart = np.abs(found - np.where(seen, wanted, np.nan))
    assert (apart <= span / 65535 + 1e-6 * np.abs(wanted))[seen].all()


# Numbers.


@pytest.mark.parametrize("kind", capture.KINDS)
def test_maps_are_those_of_the_capture(client, library, kind):
    answer = client.get("/api/maps", params={"source": "0", "layer": 1, "kind": kind})
    assert answer.status_code == 200
    assert_same(*values(answer.content, kind, 1, 48), library.sources["0"].held().map(kind, 1))


def test_an_answer_is_a_capture_file(client, tmp_path):
    data = client.get("/api/maps", params={"source": "1", "layer": 0, "kind": "bias"}).content
    (tmp_path / "answer.safetensors").write_bytes(data)
    held = capture.load(tmp_path / "answer.safetensors")
    assert (held.title, held.heads, held.length) == ("KERPLE", 12, 48)


def test_twelve_causal_maps_of_512_take_at_most_3_5_megabytes():
    data = wire.maps(capture.from_spec("fox"), "bias", 0)
    assert len(data) <= 3_500_000
    both = wire.maps(capture.from_spec("kerple", causal=False), "bias", 0)
    assert len(data) < len(both) <= 7_000_000


def test_bidirectional_and_windowed_maps():
    held = capture.from_spec("t5", length=20, causal=False)
    assert_same(*values(wire.maps(held, "bias", 0), "bias", 0, 20, causal=False), held.map("bias"))
    held = capture.from_spec("kerple", length=20)
    held.layers[0].window = 5
    assert_same(*values(wire.maps(held, "bias", 0), "bias", 0, 20), held.map("bias"))


def test_long_maps_come_as_block_means_and_one_head_cell_by_cell():
    held = capture.from_spec("cable", length=1100, heads=2)
    small = load_bytes(wire.maps(held, "bias", 0))["layer.0.map.bias"]
    n = -(-1100 // 3)
    assert small.shape == (2, n * (n + 1) // 2)
    whole = held.map("bias")[1].numpy()
    data = load_bytes(wire.maps(held, "bias", 0, [1], full=True))
    low, high = data["layer.0.map.bias.range"][0]
    cells = low + data["layer.0.map.bias"][0] / 65534 * (high - low)
    assert np.abs(cells - whole[np.tril_indices(1100)]).max() <= (high - low) / 65535


@pytest.mark.parametrize(
    ("signed", "value", "place"), [(False, 0.0, 1.0), (False, -3.0, 1.0), (True, 0.0, 0.5), (True, 2.0, 1.0)]
)
def test_a_flat_head_has_the_colour_it_has_in_figures(signed, value, place):
    made = types.SimpleNamespace(kind="bias", signed=signed)
    norm = wire.norm(value, value, made)
    at = (value - norm["low"]) / (norm["high"] - norm["low"])
    scale, table = style.colours(value, value, "bias", signed)
    assert at == place
    palette = style.DIVERGING if norm["palette"] == style.DIVERGING.name else matplotlib.colormaps[norm["palette"]]
    assert palette(at) == pytest.approx(table(scale(value)))


def test_profile_and_window(client, library):
    answer = client.get("/api/profile", params={"source": "0", "layer": 2, "kind": "bias"})
    tensors = load_bytes(answer.content)
    whole = library.sources["0"].held().map("bias", 2).double().numpy()
    for d in (0, 1, 17, 47):
        along = np.stack([np.diagonal(head, -d) for head in whole])
        np.testing.assert_allclose(tensors["layer.2.profile.bias.mean"][:, d], along.mean(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(tensors["layer.2.profile.bias.spread"][:, d], along.std(1), rtol=1e-3, atol=1e-5)
    assert (tensors["layer.2.window"] >= 1).all() and (tensors["layer.2.window"] <= 48).all()


def test_a_typed_text_is_read_by_the_model(client, library):
    text = "To be, or not to be: é"
    made = client.post("/api/text", json={"source": "0", "text": text})
    assert made.status_code == 200, made.text
    facts = made.json()
    assert facts["length"] == len(text.encode()) and facts["pieces"][:5] == list("To be")
    data = client.get("/api/maps", params={"source": facts["key"], "layer": 0, "kind": "weights"}).content
    found, ends = values(data, "weights", 0, facts["length"])
    model = library.sources["0"]._model
    ids = torch.tensor([list(text.encode())])
    expected = model(ids, output_attentions=True).attentions[0][0].detach()
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    assert_same(found, ends, expected.masked_fill(~seen, -torch.inf))


def test_playground_moves_options_and_parameters(client):
    def bias(spec: str, **parameters: float) -> np.ndarray:
        asked = {"spec": spec, "parameters": parameters, "length": 40, "heads": 3}
        answer = client.post("/api/playground", json=asked)
        assert answer.status_code == 200, answer.text
        return values(answer.content, "bias", 0, 40)[0]

    plain = bias("kerple")
    encoding = capture.from_spec("kerple", length=40, heads=3).encoding(0)
    d = torch.arange(40).double()
    for factor in (1.0, 4.0):
        a, p = factor * encoding.a.double().clamp(min=0.01 / factor), encoding.p.double().clamp(min=0.01)
        expected = -p[:, None] * torch.log1p(a[:, None] * d)
        found = bias("kerple", a=factor)[:, 39, ::-1]
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-3)
    assert not np.allclose(bias("kerple:form=power"), plain, equal_nan=True)


@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_plays(name):
    """Whatever the registry holds can be drawn with any of its sliders moved, or says why not."""
    entry = next(one for one in playground.listing() if one["name"] == name)
    assert entry["title"] and all(option["takes"] for option in entry["options"])
    for request in playground.variants(name)[:4]:
        try:
            data = playground.answer({**request, "length": 12, "heads": 2})
        except UserError as error:
            assert "nothing to draw" in str(error) or "must" in str(error) or "needs" in str(error), error
            continue
        assert any(".map." in key for key in load_bytes(data))


def test_curves_come_from_result_files(tmp_path):
    stored = [f"tests/stored/{name}.json" for name in ("kerple", "learned")]
    made = Library(stored).curves()
    assert [one["label"] for one in made] == ["kerple", "learned:max_positions=32"]
    raw = json.loads(open(stored[0]).read())["protocols"]["blocks"]["results"]
    points = made[0]["protocols"]["blocks"]["points"]
    assert [(p["length"], p["perplexity"]) for p in points] == [(r["length"], r["perplexity"]) for r in raw]


# Manners.


def test_binds_to_this_machine_only(server):
    assert urllib.parse.urlsplit(server).hostname == "127.0.0.1"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/api/index", "/api/maps?source=1&layer=0&kind=bias", "/page/main.js"])
def test_other_hosts_and_their_pages_are_refused(client, headers, path):
    answer = client.get(path, headers=headers)
    assert answer.status_code in (400, 403)
    assert b"KERPLE" not in answer.content


def test_own_origin_and_localhost_are_fine(client, server):
    port = urllib.parse.urlsplit(server).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        answer = client.get("/api/index", headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def raw(server: str, request: bytes) -> bytes:
    """Bytes as they are: a client library would tidy the path up."""
    port = urllib.parse.urlsplit(server).port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as made:
        made.sendall(request)
        made.settimeout(1)
        out = b""
        try:
            while part := made.recv(65536):
                out += part
        except TimeoutError:
            pass
        return out


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py",
        "/page/..%2fserver.py",
        "/page/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/..\\..\\server.py",
        "/../../../../etc/passwd",
        "/page/main.js%00.css",
        "/page/index.html",
        "/page/",
        "/api/source?source=../../etc/passwd",
        "/api/maps?source=/etc/passwd&layer=0&kind=bias",
    ],
)
def test_no_path_leads_to_other_files(server, path):
    port = urllib.parse.urlsplit(server).port
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    answer = raw(server, request.encode())
    status = int(answer.split(b" ", 2)[1])
    assert 400 <= status < 500
    assert b"root:" not in answer and b"import" not in answer


BAD_GETS = [
    "/api/maps",
    "/api/maps?source=9&layer=0&kind=bias",
    "/api/maps?source=1&layer=-1&kind=bias",
    "/api/maps?source=1&layer=99&kind=bias",
    "/api/maps?source=1&layer=0&kind=nonsense",
    "/api/maps?source=1&layer=0&kind=scores",
    "/api/maps?source=1&layer=0&kind=bias&head=99",
    "/api/maps?source=1&layer=999999999999999999999&kind=bias",
    "/api/profile?source=1&layer=x&kind=bias",
    "/api/profile?source=1&layer=0&kind=",
    "/nowhere",
    "/api/playground",
]
BAD_POSTS = [
    ("/api/playground", {}),
    ("/api/playground", {"spec": "nope"}),
    ("/api/playground", {"spec": 7}),
    ("/api/playground", {"spec": "kerple:form=cubic"}),
    ("/api/playground", {"spec": "fire:width=1000000000"}),
    ("/api/playground", {"spec": "dape:base=fire:width=1000000000"}),
    ("/api/playground", {"spec": "none"}),
    ("/api/playground", {"spec": "./evil.py"}),
    ("/api/playground", {"spec": "dape:base=./evil.py"}),
    ("/api/playground", {"spec": "dape:base=" * 40}),
    ("/api/playground", {"spec": "kerple", "length": 100000}),
    ("/api/playground", {"spec": "kerple", "length": True}),
    ("/api/playground", {"spec": "kerple", "heads": 0}),
    ("/api/playground", {"spec": "kerple", "parameters": [1]}),
    ("/api/playground", {"spec": "kerple", "parameters": {"b": 1}}),
    ("/api/playground", {"spec": "kerple", "parameters": {"a": "much"}}),
    ("/api/playground", {"spec": "kerple", "parameters": {"a": 1e300}}),
    ("/api/playground", {"spec": "kerple", "kind": ["bias"]}),
    ("/api/playground", {"spec": "kerple", "device": "cuda"}),
    ("/api/playground", {"spec": "kerple\u0000"}),
    ("/api/playground", {"spec": "kerple:form=\ud800"}),
    ("/api/playground", {"spec": "kerple", "parameters": {"a": float("nan")}}),
    ("/api/text", {"source": "1", "text": "an encoding reads nothing"}),
    ("/api/text", {"source": "0", "text": ""}),
    ("/api/text", {"source": "0", "text": 5}),
    ("/api/text", {"source": "0", "text": "x" * (MAX_TEXT + 1)}),
    ("/api/text", {"source": "0", "text": "x" * (MAX_TOKENS + 1)}),
    ("/api/text", {"text": "x"}),
    ("/api/text", {"source": "0", "text": "\ud800"}),
]


def test_mistakes_get_a_4xx_with_a_message_and_the_server_lives(client, server):
    for path in BAD_GETS:
        answer = client.get(path)
        assert 400 <= answer.status_code < 500, path
        assert answer.json()["error"], path
    for path, body in BAD_POSTS:
        answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (path, body, answer.text)
        assert answer.json()["error"], (path, body)
    kind = {"Content-Type": "application/json"}
    for content, headers, status in [
        (b"{", kind, 400),
        (b"[1]", kind, 400),
        (b"\xff\xfe", kind, 400),
        (b"[" * 100000, kind, 400),
        (b'{"spec": "kerple"}', {"Content-Type": "text/plain"}, 415),
        (b" " * (MAX_BODY + 1), kind, 413),
    ]:
        answer = client.post("/api/playground", content=content, headers=headers)
        assert answer.status_code == status and answer.json()["error"]
    for junk in (b"\x00" * 200 + b"\r\n\r\n", b"GET\r\n\r\n", b"POST /api/text HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 9):
        raw(server, junk)
    assert client.get("/api/index").status_code == 200


def test_computations_at_a_time_are_bounded(server):
    """Sixty settings at once: each is computed or turned away with a message, and afterwards the server answers."""
    seen: list[int] = []

    def ask(number: int) -> None:
        with httpx.Client(base_url=server, timeout=60) as client:
            asked = {"spec": "kerple", "length": 256, "heads": 12, "seed": number}
            seen.append(client.post("/api/playground", json=asked).status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {200, 429}
    assert httpx.get(f"{server}api/index").status_code == 200


def test_bound_to_every_address_it_still_refuses_names(library):
    with Running(library, "0.0.0.0") as url:
        port = urllib.parse.urlsplit(url).port
        for host, status in (("192.168.1.7", 200), ("localhost", 200), ("evil.example", 403)):
            answer = httpx.get(f"http://127.0.0.1:{port}/", headers={"Host": f"{host}:{port}"})
            assert answer.status_code == status, host


# The command, the notebook.


def test_a_model_of_another_family_without_a_tokenizer(tmp_path):
    from transformers import BloomConfig, BloomModel, GPT2Config, GPT2Model

    BloomModel(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4)).save_pretrained(tmp_path / "bloom")
    source = Library([tmp_path / "bloom"], length=20).sources["0"]
    facts = source.facts()
    assert facts["layers"] == {"0": ["bias", "weights"], "1": ["bias", "weights"]} and not facts["reads"]
    assert_same(*values(wire.maps(source.held(), "bias", 1), "bias", 1, 20), source.held().map("bias", 1))
    GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="comes without a tokenizer"):
        Library([tmp_path / "gpt2"], length=20).sources["0"].facts()


def test_the_command_serves_and_ends_quietly():
    command = [sys.executable, "-m", "relpos_cli", "explore", "kerple", "--no-browser", "--port", "0", "--length", "16"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}

    def interruptible() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background hands down an ignored one

    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    ) as run:
        line = run.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        for _ in range(100):
            try:
                answer = httpx.get(f"{url}api/index")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        assert answer.json()["sources"] == [{"key": "0", "name": "kerple"}]
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=20)
        assert run.returncode == 130 and "Traceback" not in errors


def test_a_notebook_shows_the_page(tmp_path):
    widget = explore("kerple", length=16, playground=False)
    shown = widget._repr_html_()
    assert shown.startswith("<iframe") and "srcdoc" in shown
    assert widget.save(tmp_path / "page.html").read_text(encoding="utf-8") == widget.page


def test_mistakes_on_the_command_line(tmp_path):
    for given, words in [
        (["kerpel"], "kerple"),
        ([str(tmp_path / "missing.safetensors")], "there is no file"),
        ([str(tmp_path)], "no file or folder|no model|no encoding"),
        ([str(tmp_path / "results.json")], "there is no file"),
    ]:
        with pytest.raises(UserError, match=words):
            Library(given)
    with pytest.raises(UserError, match=r"sources must be a list, of one too: \['kerple'\], not 'kerple'"):
        Library("kerple")
    with pytest.raises(UserError, match="cannot write"):
        explore("kerple", length=4, playground=False).save("/proc/nowhere/page.html")
