"""Serves an application on a socket until a signal, with limits of connections and TLS."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from loramux.base.log_lines import limit_repeated_lines
from loramux.config.connections import ConnectionConfig
from loramux.errors import InvalidRequest
from loramux.http_server.listener import Listener
from loramux.http_server.protocol import GuardedProtocol
from loramux.http_server.table import Connections, Place
from loramux.http_server.tls import Certificates

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Drain = Callable[[], Coroutine[Any, Any, None]]
# After the drain every stream has ended; this is the time for closing the sockets.
_CLOSING_S = 5
_BACKLOG = 2048
# The rest is for files, the engine, databases and fetches.
_SHARE_OF_DESCRIPTORS = 0.75


def uvicorn_config(
    app: ASGIApp, config: ConnectionConfig, *, log_level: str, drain_s: float
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        server_header=False,
        # ForwardedMiddleware does that for --trusted-proxies.
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=int(drain_s) + _CLOSING_S,
        timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]
    )


class DrainingServer(uvicorn.Server):
    """On the first signal, `drain` refuses new requests and lets running ones finish."""

    def __init__(self, config: uvicorn.Config, connections: ConnectionConfig, drain: Drain) -> None:
        super().__init__(config)
        self._connections = Connections(connections, max_open=_max_open(connections))
        self._tls = None if connections.ssl_certfile is None else Certificates(connections)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        limit_repeated_lines("uvicorn.error", "loramux.http_server.listener")
        await super().startup(sockets=[])
        self._connections.start()
        tls = None if self._tls is None else self._tls.context
        self.servers = [
            Listener(one, self._connections, self._make_protocol, tls)  # type: ignore[misc]
            for one in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._connections.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's handler would raise the signal again after its shutdown and kill the process.
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            # The server listens until then, so that new requests are told to go elsewhere.
            self._draining.add_done_callback(self._drained)
        elif sig == signal.SIGINT:
            self.force_exit = self.should_exit = True

    def _drained(self, draining: asyncio.Task[None]) -> None:
        self.should_exit = True

    async def wait_until_drained(self) -> None:
        if self._draining is not None and not self.force_exit:
            await self._draining

    def _make_protocol(self, place: Place) -> GuardedProtocol:
        return GuardedProtocol(
            self._connections,
            place,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


async def when_started(server: uvicorn.Server, announce: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    announce()


def allow_many_connections() -> None:
    """Raise the soft limit of open files: every stream is one, and the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With protocol 0 asyncio would not set TCP_NODELAY, and each reply would wait about 40 ms for
    # the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another with --port.",
            param="port",
        ) from error
    listener.listen(_BACKLOG)
    return listener


def _max_open(config: ConnectionConfig) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(1, int(soft * _SHARE_OF_DESCRIPTORS)))
