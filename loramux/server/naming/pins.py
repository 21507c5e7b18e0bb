"""The adapters that are pinned on this server, by the tenants and keys that pinned them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field


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
