"""The page as one string: modules and style from `page/`, and for an exported file the data beside them.

The modules import each other by names (`relpos/data.js`) that an import map resolves: to the server's addresses, or in
an exported file to the text of the modules themselves. So both run the same files, with no build step.

An exported file answers the page's requests from elements of its own, gzipped and in base64, under the address the
server would have been asked.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from relpos import __version__, encodings
from relpos.capture import KINDS
from relpos.data.progress import Progress
from relpos.errors import UserError
from relpos.explorer import playground as _playground
from relpos.explorer import wire
from relpos.explorer.sources import MAX_TEXT, Library

PAGE = Path(__file__).with_name("page")
MODULES = ("main.js", "data.js", "maps.js", "plots.js", "playground.js", "save.js")
PLAY_LENGTH, PLAY_HEADS = 64, 12  # of the grids an exported page holds


@cache
def asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def index(library: Library, live: bool) -> dict[str, Any]:
    """What the page asks for first."""
    return {
        **library.index(),
        "version": __version__,
        "live": live,
        "kinds": list(KINDS),
        "palettes": wire.palettes(),
        "encodings": _playground.listing(),
        "play": {
            "length": _playground.LENGTH if live else PLAY_LENGTH,
            "heads": _playground.HEADS if live else PLAY_HEADS,
            "factors": _playground.FACTORS if live else _playground.FACTORS[::2],
        },
        "max_text": MAX_TEXT,
        "pixels": wire.PIXELS,
        "full": wire.FULL,
    }


def import_map(address: Callable[[str], str]) -> str:
    return json.dumps({"imports": {f"relpos/{name}": address(name) for name in MODULES}})


BOOT = 'import "relpos/main.js";'


def document(imports: str, style: str, data: str = "") -> str:
    return (
        asset("index.html")
        .replace("<!-- style -->", style)
        .replace("<!-- imports -->", f'<script type="importmap">{imports}</script>')
        .replace("<!-- data -->", f'{data}\n<script type="module">{BOOT}</script>')
    )


def _inline(name: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(asset(name).encode()).decode()


def _element(key: str, data: bytes) -> str:
    text = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="application/octet-stream" data-key="{html.escape(key)}">{text}</script>'


def page(library: Library, *, layers: str = "held", playground: bool = True, progress: bool = False) -> str:
    """One self-contained document. `layers` is "held" (those whose text-dependent part is at hand), "last" or "all"."""
    if layers not in ("held", "last", "all"):
        raise UserError(f"layers of an exported page are 'held', 'last' or 'all', not {layers!r}")
    with Progress("collecting", progress) as bar:
        return _page(library, layers, playground, bar)


def _page(library: Library, layers: str, playground: bool, bar: Progress) -> str:
    held: dict[str, bytes] = {}
    names = encodings.names() if playground else []
    steps = iter(range(len(library.sources) + len(names)))
    most = max(len(library.sources) + len(names), 1)
    for key, source in library.sources.items():
        bar(next(steps) / most, source.name)
        capture, facts = source.held(), source.facts()
        if layers == "last":
            wanted = [capture.num_layers - 1]
        else:
            wanted = sorted(capture.layers) if layers == "held" and capture.layers else list(range(capture.num_layers))
        kept = {number: facts["layers"][number] for number in map(str, wanted) if number in facts["layers"]}
        told = {**facts, "layers": kept, "reads": False}
        held[f"api/source?source={key}"] = json.dumps(told).encode()
        for number, kinds in kept.items():
            for kind in kinds:
                query = f"source={key}&layer={number}&kind={kind}"
                held[f"api/maps?{query}"] = wire.maps(capture, kind, int(number))
                held[f"api/profile?{query}"] = wire.profile(capture, kind, int(number))
    for name in names:
        bar(next(steps) / most, f"playground: {name}")
        for request in _playground.variants(name):
            address = "api/playground " + json.dumps(request, sort_keys=True, separators=(",", ":"))
            try:
                answer = _playground.answer({**request, "length": PLAY_LENGTH, "heads": PLAY_HEADS})
            except UserError as error:
                answer = json.dumps({"error": str(error)}).encode()
            held[address] = answer
    told_index = index(library, live=False) | ({} if playground else {"encodings": []})
    held["api/index"] = json.dumps(told_index).encode()
    data = "\n".join(_element(key, value) for key, value in held.items())
    return document(import_map(_inline), f"<style>{asset('style.css')}</style>", data)
