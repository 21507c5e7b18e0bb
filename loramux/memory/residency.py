"""Residency of adapters: which ones are in pool pages, and the loads that bring them there.

All of it runs on the step loop's thread; only reads and copies run on the loader's threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from loramux.adapters.packed.image import AdapterImage
from loramux.errors import DoesNotFit
from loramux.memory.adapter_eviction import (
    AdapterEviction,
    AdapterPrefixes,
    ResidencyLimits,
    owner_of,
    yields_to,
)
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader, LoadResult
from loramux.memory.pages import Owner
from loramux.memory.reclaim import PageTier
from loramux.memory.records import AdapterRecord, ResidentAdapter
from loramux.memory.tiers import AdapterState
from loramux.types.adapter import AdapterCard

_WAIT_S = 0.05
_SLOWEST_FIRST = (
    AdapterState.SOURCE,
    AdapterState.DISK,
    AdapterState.HOST,
    AdapterState.DEVICE,
)


class Catalog(Protocol):
    """Knows the registered adapters by CID."""

    def get(self, cid: str) -> AdapterCard:
        """Raise AdapterNotFound."""
        ...


class AdapterMemory(Protocol):
    """The memory of an executor for adapters; called on the step loop's thread."""

    @property
    def page_bytes(self) -> int: ...

    def fence(self, page_ids: list[int]) -> None:
        """Make the next write of these pages wait for the steps launched so far."""
        ...

    def add(self, adapter: ResidentAdapter) -> None:
        """Lets steps use an adapter whose pages are written.

        Raises DoesNotFit if the executor's table of adapters is full; then the load has failed.
        """
        ...

    def forget(self, cid: str) -> None:
        """Undoes `add`; the pages may have another owner afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTiers:
    """The tiers below the device, and the threads that load adapters from them."""

    catalog: Catalog
    host: HostTier
    disk: DiskTier | None
    loader: AdapterLoader


class AdapterResidency:
    """Loads adapters into pages and leases them to running sequences.

    add_waiters() starts a load, poll() takes the loads that have ended, acquire() leases resident
    adapters. A leased adapter is used by a running sequence and never evicted. An adapter that
    queued sequences wait for is protected: it is evicted only if there is no other candidate.
    """

    def __init__(
        self,
        tier: PageTier,
        *,
        memory: AdapterMemory,
        lower: LowerTiers,
        limits: ResidencyLimits | None = None,
        prefixes: AdapterPrefixes | None = None,
    ) -> None:
        self._pages = tier.pages
        self._memory = memory
        self._reclaimer = tier.reclaimer
        self._placement = tier.placement
        self._tiers = lower
        self._costs = tier.costs
        self._policy = tier.policy
        self._clock = tier.clock
        self.limits = limits or ResidencyLimits()
        self._prefixes = prefixes
        self._eviction = AdapterEviction(tier, limits=self.limits, prefixes=prefixes)
        self._records: dict[str, AdapterRecord] = {}
        self._resident = tier.placement.device
        # Adapters that own pages, loaded or still loading.
        self._held: dict[str, AdapterRecord] = {}
        # Adapters to be loaded whose load has not started, in order of arrival.
        self._pending: dict[str, None] = {}
        self._prewarm: dict[str, None] = {}
        self._ticks = count()
        self.num_held_pages = 0
        """Pages that adapters own, loaded or still loading."""
        tier.reclaimer.add_holder(self)

    # Called by the scheduler.

    def num_pages(self, cid: str) -> int:
        return self._record(cid).num_pages

    def add_waiters(self, cids: Iterable[str]) -> None:
        """Add one waiter to each adapter; load those that are not on the device."""
        records = [self._record(cid) for cid in cids]
        self.limits.check(records)
        for record in records:
            if record.num_waiters == 0:
                record.error = None
                record.wait_tick = next(self._ticks)
            record.num_waiters += 1
            self._count_use(record)
            self._update_candidate(record)
            if record.cid not in self._resident and not record.is_in_flight:
                self._pending[record.cid] = None

    def remove_waiters(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records[cid]
            record.num_waiters -= 1
            self._update_candidate(record)
            if record.num_waiters == 0:
                record.error = None
                if not record.is_pinned:
                    self._pending.pop(cid, None)

    def prioritize(self, cids: Iterable[str]) -> None:
        """Move adapters before all others that wait for pages; they may evict any idle one."""
        for cid in cids:
            record = self._records[cid]
            record.wait_tick = -next(self._ticks)
            self._update_candidate(record)
            if cid in self._pending:
                del self._pending[cid]
                self._pending = {cid: None, **self._pending}

    def is_ready(self, cids: Iterable[str]) -> bool:
        """Return whether all are on the device; raise the error of a load that failed."""
        ready = True
        for cid in cids:
            error = self._records[cid].error
            if error is not None:
                raise error
            ready = ready and cid in self._resident
        return ready

    def acquire(self, cids: Iterable[str]) -> bool:
        """Leases all of them; returns False, without a lease, if one is not on the device."""
        wanted = list(cids)
        if not all(cid in self._resident for cid in wanted):
            return False
        for cid in wanted:
            self._resident[cid].num_leases += 1
            self._update_candidate(self._records[cid])
        return True

    def release(self, cids: Iterable[str]) -> None:
        for cid in cids:
            self._resident[cid].num_leases -= 1
            self._update_candidate(self._records[cid])

    def missing_pages(self, cids: Iterable[str]) -> int:
        """Return the number of pages that the adapters need and do not own yet."""
        records = [self._record(cid) for cid in set(cids)]
        return sum(record.num_pages for record in records if not record.page_ids)

    def tier_of(self, cid: str) -> AdapterState:
        """Return the fastest tier of an adapter; during a load that from which it is loaded."""
        record = self._records.get(cid)
        if record is not None and record.is_in_flight:
            return record.load_origin
        if cid in self._resident:
            return AdapterState.DEVICE
        return self._placement.resting_state(cid)

    def tier_found(self, cids: Iterable[str]) -> AdapterState | None:
        """Return the slowest tier that a request finds its adapters in; None without adapters."""
        return min(map(self.tier_of, cids), key=_SLOWEST_FIRST.index, default=None)

    def load_s(self, cids: Iterable[str]) -> float:
        """Return the seconds of the longest of the adapters' last loads."""
        found = (self._records.get(cid) for cid in cids)
        return max((record.load_s for record in found if record is not None), default=0.0)

    # Called by the engine.

    @property
    def resident(self) -> Mapping[str, ResidentAdapter]:
        return self._resident

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        return self._records

    @property
    def is_loading(self) -> bool:
        return self._tiers.loader.num_active > 0

    def __contains__(self, cid: str) -> bool:
        return cid in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def poll(self, *, timeout_s: float = 0.0) -> int:
        """Take the loads that have ended and starts new ones; return the number of both."""
        results = self._tiers.loader.results(timeout_s=timeout_s)
        for result in results:
            self._finish_load(result)
        return len(results) + self._start_loads()

    def load_now(self, cids: Iterable[str]) -> bool:
        """Wait for the adapters and lease them; return False if they do not fit at once."""
        wanted = list(cids)
        self.add_waiters(wanted)
        try:
            self.poll()
            while not self.is_ready(wanted):
                if not self.is_loading:
                    return False
                self.poll(timeout_s=_WAIT_S)
            return self.acquire(wanted)
        finally:
            self.remove_waiters(wanted)

    def pin(self, cid: str, *, is_pinned: bool) -> None:
        """Pins an adapter, which is then loaded and not evicted, or unpins it."""
        record = self._record(cid)
        pinned = sum(r.num_pages for r in self._records.values() if r.is_pinned and r is not record)
        if is_pinned and pinned + record.num_pages > self._pages.num_pages // 2:
            raise DoesNotFit(
                f"Pinning {cid} would give more than half of the pool's {self._pages.num_pages} "
                "pages to pinned adapters, and requests need the rest. Unpin another first."
            )
        record.is_pinned = is_pinned
        self._update_candidate(record)
        if is_pinned and cid not in self._resident and not record.is_in_flight:
            self._pending[cid] = None

    def prewarm(self, cids: Iterable[str]) -> None:
        """Load adapters in the background, as long as free pages last and without evictions."""
        self._prewarm.update(dict.fromkeys(cids))

    def admit(self, image: AdapterImage, read_s: float) -> None:
        """Put an image that was packed before its first use into host memory, if it fits there."""
        record = self._records.get(image.cid)
        if image.cid in self._tiers.host or (record is not None and record.is_in_flight):
            return
        try:
            if not self._tiers.host.reserve(image.cid, image.num_bytes):
                return
        except DoesNotFit:
            # The first load reports it to its requests.
            return
        self._tiers.host.put(image)
        self._costs.record_read(AdapterState.SOURCE, image.num_bytes, read_s)

    def forget(self, cid: str) -> bool:
        """Frees everything that an adapter holds; returns False if it is in use or loading."""
        record = self._records.get(cid)
        if record is not None:
            leased = cid in self._resident and self._resident[cid].num_leases > 0
            if record.num_waiters or leased or record.is_in_flight:
                return False
            record.is_pinned = False
            if cid in self._resident:
                self.evict(owner_of(cid))
            self._pending.pop(cid, None)
            del self._records[cid]
        self._prewarm.pop(cid, None)
        self._tiers.host.drop(cid)
        self._policy.forget(cid)
        if self._prefixes is not None:
            self._prefixes.drop(cid)
        return True

    # Called by the reclaimer.

    @property
    def num_idle_pages(self) -> int:
        return self._eviction.num_idle_pages

    @property
    def num_protected_pages(self) -> int:
        return self._eviction.num_protected_pages

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple)
        record = self._records[key[1]]
        resident = self._resident.pop(record.cid)
        assert resident.num_leases == 0, f"{record.cid} is in use"
        self._eviction.clear(record)
        self._memory.forget(record.cid)
        self._free_pages(record)
        record.move(self._placement.resting_state(record.cid))
        self._costs.device.evictions += 1
        self._policy.evicted(record.num_pages / self._pages.num_pages)
        if record.num_waiters:
            self._pending[record.cid] = None
        if self._prefixes is not None:
            self._prefixes.adapter_moved(record.cid)

    def claims(self) -> dict[Owner, list[int]]:
        return {owner_of(cid): record.page_ids for cid, record in self._held.items()}

    def check_integrity(self, leases: Mapping[str, int]) -> None:
        """`leases` is the number of running sequences that use each adapter."""
        held = {cid: r.num_leases for cid, r in self._resident.items() if r.num_leases}
        assert held == {cid: n for cid, n in leases.items() if n}, f"{held} != {leases}"
        for cid, record in self._records.items():
            assert (record.state is AdapterState.DEVICE) == (cid in self._resident)
            assert not record.page_ids or len(record.page_ids) == record.num_pages
            assert (cid in self._held) == bool(record.page_ids)
            assert record.page_ids or record.state is not AdapterState.DEVICE
            if record.num_waiters and record.error is None and cid not in self._resident:
                assert record.is_in_flight or cid in self._pending, f"{cid} has waiters and no load"
        assert self.num_held_pages == sum(len(r.page_ids) for r in self._held.values())
        self._eviction.check_integrity(list(self._records.values()))
        self._tiers.host.check_integrity()

    def _record(self, cid: str) -> AdapterRecord:
        record = self._records.get(cid)
        if record is None:
            known = self._tiers.catalog.get(cid)
            record = AdapterRecord(known, -(-known.num_bytes // self._memory.page_bytes))
            self._records[cid] = record
        return record

    def _count_use(self, record: AdapterRecord) -> None:
        now = self._clock()
        self._policy.used(record.cid, now)
        record.last_use_s = now
        if record.cid in self._resident:
            record.hits += 1
            self._costs.record_use(AdapterState.DEVICE)
            return
        record.misses += 1
        found = self._placement.resting_state(record.cid)
        self._costs.record_use(found)
        self._tiers.host.used(record.cid, now)
        if self._tiers.disk is not None and found is not AdapterState.HOST:
            self._tiers.disk.used(record.cid, now)

    def _start_loads(self) -> int:
        num_started = 0
        for cid in list(self._pending):
            if self._tiers.loader.num_active >= self._tiers.loader.max_active:
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
            record.load_origin = self._placement.resting_state(cid)
            record.move(record.load_origin)
        if record.state is AdapterState.HOST:
            if not has_pages:
                return False
            record.move(AdapterState.COPYING)
            tiers.loader.copy(tiers.host.begin_copy(cid), record.page_ids)
        else:
            try:
                is_reserved = tiers.host.reserve(cid, record.known.num_bytes)
            except DoesNotFit as error:
                record.error = error
                is_reserved = False
                self._pending.pop(cid, None)
            if not is_reserved:
                self._free_pages(record)
                return False
            record.move(AdapterState.READING)
            tiers.loader.read(cid, record.page_ids)
        self._pending.pop(cid, None)
        return True

    def _finish_load(self, result: LoadResult) -> None:
        record = self._records[result.cid]
        was_copying = record.state is AdapterState.COPYING
        if was_copying:
            self._tiers.host.end_copy(result.cid)
        if result.image is None:
            self._fail(record, result, was_copying=was_copying)
            return
        if not was_copying:
            self._tiers.host.put(result.image)
            self._costs.record_read(result.found, record.known.num_bytes, result.read_s)
        record.load_s = result.read_s + result.copy_s
        if record.page_ids:
            self._become_resident(record, result)
        else:
            record.move(AdapterState.HOST)
            if record.num_waiters or record.is_pinned:
                self._pending[record.cid] = None

    def _fail(self, record: AdapterRecord, result: LoadResult, *, was_copying: bool) -> None:
        if not was_copying:
            self._tiers.host.cancel_reservation(record.cid)
        record.error = result.error
        record.is_pinned = False
        self._free_pages(record)
        record.move(self._placement.resting_state(record.cid))
        self._costs.device.failures += 1

    def _become_resident(self, record: AdapterRecord, result: LoadResult) -> None:
        assert result.image is not None
        resident = ResidentAdapter(record.cid, result.image.layout, record.page_ids)
        try:
            self._memory.add(resident)
        except DoesNotFit as error:
            self._fail(record, replace(result, error=error), was_copying=True)
            return
        record.move(AdapterState.DEVICE)
        self._resident[record.cid] = resident
        self._costs.device.loaded(record.known.num_bytes, result.copy_s)
        self._update_candidate(record)
        if self._prefixes is not None:
            self._prefixes.adapter_moved(record.cid)

    def _take_pages(self, new: AdapterRecord) -> bool:
        """Allocates pages for an adapter, evicting candidates but not those requested before it."""
        victims = self._eviction.victims_for_limits(new, self._held.values())
        if victims is None:
            return False
        reclaimer = self._reclaimer
        if reclaimer.num_unprotected < new.num_pages:
            held = self._held.values()
            later = sum(r.num_pages for r in held if r.is_protected and yields_to(r, new))
            if reclaimer.num_unprotected + later < new.num_pages:
                return False
        for victim in victims:
            self.evict(owner_of(victim.cid))
        reclaimer.reclaim(new.num_pages)
        page_ids = self._pages.allocate_for_load(owner_of(new.cid), new.num_pages)
        assert page_ids is not None
        new.page_ids = page_ids
        self._held[new.cid] = new
        self.num_held_pages += new.num_pages
        if not self._pages.is_quiescent(page_ids):
            self._memory.fence(page_ids)
        return True

    def _free_pages(self, record: AdapterRecord) -> None:
        self._pages.release(owner_of(record.cid), record.page_ids)
        self.num_held_pages -= len(record.page_ids)
        record.page_ids = []
        self._held.pop(record.cid, None)

    def _update_candidate(self, record: AdapterRecord) -> None:
        resident = self._resident.get(record.cid)
        is_idle = resident is not None and resident.num_leases == 0
        self._eviction.update(record, self, is_idle=is_idle)
