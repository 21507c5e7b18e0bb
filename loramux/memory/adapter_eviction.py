"""Decides which adapters may be evicted from the device, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from loramux.errors import DoesNotFit
from loramux.memory.pages import Owner
from loramux.memory.reclaim import PageHolder, PageTier
from loramux.memory.records import AdapterRecord


class AdapterPrefixes(Protocol):
    """The part of the prefix cache that the residency of adapters calls."""

    def adapter_moved(self, cid: str) -> None:
        """Update the cache after an adapter came to the device or left it."""
        ...

    def cost_of_eviction(self, cid: str) -> float:
        """Return the seconds per request that prefixes lose when the adapter is evicted."""
        ...

    def drop(self, cid: str) -> None:
        """Remove the prefixes of an adapter that was unregistered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyLimits:
    """Upper limits on what adapters may take of the pool; None for no limit."""

    max_pages: int | None = None
    max_adapters: int | None = None

    def allow(self, num_pages: int, num_adapters: int) -> bool:
        return (self.max_pages is None or num_pages <= self.max_pages) and (
            self.max_adapters is None or num_adapters <= self.max_adapters
        )

    def check(self, records: Sequence[AdapterRecord]) -> None:
        """Raise DoesNotFit for a selection that could never be on the device at once."""
        wanted = {record.cid: record.num_pages for record in records}
        if not self.allow(sum(wanted.values()), len(wanted)):
            raise DoesNotFit(
                f"The request's {len(wanted)} adapters take {sum(wanted.values())} pages, more "
                f"than adapters may have here: {self.max_pages or 'all'} pages, in at most "
                f"{self.max_adapters or 'any number of'} adapters. Ask for fewer, or raise the "
                "limits."
            )


class AdapterEviction:
    """Keeps the reclaimer's candidates up to date: idle adapters by score, awaited ones last."""

    def __init__(
        self, tier: PageTier, *, limits: ResidencyLimits, prefixes: AdapterPrefixes | None
    ) -> None:
        self._reclaimer = tier.reclaimer
        self._policy = tier.policy
        self._costs = tier.costs
        self._limits = limits
        self._prefixes = prefixes
        self.num_idle_pages = 0
        self.num_protected_pages = 0

    def update(self, record: AdapterRecord, holder: PageHolder, *, is_idle: bool) -> None:
        """Add the adapter to the candidates if it is on the device and idle, else removes it."""
        is_candidate = is_idle and not record.is_pinned
        is_protected = is_candidate and record.num_waiters > 0
        self._mark(record, is_candidate=is_candidate, is_protected=is_protected)
        if is_candidate:
            # Of the protected adapters, the one that was requested last is evicted first.
            score = -float(record.wait_tick) if is_protected else self.score(record)
            self._reclaimer.add_candidate(
                owner_of(record.cid), holder, score=score, is_protected=is_protected
            )
        else:
            self._reclaimer.remove_candidate(owner_of(record.cid))

    def clear(self, record: AdapterRecord) -> None:
        self._mark(record, is_candidate=False, is_protected=False)
        self._reclaimer.remove_candidate(owner_of(record.cid))

    def score(self, record: AdapterRecord) -> float:
        """Scores an adapter by the cost of its reload and of what its prefixes would lose."""
        cost_s = self._costs.reload_s(record.cid, record.known.num_bytes)
        if self._prefixes is not None:
            cost_s += self._prefixes.cost_of_eviction(record.cid)
        return self._policy.score(record.cid, cost_s=cost_s, size=record.num_pages)

    def victims_for_limits(
        self, new: AdapterRecord, held: Collection[AdapterRecord]
    ) -> list[AdapterRecord] | None:
        """Return the adapters to evict so that `new` is within the limits; None if impossible.

        `held` are the adapters that own pages.
        """
        num_adapters = len(held) + 1
        num_pages = 0
        if self._limits.max_pages is not None:
            num_pages = sum(record.num_pages for record in held) + new.num_pages
        # The usual case must not scan the thousands of adapters that may be on the device.
        if self._limits.allow(num_pages, num_adapters):
            return []
        idle = [record for record in held if record.is_candidate and yields_to(record, new)]
        idle.sort(key=lambda record: (record.is_protected, self.score(record)), reverse=True)
        victims: list[AdapterRecord] = []
        while not self._limits.allow(num_pages, num_adapters):
            if not idle:
                return None
            victims.append(idle.pop())
            num_pages -= victims[-1].num_pages
            num_adapters -= 1
        return victims

    def check_integrity(self, records: list[AdapterRecord]) -> None:
        for record in records:
            assert record.is_candidate == self._reclaimer.is_candidate(owner_of(record.cid))
            assert record.is_candidate or not record.is_protected
        idle = sum(record.num_pages for record in records if record.is_candidate)
        protected = sum(record.num_pages for record in records if record.is_protected)
        assert (idle, protected) == (self.num_idle_pages, self.num_protected_pages)

    def _mark(self, record: AdapterRecord, *, is_candidate: bool, is_protected: bool) -> None:
        self.num_idle_pages += record.num_pages * (is_candidate - record.is_candidate)
        self.num_protected_pages += record.num_pages * (is_protected - record.is_protected)
        record.is_candidate, record.is_protected = is_candidate, is_protected


def yields_to(idle: AdapterRecord, new: AdapterRecord) -> bool:
    """Return whether `idle` has no waiters, or its first one arrived after the one of `new`."""
    return not idle.is_protected or (new.num_waiters > 0 and idle.wait_tick > new.wait_tick)


def owner_of(cid: str) -> Owner:
    return ("adapter", cid)
