"""The small server behind the page: its own files from memory, and maps of the sources it was given.

What keeps it safe: it listens on 127.0.0.1 unless told otherwise; a request whose Host is not one of its own names, or
that comes from another site's page (Origin, Sec-Fetch-Site), is refused, so that neither a strange page nor a rebound
name can read a model; no path of a request ever reaches the file system, since files are looked up in a dict and
sources by key; bodies, texts, and the number of computations at a time are bounded. A mistake gets a 4xx and a message.

    GET  /                     the page           GET  /page/NAME            its modules and style
    GET  /api/index            sources, encodings, colours, curves
    GET  /api/source?source=   length, layers and kinds, tokens, provenance of a source
    GET  /api/maps?source=&layer=&kind=[&head=]   maps of all heads, or all cells of one (wire.py)
    GET  /api/profile?source=&layer=&kind=        profiles by distance and effective windows
    POST /api/playground       {"spec", "parameters", ...} -> maps and profile
    POST /api/text             {"source", "text"} -> a source
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import socket
import sys
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from relpos.errors import UserError
from relpos.explorer import export, playground, wire
from relpos.explorer.sources import Library

try:
    import anyio
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise UserError(
        f"the explorer's server needs {error.name}: pip install 'relpos[explorer]'. `relpos explore --export "
        "page.html` works without it"
    ) from None

PORT = 8737
MAX_BODY = 256 * 1024
RUNNING, WAITING = 2, 32  # computations at a time, and how many may wait for them
KEPT = 64 << 20  # bytes of answers kept
TYPES = {"js": "text/javascript", "css": "text/css"}


class Desk:
    """Runs computations in threads, a few at a time, and keeps the latest answers."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(RUNNING)
        self.waiting = 0
        self.kept: OrderedDict[str, bytes] = OrderedDict()
        self.coming: dict[str, asyncio.Future[bytes]] = {}

    async def run(self, work: Callable[[], Any]) -> Any:
        if self.waiting >= RUNNING + WAITING:
            raise HTTPException(429, "the server is busy with other requests: try again in a moment")
        self.waiting += 1
        try:
            async with self.limiter:
                return await run_in_threadpool(work)
        finally:
            self.waiting -= 1

    async def bytes(self, key: str, work: Callable[[], bytes]) -> bytes:
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        if key not in self.coming:  # two pages that ask for the same share one computation
            self.coming[key] = asyncio.ensure_future(self.run(work))
            self.coming[key].add_done_callback(lambda _: self.coming.pop(key))
        made = await asyncio.shield(self.coming[key])
        self.kept[key] = made
        while len(self.kept) > 1 and sum(map(len, self.kept.values())) > KEPT:
            self.kept.popitem(last=False)
        return made


