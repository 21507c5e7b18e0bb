"""Makes room in the pool: whoever holds idle pages offers them, and what is worth least goes."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from loramux.memory.pages import PageAllocator


class PageHolder(Protocol):
    """Something with pages that nobody uses right now: idle adapters, cached prefixes."""

    def evict(self, key: Hashable) -> None:
        """Frees the pages of what was offered under this key; the offer is already withdrawn."""
        ...

    @property
    def num_idle_pages(self) -> int:
        """All that could be had by evicting again and again, protected ones included."""
        ...

    @property
    def num_protected_pages(self) -> int:
        """The part of num_idle_pages that somebody in the queue waits for."""
        ...


@dataclass(frozen=True, slots=True)
class _Offer:
    tick: int
    holder: PageHolder
    is_protected: bool


class Reclaimer:
    """One order for adapters and prefixes: worth per page, protected ones after all others."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._holders: list[PageHolder] = []
        self._offers: dict[Hashable, _Offer] = {}
        # (is protected, worth, tick, key); entries that an offer no longer names are skipped.
        self._heap: list[tuple[bool, float, int, Hashable]] = []
        self._ticks = count()

    def add_holder(self, holder: PageHolder) -> None:
        self._holders.append(holder)

    def offer(
        self, key: Hashable, holder: PageHolder, *, worth: float, is_protected: bool = False
    ) -> None:
        """May be evicted from now on; a second offer of the same key replaces the first."""
        tick = next(self._ticks)
        self._offers[key] = _Offer(tick, holder, is_protected)
        heapq.heappush(self._heap, (is_protected, worth, tick, key))
        if len(self._heap) > 2 * len(self._offers) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry[3], entry[2])]
            heapq.heapify(self._heap)

    def withdraw(self, key: Hashable) -> None:
        self._offers.pop(key, None)

    def is_offered(self, key: Hashable) -> bool:
        return key in self._offers

    @property
    def num_available(self) -> int:
        """Pages that are free, or would be if all that is idle were evicted."""
        return self._pages.num_free + sum(holder.num_idle_pages for holder in self._holders)

    @property
    def num_unprotected(self) -> int:
        protected = sum(holder.num_protected_pages for holder in self._holders)
        return self.num_available - protected

    def make_room(self, num_pages: int, *, spare_protected: bool = False) -> bool:
        """Evicts until num_pages are free; False: cannot, and nothing was evicted."""
        if self._pages.num_free >= num_pages:
            return True
        limit = self.num_unprotected if spare_protected else self.num_available
        if limit < num_pages:
            return False
        while self._pages.num_free < num_pages:
            _, _, tick, key = heapq.heappop(self._heap)
            if self._is_current(key, tick):
                offer = self._offers.pop(key)
                offer.holder.evict(key)
        return True

    def check_integrity(self) -> None:
        current = {key for _, _, tick, key in self._heap if self._is_current(key, tick)}
        assert current == self._offers.keys(), "an offer is not in the heap"

    def _is_current(self, key: Hashable, tick: int) -> bool:
        offer = self._offers.get(key)
        return offer is not None and offer.tick == tick
