"""Reclaims pages of the pool: evicts idle adapters and cached prefixes in order of their score."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from loramux.memory.pages import PageAllocator
from loramux.memory.policies import EvictionPolicy

# The scheduler imports this module and runs without torch.
if TYPE_CHECKING:
    from loramux.memory.cost import CostModel
    from loramux.memory.records import Placement


class PageHolder(Protocol):
    """Owns pages that may be evicted: the residency of adapters, the prefix cache."""

    def evict(self, key: Hashable) -> None:
        """Frees the pages of a candidate, which the reclaimer has removed already."""
        ...

    @property
    def num_idle_pages(self) -> int:
        """Returns the number of pages that repeated evictions would free, protected ones too."""
        ...

    @property
    def num_protected_pages(self) -> int:
        """Returns the part of num_idle_pages that queued sequences wait for."""
        ...


# (is protected, score, tick, key); an entry whose tick is not the candidate's is stale.
_Entry = tuple[bool, float, int, Hashable]


@dataclass(frozen=True, slots=True)
class _Candidate:
    tick: int
    holder: PageHolder


def _no_penalty() -> float:
    return 0.0


class Reclaimer:
    """Keeps one order of eviction candidates: by score per page, protected ones last."""

    def __init__(
        self, pages: PageAllocator, *, single_use_penalty: Callable[[], float] = _no_penalty
    ) -> None:
        """`single_use_penalty` is added to the score of candidates that were used once only.

        It is the same for all of them and changes with every request, so that it cannot be part
        of a heap's key: such candidates have a heap of their own.
        """
        self._pages = pages
        self._single_use_penalty = single_use_penalty
        self._holders: list[PageHolder] = []
        self._candidates: dict[Hashable, _Candidate] = {}
        self._heap: list[_Entry] = []
        self._single_use: list[_Entry] = []
        self._ticks = count()

    def add_holder(self, holder: PageHolder) -> None:
        self._holders.append(holder)

    def add_candidate(
        self,
        key: Hashable,
        holder: PageHolder,
        *,
        score: float,
        is_protected: bool = False,
        is_single_use: bool = False,
    ) -> None:
        """Allow the eviction of `key`; a second call for the same key replaces the first."""
        tick = next(self._ticks)
        self._candidates[key] = _Candidate(tick, holder)
        heap = self._single_use if is_single_use else self._heap
        heapq.heappush(heap, (is_protected, score, tick, key))
        if len(self._heap) + len(self._single_use) > 2 * len(self._candidates) + 64:
            for heap in (self._heap, self._single_use):
                heap[:] = [entry for entry in heap if self._is_current(entry)]
                heapq.heapify(heap)

    def remove_candidate(self, key: Hashable) -> None:
        self._candidates.pop(key, None)

    def is_candidate(self, key: Hashable) -> bool:
        return key in self._candidates

    @property
    def num_available(self) -> int:
        """Returns the number of pages that are free or could be freed by evictions."""
        return self._pages.num_free + sum(holder.num_idle_pages for holder in self._holders)

    @property
    def num_unprotected(self) -> int:
        """Returns the part of num_available that no queued sequence waits for."""
        protected = sum(holder.num_protected_pages for holder in self._holders)
        return self.num_available - protected

    def reclaim(self, num_pages: int) -> bool:
        """Evicts until num_pages are free; returns False, with no eviction, if that cannot be."""
        if self._pages.num_free >= num_pages:
            return True
        if self.num_available < num_pages:
            return False
        while self._pages.num_free < num_pages:
            _, _, _, key = heapq.heappop(self._heap_of_lowest())
            self._candidates.pop(key).holder.evict(key)
        return True

    def check_integrity(self) -> None:
        entries = self._heap + self._single_use
        current = {entry[3] for entry in entries if self._is_current(entry)}
        assert current == self._candidates.keys(), "a candidate is in no heap"

    def _heap_of_lowest(self) -> list[_Entry]:
        """Return the heap whose top is evicted next; there must be a candidate."""
        for heap in (self._heap, self._single_use):
            while heap and not self._is_current(heap[0]):
                heapq.heappop(heap)
        if not self._heap or not self._single_use:
            return self._heap or self._single_use
        is_protected, score, tick, _ = self._single_use[0]
        penalized = (is_protected, score + self._single_use_penalty(), tick)
        return self._single_use if penalized < self._heap[0][:3] else self._heap

    def _is_current(self, entry: _Entry) -> bool:
        candidate = self._candidates.get(entry[3])
        return candidate is not None and candidate.tick == entry[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTier:
    """The pages of the device and what decides which of them are evicted.

    Adapters and prefixes compete for the pages under one policy, one cost model and one clock.
    """

    pages: PageAllocator
    reclaimer: Reclaimer
    policy: EvictionPolicy
    placement: Placement
    costs: CostModel
    clock: Callable[[], float]