class Guard:
    """Refuses requests for other hosts and from other sites' pages; adds the headers every answer has."""

    def __init__(self, app: Any, hosts: set[str], everywhere: bool, policy: str):
        self.app, self.hosts, self.everywhere, self.policy = app, hosts, everywhere, policy

    def known(self, name: str) -> bool:
        """Ours, or where the user bound to every address, any address: a rebound name is still a name."""
        if self.everywhere:
            try:
                ipaddress.ip_address(name)
                return True
            except ValueError:
                pass
        return name in self.hosts

    def refusal(self, headers: dict[str, str], path: str) -> str | None:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not self.known(name):
            return f"this server does not answer for the host {host[:80]!r}"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return "pages of other sites may not use this server"
        if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "pages of other sites may not use this server"
        return None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cross-origin-resource-policy", b"same-origin"),
                    (b"cache-control", b"no-store"),
                    (b"content-security-policy", self.policy.encode()),
                ]
            await send(message)

        refused = self.refusal(headers, scope["path"])
        if refused:
            return await JSONResponse({"error": refused}, 403)(scope, receive, sending)
        await self.app(scope, receive, sending)


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise UserError(f"{name} must be a whole number, not {text[:40]!r}")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request, read no further than the limit."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise HTTPException(415, "send JSON, with Content-Type: application/json")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"a request may hold at most {MAX_BODY} bytes")
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON and no text
    except (ValueError, RecursionError):
        raise UserError("the request is not valid JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise UserError("the request must be a JSON object")
    return value


def app(library: Library, hosts: set[str], everywhere: bool = False) -> Any:
    """The ASGI application. `hosts` are the names it answers to; `everywhere` where it is bound to every address."""
    imports = export.import_map(lambda name: f"/page/{name}")
    document = export.document(imports, '<link rel="stylesheet" href="/page/style.css">')
    files = {name: export.asset(name) for name in (*export.MODULES, "style.css")}
    inline = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (imports, export.BOOT)
    )
    policy = (
        f"default-src 'none'; script-src 'self' {inline}; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self' http://localhost:* http://127.0.0.1:*"
    )
    desk = Desk()
    drawing = threading.Lock()  # an encoding's initial values come from torch's one generator

    async def page(request: Request) -> Response:
        return Response(document, media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]])

    async def index(request: Request) -> Response:
        return JSONResponse(await desk.run(lambda: export.index(library, live=True)))

    def source(request: Request) -> Any:
        return library.get(request.query_params.get("source", ""))

    async def facts(request: Request) -> Response:
        return JSONResponse(await desk.run(source(request).facts))

    async def maps(request: Request) -> Response:
        chosen, layer = source(request), _whole(request, "layer")
        kind = request.query_params.get("kind", "")
        head = [_whole(request, "head")] if "head" in request.query_params else None
        key = f"maps {chosen.key} {layer} {kind[:10]} {head}"
        data = await desk.bytes(key, lambda: wire.maps(chosen.held(), kind, layer, head, full=head is not None))
        return Response(data, media_type="application/octet-stream")

    async def profile(request: Request) -> Response:
        chosen, layer = source(request), _whole(request, "layer")
        kind = request.query_params.get("kind", "")
        data = await desk.bytes(
            f"profile {chosen.key} {layer} {kind[:10]}", lambda: wire.profile(chosen.held(), kind, layer)
        )
        return Response(data, media_type="application/octet-stream")

    async def play(request: Request) -> Response:
        asked = await _body(request)

        def work() -> bytes:
            with drawing:
                return playground.answer(dict(asked))

        key = "play " + json.dumps(asked, sort_keys=True)
        return Response(await desk.bytes(key, work), media_type="application/octet-stream")

    async def text(request: Request) -> Response:
        asked = await _body(request)
        words, key = asked.get("text"), asked.get("source")
        if not isinstance(words, str) or not isinstance(key, str):
            raise UserError('send {"source": KEY, "text": TEXT}')
        return JSONResponse(await desk.run(lambda: library.read(key, words).facts()))

    async def mistake(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    async def bug(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"the server failed: {type(error).__name__}; see its terminal"}, 500)

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        UserError: mistake,
        HTTPException: refused,
        Exception: bug,
    }
    routes = [
        Route("/", page),
        Route("/page/{name}", file),
        Route("/api/index", index),
        Route("/api/source", facts),
        Route("/api/maps", maps),
        Route("/api/profile", profile),
        Route("/api/playground", play, methods=["POST"]),
        Route("/api/text", text, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts, everywhere, policy)


def _listen(host: str, port: int | None) -> socket.socket:
    """A port that was asked for, or ours, or any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in [port] if port is not None else [PORT, 0]:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, wanted))
            return made
        except (OSError, OverflowError) as error:
            made.close()
            if port is not None or wanted == 0:
                raise UserError(f"cannot listen on {host} port {wanted}: {error}") from None
    raise AssertionError


class Running:
    """A server in a thread, for tests, benchmarks and notebooks: `with Running(library) as url`."""

    def __init__(self, library: Library, host: str = "127.0.0.1", port: int | None = 0):
        self.socket = _listen(host, port)
        number = self.socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}/"
        everywhere = host in ("0.0.0.0", "::")
        hosts = {host.lower(), "127.0.0.1", "localhost", "::1"}
        if everywhere:
            hosts |= {socket.gethostname().lower()}
        config = uvicorn.Config(
            app(library, hosts, everywhere),
            log_level="error",
            access_log=False,
            limit_concurrency=128,
            timeout_keep_alive=30,
            ws="none",
            lifespan="off",
            server_header=False,
        )
        self.server = uvicorn.Server(config)
        self.thread: threading.Thread | None = None

    def run(self) -> None:
        self.server.run(sockets=[self.socket])

    def __enter__(self) -> str:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            self.thread.join(0.01)
        return self.url

    def __exit__(self, *error: Any) -> None:
        self.server.should_exit = True
        assert self.thread is not None
        self.thread.join(10)


def serve(library: Library, *, host: str = "127.0.0.1", port: int | None = None, browser: bool = True) -> None:
    """Serve until interrupted. Opens the browser once the first source is ready."""
    running = Running(library, host, port)
    first = next(iter(library.sources.values()))
    first.facts()  # a model loads now, so that the page's first picture comes at once
    print(f"relpos explorer at {running.url}  (Ctrl-C ends it)", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"relpos: listening on {host}: others on the network can see these models", file=sys.stderr)
    if browser:
        threading.Timer(0.5, webbrowser.open, [running.url]).start()
    running.run()
