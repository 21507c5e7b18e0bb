"""Which adapters have their weights in pool pages, and how those that are wanted get there.

Everything here runs on the step loop's thread; only the moving of bytes happens elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from loramux.errors import DoesNotFit
from loramux.memory.loader import Arrival
from loramux.memory.offers import (
    AdapterOffers,
    PrefixWorth,
    ResidencyLimits,
    gives_way,
    owner_of,
)
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.policies import EvictionPolicy
from loramux.memory.reclaim import Reclaimer
from loramux.memory.records import AdapterRecord, LowerTiers, MoveListeners, ResidentAdapter
from loramux.memory.tiers import AdapterState

_WAIT_S = 0.05
# Moves that changes_since() can report one by one; a reader further behind gets the full set.
_MAX_LOGGED_MOVES = 1024


@dataclass(frozen=True, slots=True)
class ResidencyDelta:
    """Describes which adapters came to the device or left it since an earlier version."""

    version: int
    arrived: tuple[str, ...]
    left: tuple[str, ...]
    is_full: bool = False
    """If true, `arrived` is the whole resident set and replaces what the reader had."""


class AdapterResidency:
    """want() starts a load, poll() takes what arrived, acquire() leases what is there.

    A leased adapter is in use by a running sequence and is never evicted. One that somebody in the
    queue waits for is protected: it goes only when nothing else is left to evict.
    """

    def __init__(
        self,
        *,
        pages: PageAllocator,
        room: Reclaimer,
        tiers: LowerTiers,
        policy: EvictionPolicy,
        pages_for: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        self._pages = pages
        self._room = room
        self._tiers = tiers
        self._policy = policy
        self._pages_for = pages_for
        self._clock = clock
        self.limits = ResidencyLimits()
        self._offers = AdapterOffers(room, policy, tiers)
        self._records: dict[str, AdapterRecord] = {}
        self._resident: dict[str, ResidentAdapter] = {}
        # Those that have pages, filled or not.
        self._held: dict[str, AdapterRecord] = {}
        # Wanted, and neither on the device nor on the way; in the order of asking.
        self._pending: dict[str, None] = {}
        self._prewarm: dict[str, None] = {}
        self._ticks = count()
        # The most recent moves on or off the device; `version` counts all of them.
        self._moves: deque[str] = deque(maxlen=_MAX_LOGGED_MOVES)
        self.version = 0
        """Incremented whenever an adapter comes to the device or leaves it."""
        self.num_held_pages = 0
        """Pages that adapters own, loaded or still loading."""
        self.listeners = MoveListeners()
        tiers.on_device = self._resident
        room.add_holder(self)

    # What the scheduler asks.

    def num_pages(self, cid: str) -> int:
        return self._record(cid).num_pages

    def want(self, cids: Iterable[str]) -> None:
        records = [self._record(cid) for cid in cids]
        self.limits.check(records)
        for record in records:
            if record.num_wants == 0:
                record.error = None
                record.want_tick = next(self._ticks)
            record.num_wants += 1
            self._count_use(record)
            self._settle(record)
            if record.cid not in self._resident and not record.is_in_flight:
                self._pending[record.cid] = None

    def unwant(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records[cid]
            record.num_wants -= 1
            self._settle(record)
            if record.num_wants == 0:
                record.error = None
                if not record.is_pinned:
                    self._pending.pop(cid, None)

    def hurry(self, cids: Iterable[str]) -> None:
        """Before all others that are waited for: these may take the place of any idle adapter."""
        for cid in cids:
            record = self._records[cid]
            record.want_tick = -next(self._ticks)
            self._settle(record)
            if cid in self._pending:
                del self._pending[cid]
                self._pending = {cid: None, **self._pending}

    def is_ready(self, cids: Iterable[str]) -> bool:
        """Raises the error of a load that failed since it was wanted."""
        ready = True
        for cid in cids:
            error = self._records[cid].error
            if error is not None:
                raise error
            ready = ready and cid in self._resident
        return ready

    def acquire(self, cids: Iterable[str]) -> bool:
        wanted = list(cids)
        if not all(cid in self._resident for cid in wanted):
            return False
        for cid in wanted:
            self._resident[cid].num_leases += 1
            self._settle(self._records[cid])
        return True

    def release(self, cids: Iterable[str]) -> None:
        for cid in cids:
            self._resident[cid].num_leases -= 1
            self._settle(self._records[cid])

    def missing_pages(self, cids: Iterable[str]) -> int:
        records = [self._record(cid) for cid in set(cids)]
        return sum(record.num_pages for record in records if not record.page_ids)

    # What the engine asks.

    @property
    def prefixes(self) -> PrefixWorth | None:
        return self._offers.prefixes

    @prefixes.setter
    def prefixes(self, prefixes: PrefixWorth) -> None:
        self._offers.prefixes = prefixes

    @property
    def resident(self) -> Mapping[str, ResidentAdapter]:
        return self._resident

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        return self._records

    @property
    def num_held(self) -> int:
        """Number of adapters that own pages, loaded or still loading."""
        return len(self._held)

    def changes_since(self, version: int) -> ResidencyDelta:
        """Returns the difference between the resident set at `version` and the current one.

        The result is the full set if `version` is older than the log of moves.
        """
        num_moves = self.version - version
        if not 0 <= num_moves <= len(self._moves):
            return ResidencyDelta(self.version, tuple(self._resident), (), is_full=True)
        recent = dict.fromkeys(islice(reversed(self._moves), num_moves))
        arrived = tuple(cid for cid in recent if cid in self._resident)
        left = tuple(cid for cid in recent if cid not in self._resident)
        return ResidencyDelta(self.version, arrived, left)

    @property
    def is_loading(self) -> bool:
        return self._tiers.loader.num_open > 0

    def __contains__(self, cid: str) -> bool:
        return cid in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def poll(self, *, timeout_s: float = 0.0) -> int:
        """Takes what has arrived and starts what there is room for; returns how many moved."""
        arrivals = self._tiers.loader.arrivals(timeout_s=timeout_s)
        for arrival in arrivals:
            self._receive(arrival)
        return len(arrivals) + self._start_loads()

    def load_now(self, cids: Iterable[str]) -> bool:
        """Waits for the adapters and leases them; False: the pool has no room for them at once."""
        wanted = list(cids)
        self.want(wanted)
        try:
            self.poll()
            while not self.is_ready(wanted):
                if not self.is_loading:
                    return False
                self.poll(timeout_s=_WAIT_S)
            return self.acquire(wanted)
        finally:
            self.unwant(wanted)

    def pin(self, cid: str, *, is_pinned: bool) -> None:
        """A pinned adapter is brought to the device and stays there."""
        record = self._record(cid)
        pinned = sum(r.num_pages for r in self._records.values() if r.is_pinned and r is not record)
        if is_pinned and pinned + record.num_pages > self._pages.num_pages // 2:
            raise DoesNotFit(
                f"Pinning {cid} would give more than half of the pool's {self._pages.num_pages} "
                "pages to pinned adapters, and requests need the rest. Unpin another first."
            )
        record.is_pinned = is_pinned
        self._settle(record)
        if is_pinned and cid not in self._resident and not record.is_in_flight:
            self._pending[cid] = None

    def prewarm(self, cids: Iterable[str]) -> None:
        """Brings adapters up while there is room to spare; nothing is evicted for them."""
        self._prewarm.update(dict.fromkeys(cids))

    def forget(self, cid: str) -> bool:
        """Frees all that an adapter holds; False: it is in use or on the way, nothing was done."""
        record = self._records.get(cid)
        if record is not None:
            leased = cid in self._resident and self._resident[cid].num_leases > 0
            if record.num_wants or leased or record.is_in_flight:
                return False
            record.is_pinned = False
            if cid in self._resident:
                self.evict(owner_of(cid))
            self._pending.pop(cid, None)
            del self._records[cid]
        self._prewarm.pop(cid, None)
        self._tiers.host.drop(cid)
        self._policy.forget(cid)
        if self.prefixes is not None:
            self.prefixes.drop(cid)
        return True

    # What the reclaimer asks.

    @property
    def num_idle_pages(self) -> int:
        return self._offers.num_idle_pages

    @property
    def num_protected_pages(self) -> int:
        return self._offers.num_protected_pages

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple)
        record = self._records[key[1]]
        resident = self._resident.pop(record.cid)
        self._log_move(record.cid)
        assert resident.num_leases == 0, f"{record.cid} is in use"
        self._offers.clear(record)
        self.listeners.leave(record.cid)
        self._free_pages(record)
        record.move(self._tiers.resting_place(record.cid))
        self._tiers.device_counters.evictions += 1
        self._policy.evicted(record.num_pages / self._pages.num_pages)
        if record.num_wants:
            self._pending[record.cid] = None
        if self.prefixes is not None:
            self.prefixes.adapter_moved(record.cid, on_device=False)

    def claims(self) -> dict[Owner, list[int]]:
        return {owner_of(cid): record.page_ids for cid, record in self._held.items()}

    def check_integrity(self, leases: Mapping[str, int]) -> None:
        """`leases`: how many running sequences use each adapter."""
        held = {cid: r.num_leases for cid, r in self._resident.items() if r.num_leases}
        assert held == {cid: n for cid, n in leases.items() if n}, f"{held} != {leases}"
        for cid, record in self._records.items():
            assert (record.state is AdapterState.DEVICE) == (cid in self._resident)
            assert not record.page_ids or len(record.page_ids) == record.num_pages
            assert (cid in self._held) == bool(record.page_ids)
            assert record.page_ids or record.state is not AdapterState.DEVICE
            if record.num_wants and record.error is None and cid not in self._resident:
                assert record.is_in_flight or cid in self._pending, f"{cid} is wanted in vain"
        assert self.num_held_pages == sum(len(r.page_ids) for r in self._held.values())
        self._offers.check_integrity(list(self._records.values()))
        self._tiers.host.check_integrity()

    def _record(self, cid: str) -> AdapterRecord:
        record = self._records.get(cid)
        if record is None:
            known = self._tiers.catalog.get(cid)
            record = AdapterRecord(known, self._pages_for(known.num_elements))
            self._records[cid] = record
        return record

    def _count_use(self, record: AdapterRecord) -> None:
        now = self._clock()
        self._policy.used(record.cid, now)
        record.last_use_s = now
        if record.cid in self._resident:
            record.hits += 1
            self._tiers.count_use(record.cid, AdapterState.DEVICE, now)
        else:
            record.misses += 1
            self._tiers.count_use(record.cid, self._tiers.resting_place(record.cid), now)

    def _start_loads(self) -> int:
        num_started = 0
        for cid in list(self._pending):
            if self._tiers.loader.num_open >= self._tiers.loader.max_open:
                return num_started
            num_started += self._start(self._records[cid])
        while self._prewarm and not self._pending and not self.is_loading:
            record = self._record(next(iter(self._prewarm)))
            del self._prewarm[record.cid]
            is_absent = record.cid not in self._resident
            if is_absent and record.num_pages <= self._pages.num_free:
                num_started += self._start(record)
        return num_started

    def _start(self, record: AdapterRecord) -> bool:
        tiers, cid = self._tiers, record.cid
        has_pages = self._take_pages(record)
        if not record.is_in_flight:
            record.load_origin = tiers.resting_place(cid)
            record.move(record.load_origin)
        if record.state is AdapterState.HOST:
            if not has_pages:
                return False
            record.move(AdapterState.COPYING)
            tiers.loader.copy(tiers.host.hold(cid), record.page_ids)
        else:
            try:
                has_room = tiers.host.reserve(cid, record.known.num_bytes)
            except DoesNotFit as error:
                record.error = error
                has_room = False
                self._pending.pop(cid, None)
            if not has_room:
                self._free_pages(record)
                return False
            record.move(AdapterState.READING)
            tiers.loader.read(cid, record.page_ids)
        self._pending.pop(cid, None)
        return True

    def _receive(self, arrival: Arrival) -> None:
        record = self._records[arrival.cid]
        was_copying = record.state is AdapterState.COPYING
        if was_copying:
            self._tiers.host.unhold(arrival.cid)
        if arrival.image is None:
            self._fail(record, arrival, was_copying=was_copying)
            return
        if not was_copying:
            self._tiers.keep_in_host(arrival, record.known.num_bytes)
        record.load_s = arrival.read_s + arrival.copy_s
        if record.page_ids:
            self._arrive(record, arrival)
        else:
            record.move(AdapterState.HOST)
            if record.num_wants or record.is_pinned:
                self._pending[record.cid] = None

    def _fail(self, record: AdapterRecord, arrival: Arrival, *, was_copying: bool) -> None:
        if not was_copying:
            self._tiers.host.unreserve(record.cid)
        record.error = arrival.error
        record.is_pinned = False
        self._free_pages(record)
        record.move(self._tiers.resting_place(record.cid))
        self._tiers.device_counters.failures += 1

    def _arrive(self, record: AdapterRecord, arrival: Arrival) -> None:
        assert arrival.image is not None
        resident = ResidentAdapter(record.cid, arrival.image.layout, record.page_ids)
        try:
            self.listeners.arrive(resident)
        except DoesNotFit as error:
            self._fail(record, replace(arrival, error=error), was_copying=True)
            return
        record.move(AdapterState.DEVICE)
        self._resident[record.cid] = resident
        self._log_move(record.cid)
        self._tiers.device_counters.loaded(record.known.num_bytes, arrival.copy_s)
        self._settle(record)
        if self.prefixes is not None:
            self.prefixes.adapter_moved(record.cid, on_device=True)

    def _take_pages(self, new: AdapterRecord) -> bool:
        """Pages for an adapter, at the cost of what is idle and was not asked for before it."""
        victims = self._offers.over_limits(new, self._held.values(), self.limits)
        if victims is None:
            return False
        room = self._room
        if room.num_unprotected < new.num_pages:
            held = self._held.values()
            later = sum(r.num_pages for r in held if r.is_protected and gives_way(r, new))
            if room.num_unprotected + later < new.num_pages:
                return False
        for victim in victims:
            self.evict(owner_of(victim.cid))
        room.make_room(new.num_pages)
        page_ids = self._pages.allocate_settled(owner_of(new.cid), new.num_pages)
        assert page_ids is not None
        new.page_ids = page_ids
        self._held[new.cid] = new
        self.num_held_pages += new.num_pages
        self.listeners.take_pages(page_ids)
        return True

    def _free_pages(self, record: AdapterRecord) -> None:
        self._pages.release(owner_of(record.cid), record.page_ids)
        self.num_held_pages -= len(record.page_ids)
        record.page_ids = []
        self._held.pop(record.cid, None)

    def _log_move(self, cid: str) -> None:
        self._moves.append(cid)
        self.version += 1

    def _settle(self, record: AdapterRecord) -> None:
        resident = self._resident.get(record.cid)
        is_idle = resident is not None and resident.num_leases == 0
        self._offers.settle(record, self, is_idle=is_idle)
