"""Locks of names, so that changes of one name run one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NameLocks:
    """A lock for each name, which exists while a call holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        lock, num_users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = lock, num_users + 1
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks.pop(name)
            if num_users > 1:
                self._locks[name] = lock, num_users - 1
