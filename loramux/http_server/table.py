"""The open connections: how many there are, which are idle, and when one has had its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Protocol

from loramux.config.connections import ConnectionConfig

MAX_SWEEP_S = 1.0
SWEEPS_IN_TIMEOUT = 4
# Idle connections that are closed at once for a new one that finds no descriptor.
CLOSED_FOR_DESCRIPTORS = 16


class Connection(Protocol):
    """What the table needs of a connection."""

    def check(self, now: float) -> None:
        """End the connection if its client is too slow."""
        ...

    def close_idle(self) -> None: ...


class Place:
    """One connection's part of what may be open."""

    def __init__(self, connections: Connections, address: str) -> None:
        self._connections = connections
        self._address: str | None = address

    def release(self) -> None:
        """Only the first call counts."""
        if self._address is not None:
            self._connections.release(self._address)
            self._address = None


class Connections:
    """All connections of a server; belongs to the thread of the event loop."""

    def __init__(self, config: ConnectionConfig, *, max_open: int) -> None:
        self.config = config
        self._max_open = max_open
        self._num_open = 0
        self._by_address: Counter[str] = Counter()
        self._made: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Without a request in progress, the one that has been idle longest first."""
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return self._num_open

    def admit(self, address: str) -> Place | None:
        """Count a new connection; None: there may be no more of them."""
        limit = self.config.max_connections_per_address
        if limit is not None and self._by_address[address] >= limit:
            return None
        if self._num_open >= self._max_open and not self.close_idle(1):
            return None
        self._num_open += 1
        self._by_address[address] += 1
        return Place(self, address)

    def release(self, address: str) -> None:
        self._num_open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def close_idle(self, num: int = CLOSED_FOR_DESCRIPTORS) -> bool:
        """Close the connections that have been idle longest; return whether there was one."""
        found = list(self._idle)[:num]
        for connection in found:
            del self._idle[connection]
            connection.close_idle()
        return bool(found)

    def add(self, connection: Connection) -> None:
        self._made.add(connection)
        self._idle[connection] = None

    def discard(self, connection: Connection) -> None:
        self._made.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        self._idle.pop(connection, None)
        if is_idle and connection in self._made:
            self._idle[connection] = None

    def start(self) -> None:
        """Check all connections again and again; needs a running event loop."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        given = self.config
        shortest_s = min(given.header_timeout_s, given.body_timeout_s, given.write_timeout_s)
        while True:
            await asyncio.sleep(min(MAX_SWEEP_S, shortest_s / SWEEPS_IN_TIMEOUT))
            now = loop.time()
            for connection in list(self._made):
                connection.check(now)
