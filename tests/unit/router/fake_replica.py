"""A replica of a few lines that writes exactly the bytes of a script, and a router to drive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loramux.router.app import RouterApp, RouterOptions
from loramux.router.fleet import Replica, State
from loramux.router.members import StaticMembers
from loramux.types.replica_report import ResidencyReport

TIMEOUT_S = 20


def report(**fields: Any) -> ResidencyReport:
    told = {
        "instance": "i", "since": -1, "generation": 0, "full": True, "moves": {}, "state": "ready",
        "base": "tiny-base", "base_digest": "d", "revision": 0, "open": 0, "waiting": 0,
        "waiting_tokens": 0, "slots": 8, "step_s": 0.005, "token_s": 3e-5,
        "tier_s": [0.5, 0.5, 0.06, 0.002, 0.001, 0.0], "free_pages": 10,
    }  # fmt: skip
    return ResidencyReport(**(told | fields))


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[["FakeReplica", Request, asyncio.StreamWriter], Awaitable[None]]


def http(status: int, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def say_name(replica: FakeReplica, request: Request, writer: asyncio.StreamWriter) -> None:
    body = json.dumps({"from": replica.name}).encode()
    writer.write(http(200, body))


@dataclass
class FakeReplica:
    name: str
    script: Script = say_name
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its reports."""
    requests: list[Request] = field(default_factory=list)
    num_aborted: int = 0
    is_silent: bool = False
    port: int = 0
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def id(self) -> str:
        """How clients of a router know it."""
        return Replica(name=self.url, url=self.url).id

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuses and resets connections, as of a process that was killed."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while not writer.is_closing() and (request := await self._read(reader)) is not None:
                if request.path.startswith("/v1/residency"):
                    while self.is_silent:
                        await asyncio.sleep(0.05)
                    writer.write(http(200, msgspec.json.encode(report(**self.fields))))
                    await asyncio.sleep(0.02)
                    continue
                self.requests.append(request)
                await self.script(self, request, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # asyncio logs a task of a connection that is cancelled.
            self.num_aborted += 1
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode().strip().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        return Request(method, path, headers, body)


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: RouterApp,
    path: str = "/v1/completions",
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    leaves: asyncio.Event | None = None,
) -> Reply:
    """Send one request; the client closes its connection once `leaves` is set."""
    reply, has_sent = Reply(), False
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )

    async def receive() -> dict[str, Any]:
        nonlocal has_sent
        if has_sent:
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        has_sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            reply.chunks.append(message.get("body", b""))
            reply.is_complete = not message.get("more_body", False)

    given = {"content-type": "application/json", **(headers or {})}
    plain, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": plain, "raw_path": plain.encode(),
        "query_string": query.encode(), "client": ("10.1.2.3", 5),
        "headers": [(k.encode(), v.encode()) for k, v in given.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return reply


@asynccontextmanager
async def running_router(
    *replicas: FakeReplica,
    waits: bool = True,
    options: RouterOptions | None = None,
    **parts: Any,
) -> AsyncIterator[RouterApp]:
    """Start the replicas, and a router that has a report of each of them."""
    for replica in replicas:
        await replica.start()
    options = options or RouterOptions(is_status_open=True)
    app = RouterApp(StaticMembers([replica.url for replica in replicas]), options, **parts)
    messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    told: asyncio.Queue[Any] = asyncio.Queue()
    await messages.put({"type": "lifespan.startup"})
    living = asyncio.create_task(app({"type": "lifespan"}, messages.get, told.put))
    await told.get()
    try:
        while waits and any(r.state is State.UNKNOWN for r in app.fleet.replicas.values()):
            await asyncio.sleep(0.01)
        yield app
    finally:
        await messages.put({"type": "lifespan.shutdown"})
        await living
        for replica in replicas:
            await replica.stop()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


def first_for(app: RouterApp, replicas: list[FakeReplica], name: str) -> list[FakeReplica]:
    """Return the replicas in the order in which the router would try them."""
    now = asyncio.get_running_loop().time()
    by_url = {replica.url: replica for replica in replicas}
    return [by_url[one.url] for one in app.fleet.ranked(name, now=now)]
