"""Makes room in the pool: whoever holds idle pages offers them, and what is worth least goes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
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


# (is protected, worth, tick, key); entries that an offer no longer names are skipped.
_Entry = tuple[bool, float, int, Hashable]


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
        self._heap: list[_Entry] = []
        # Offers that nobody has asked for again, before their doubt is taken into account: it
        # is the same for all of them and changes with every request, so that no heap can hold it.
        self._doubted: list[_Entry] = []
        self.doubt: Callable[[], float] = lambda: 0.0
        """To be added to the worth of doubted offers at the moment."""
        self._ticks = count()

    def add_holder(self, holder: PageHolder) -> None:
        self._holders.append(holder)

    def offer(
        self,
        key: Hashable,
        holder: PageHolder,
        *,
        worth: float,
        is_protected: bool = False,
        is_doubted: bool = False,
    ) -> None:
        """May be evicted from now on; a second offer of the same key replaces the first."""
        tick = next(self._ticks)
        self._offers[key] = _Offer(tick, holder, is_protected)
        heap = self._doubted if is_doubted else self._heap
        heapq.heappush(heap, (is_protected, worth, tick, key))
        if len(self._heap) + len(self._doubted) > 2 * len(self._offers) + 64:
            for heap in (self._heap, self._doubted):
                heap[:] = [entry for entry in heap if self._is_current(entry)]
                heapq.heapify(heap)

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
            _, _, _, key = heapq.heappop(self._least())
            self._offers.pop(key).holder.evict(key)
        return True

    def check_integrity(self) -> None:
        entries = self._heap + self._doubted
        current = {entry[3] for entry in entries if self._is_current(entry)}
        assert current == self._offers.keys(), "an offer is in no heap"

    def _least(self) -> list[_Entry]:
        """The heap on whose top is what must leave next; there is something to evict."""
        for heap in (self._heap, self._doubted):
            while heap and not self._is_current(heap[0]):
                heapq.heappop(heap)
        if not self._heap or not self._doubted:
            return self._heap or self._doubted
        is_protected, worth, tick, _ = self._doubted[0]
        doubted = (is_protected, worth + self.doubt(), tick)
        return self._doubted if doubted < self._heap[0][:3] else self._heap

    def _is_current(self, entry: _Entry) -> bool:
        offer = self._offers.get(entry[3])
        return offer is not None and offer.tick == entry[2]
