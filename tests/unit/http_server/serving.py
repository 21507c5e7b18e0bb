"""A small application on a real socket, behind the server's limits of connections."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from loramux.config.connections import ConnectionConfig
from loramux.http_server.serving import DrainingServer, listen, uvicorn_config

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
PIECE = b"x" * 2**20


@dataclass
class App:
    """Reads a body and answers with its length; /endless answers for ever, /held when told.

    /slow begins its answer when told, unless its client leaves.
    """

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    """Headers of the requests for /headers, when their bodies have ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        size, more = 0, True
        while more and scope["path"] != "/refused":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            size += len(message["body"])
            more = message["more_body"]
        self.begun.set()
        if scope["path"] == "/headers":
            self.headers.append(list(scope["headers"]))
        while scope["path"] == "/slow" and not self.released.is_set():
            if (await _now(receive)) == "http.disconnect":
                self.left.set()
                return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/held":
            await self.released.wait()
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            if (await _now(receive)) == "http.disconnect":
                self.left.set()
                return
        await send({"type": "http.response.body", "body": str(size).encode()})


async def _now(receive: Receive) -> str | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            return str((await receive())["type"])
    return None


@dataclass
class Serving:
    app: App
    port: int
    server: DrainingServer
    clients: list[Client] = field(default_factory=list)

    async def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        name = None if tls is None else "localhost"
        opened = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=name
        )
        self.clients.append(Client(*opened))
        return self.clients[-1]

    async def close_clients(self) -> None:
        for client in self.clients:
            client.writer.close()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()

    async def get(self, path: str = "/", tls: ssl.SSLContext | None = None) -> bytes:
        """Return the whole answer of a request on a connection of its own."""
        client = await self.connect(tls)
        await client.send(
            GET.replace(b" / ", f" {path} ".encode()).replace(
                b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"
            )
        )
        return await client.read_to_end()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_to_end(self) -> bytes:
        """Return what the server sends until it closes the connection; a reset ends it too."""
        found = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := await self.reader.read(2**16):
                found += piece
        return bytes(found)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Serving]:
    app, config = App(), ConnectionConfig(**settings)

    async def drain() -> None:
        await app.released.wait()

    server = DrainingServer(
        uvicorn_config(app, config, log_level="warning", drain_s=1), config, drain
    )
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(_serve(server, listener))
        while not server.started:
            await asyncio.sleep(0.005)
        running = Serving(app, listener.getsockname()[1], server)
        try:
            yield running
        finally:
            app.released.set()
            await running.close_clients()
            server.should_exit = server.force_exit = True
            await task


async def _serve(server: DrainingServer, listener: Any) -> None:
    # uvicorn would take the signals of the tests.
    await server._serve([listener])


Work = Callable[[Serving], Awaitable[Any]]


def serve_and(work: Work, **settings: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(30), serving(**settings) as server:
            return await work(server)

    return asyncio.run(run())
