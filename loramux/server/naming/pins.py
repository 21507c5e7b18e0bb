"""The adapters that are pinned on this server, by the tenants and keys that pinned them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Pins:
    """The CIDs that each tenant and each key has pinned."""

    cids: dict[str, set[str]] = field(default_factory=dict)
    """By the name of the tenant or key as in messages."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def holds(self, owner: str, cid: str) -> bool:
        return cid in self.cids.get(owner, ())

    def is_held_by_others(self, owners: Collection[str], cid: str) -> bool:
        """Whether a tenant or key other than these has pinned an adapter."""
        return any(cid in held for owner, held in self.cids.items() if owner not in owners)
