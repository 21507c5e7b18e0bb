"""Drives the application without a socket: whole answers, or one message at a time."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import httpx2

from loramux.receipts.issuer import ReceiptIssuer
from loramux.server.app import ServerApp, create_app
from loramux.server.context import ServerOptions
from tests.unit.server.scripted_backend import ScriptedBackend

TIMEOUT_S = 20
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def make_app(
    backend: ScriptedBackend | None = None, *, receipts: ReceiptIssuer | None = None, **options: Any
) -> ServerApp:
    """Without arguments: the one application of a test file."""
    if backend is None and receipts is None and not options:
        return plain_app()
    backend = backend or ScriptedBackend()
    return create_app(backend, ServerOptions(**options), names=backend.names, receipts=receipts)


@functools.cache
def plain_app() -> ServerApp:
    backend = ScriptedBackend()
    return create_app(backend, ServerOptions(), names=backend.names)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


def request(app: ServerApp, method: str, path: str, **arguments: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    response: httpx2.Response = run(send())
    return response


def post_each(app: ServerApp, path: str, bodies: Iterable[Any]) -> list[httpx2.Response]:
    async def send() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.post(path, json=body) for body in bodies]

    responses: list[httpx2.Response] = run(send())
    return responses


def get(app: ServerApp, path: str, **arguments: Any) -> httpx2.Response:
    return request(app, "GET", path, **arguments)


def post(app: ServerApp, path: str, body: Any = None, **arguments: Any) -> httpx2.Response:
    if isinstance(body, bytes):
        headers = {"content-type": "application/json"}
        return request(app, "POST", path, content=body, headers=headers, **arguments)
    return request(app, "POST", path, json=body, **arguments)


def chat(app: ServerApp, text: str = "hi", **fields: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": text}]
    return post(app, CHAT, {"model": "tiny-base", "messages": messages} | fields)


def complete(app: ServerApp, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
    return post(app, COMPLETIONS, {"model": "tiny-base", "prompt": prompt} | fields)


def events_of(text: str) -> list[Any]:
    """Return the data of each event; [DONE] stays a string."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


class OpenCall:
    """One request under way: what the server sends is taken message by message."""

    def __init__(self, app: ServerApp, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._body = json.dumps(body).encode()
        self._path = path
        self._asked = False
        self._gone = asyncio.Event()
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)
        """Holds one message: the next send waits until it is taken, as with a slow reader."""

    def start(self) -> asyncio.Task[None]:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        return asyncio.ensure_future(self._app(scope, self._receive, self._send))

    def disconnect(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.sent.put(dict(message))


Check = Callable[[ScriptedBackend, OpenCall], Awaitable[None]]


def with_open_call(backend: ScriptedBackend, path: str, body: dict[str, Any], check: Check) -> None:
    async def drive() -> None:
        call = OpenCall(make_app(backend), path, body)
        task = call.start()
        try:
            await check(backend, call)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(drive())
