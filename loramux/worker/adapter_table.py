"""The adapters of a server, and which of them its present engine process knows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic

from loramux.worker.messages import AdapterT


class AdapterTable(Generic[AdapterT]):
    """Holds a card for each adapter by CID; an engine process learns a card before it is used.

    The table outlives engine processes. A new process knows no adapter, and learns the card of one
    just before the first request for it, so that its start does not depend on their number.
    """

    def __init__(self) -> None:
        self.cards: dict[str, AdapterT] = {}
        self.pinned: set[str] = set()
        self._known: set[str] = set()
        # CIDs that requests have used, the least recently used one first.
        self._used: dict[str, None] = {}

    def add(self, card: AdapterT) -> None:
        """Add an adapter that the present engine process has registered itself."""
        self.cards[card.cid] = card
        self._known.add(card.cid)

    def remove(self, cid: str) -> bool:
        """Remove an adapter; return whether the present engine process knows it."""
        del self.cards[cid]
        self.pinned.discard(cid)
        self._used.pop(cid, None)
        is_known = cid in self._known
        self._known.discard(cid)
        return is_known

    def mark_used(self, cid: str) -> None:
        self._used.pop(cid, None)
        self._used[cid] = None

    def take_unknown(self, cids: Iterable[str]) -> list[AdapterT]:
        """Return the cards that the engine must learn, and counts them as known from now on.

        CIDs that are not in the table, or not any more, are left out.
        """
        unknown = [cid for cid in cids if cid in self.cards and cid not in self._known]
        self._known.update(unknown)
        return [self.cards[cid] for cid in unknown]

    def hottest(self, resident: Collection[str]) -> list[str]:
        """Return the resident adapters, the most recently used one first."""
        return [cid for cid in reversed(self._used) if cid in resident]

    def begin_process(self) -> None:
        """Record that a new engine process is running, which knows no adapter yet."""
        self._known.clear()
