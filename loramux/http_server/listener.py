"""Accepts connections within limits, and again by itself after descriptors have run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from loramux.http_server.protocol import answer
from loramux.http_server.table import Connections, Place

RETRY_S = 0.25
ACCEPTED_AT_ONCE = 64
TLS_SHUTDOWN_S = 5.0
# accept() fails with these for the connection alone.
ABORTED = {errno.ECONNABORTED, errno.EPROTO, errno.EINTR, errno.ENETDOWN, errno.EHOSTUNREACH}

_log = logging.getLogger(__name__)
MakeProtocol = Callable[[Place], asyncio.Protocol]


class Listener:
    """Takes the place of an asyncio server in uvicorn."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make: MakeProtocol,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """`tls`: returns the context of the next connection; None: plain HTTP."""
        listening.setblocking(False)
        self._socket = listening
        self._connections = connections
        self._make = make
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        num_accepted = 0
        while True:
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno not in ABORTED:
                    _log.warning(
                        "A connection cannot be accepted, and the server tries again: %s", error
                    )
                    self._connections.close_idle()
                    await asyncio.sleep(RETRY_S)
                continue
            num_accepted += 1
            if num_accepted % ACCEPTED_AT_ONCE == 0:
                # sock_accept() does not wait while connections are waiting.
                await asyncio.sleep(0)
            self._admit(connection, address[0])

    def _admit(self, connection: socket.socket, address: str) -> None:
        place = self._connections.admit(address)
        if place is None:
            _log.warning("A connection is refused, as too many are open: the last from %s", address)
            self._refuse(connection)
            return
        task = asyncio.create_task(self._open(connection, place))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if self._tls is None:
                connection.send(answer(503, "Too many connections are open.", retry_after="1"))
                connection.shutdown(socket.SHUT_WR)

    async def _open(self, connection: socket.socket, place: Place) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._connections.config.header_timeout_s
        times = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        try:
            context = None if self._tls is None else self._tls()
            await loop.connect_accepted_socket(
                lambda: self._make(place), connection, ssl=context, **(times if context else {})
            )
        # The client left, spoke no TLS, or took too long.
        except (OSError, TimeoutError) as error:
            _log.debug("A connection was not opened: %s", error)
            place.release()
            connection.close()
        except BaseException:
            place.release()
            connection.close()
            raise
