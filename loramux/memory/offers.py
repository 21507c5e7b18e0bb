"""Which adapters the pool may take back, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from loramux.errors import DoesNotFit
from loramux.memory.pages import Owner
from loramux.memory.policies import EvictionPolicy
from loramux.memory.reclaim import PageHolder, Reclaimer
from loramux.memory.records import AdapterRecord, LowerTiers


class PrefixWorth(Protocol):
    """What the prefix cache and the residency tell each other."""

    def adapter_moved(self, cid: str, *, on_device: bool) -> None: ...

    def worth_of(self, cid: str) -> float: ...

    def drop(self, cid: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyLimits:
    """What adapters may take of the pool at most; None: all of it."""

    max_pages: int | None = None
    max_adapters: int | None = None

    def are_kept(self, num_pages: int, num_adapters: int) -> bool:
        return (self.max_pages is None or num_pages <= self.max_pages) and (
            self.max_adapters is None or num_adapters <= self.max_adapters
        )

    def check(self, records: Sequence[AdapterRecord]) -> None:
        """Raises for a selection that could never be on the device at once."""
        wanted = {record.cid: record.num_pages for record in records}
        if not self.are_kept(sum(wanted.values()), len(wanted)):
            raise DoesNotFit(
                f"The request's {len(wanted)} adapters take {sum(wanted.values())} pages, more "
                f"than adapters may have here: {self.max_pages or 'all'} pages, in at most "
                f"{self.max_adapters or 'any number of'} adapters. Ask for fewer, or raise the "
                "limits."
            )


class AdapterOffers:
    """Idle adapters are offered to the reclaimer by worth, those somebody waits for last of all."""

    def __init__(self, room: Reclaimer, policy: EvictionPolicy, tiers: LowerTiers) -> None:
        self._room = room
        self._policy = policy
        self._tiers = tiers
        self.prefixes: PrefixWorth | None = None
        self.num_idle_pages = 0
        self.num_protected_pages = 0

    def settle(self, record: AdapterRecord, holder: PageHolder, *, is_idle: bool) -> None:
        """Offers what is on the device and idle; takes back what is not."""
        is_offered = is_idle and not record.is_pinned
        is_protected = is_offered and record.num_wants > 0
        self._mark(record, is_offered=is_offered, is_protected=is_protected)
        if is_offered:
            # Of those that the queue waits for, the one that was asked for last goes first.
            worth = -float(record.want_tick) if is_protected else self.worth(record)
            self._room.offer(owner_of(record.cid), holder, worth=worth, is_protected=is_protected)
        else:
            self._room.withdraw(owner_of(record.cid))

    def clear(self, record: AdapterRecord) -> None:
        self._mark(record, is_offered=False, is_protected=False)
        self._room.withdraw(owner_of(record.cid))

    def worth(self, record: AdapterRecord) -> float:
        """Seconds that a page of it saves: its reload, and what its cached prefixes would lose."""
        cost_s = self._tiers.reload_s(record.cid, record.known.num_bytes)
        if self.prefixes is not None:
            cost_s += self.prefixes.worth_of(record.cid)
        return self._policy.worth(record.cid, cost_s=cost_s, size=record.num_pages)

    def over_limits(
        self, new: AdapterRecord, held: Collection[AdapterRecord], limits: ResidencyLimits
    ) -> list[AdapterRecord] | None:
        """Adapters to evict so that one more keeps the limits; None: that is not possible.

        `held`: those that have pages.
        """
        num_adapters = len(held) + 1
        num_pages = 0
        if limits.max_pages is not None:
            num_pages = sum(record.num_pages for record in held) + new.num_pages
        # Thousands may be on the device, and a load must not look at each of them in vain.
        if limits.are_kept(num_pages, num_adapters):
            return []
        idle = [record for record in held if record.is_offered and gives_way(record, new)]
        idle.sort(key=lambda record: (record.is_protected, self.worth(record)), reverse=True)
        victims: list[AdapterRecord] = []
        while not limits.are_kept(num_pages, num_adapters):
            if not idle:
                return None
            victims.append(idle.pop())
            num_pages -= victims[-1].num_pages
            num_adapters -= 1
        return victims

    def check_integrity(self, records: list[AdapterRecord]) -> None:
        for record in records:
            assert record.is_offered == self._room.is_offered(owner_of(record.cid))
            assert record.is_offered or not record.is_protected
        idle = sum(record.num_pages for record in records if record.is_offered)
        protected = sum(record.num_pages for record in records if record.is_protected)
        assert (idle, protected) == (self.num_idle_pages, self.num_protected_pages)

    def _mark(self, record: AdapterRecord, *, is_offered: bool, is_protected: bool) -> None:
        self.num_idle_pages += record.num_pages * (is_offered - record.is_offered)
        self.num_protected_pages += record.num_pages * (is_protected - record.is_protected)
        record.is_offered, record.is_protected = is_offered, is_protected


def gives_way(idle: AdapterRecord, new: AdapterRecord) -> bool:
    """Nobody waits for the idle one, or only those who asked after the new one was asked for."""
    return not idle.is_protected or (new.num_wants > 0 and idle.want_tick > new.want_tick)


def owner_of(cid: str) -> Owner:
    return ("adapter", cid)
