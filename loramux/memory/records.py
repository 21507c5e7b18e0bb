"""What is known of one adapter's place, uses and users; and what stands below the device."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from loramux.adapters.catalog import KnownAdapter
from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.paged import RankBlockLayout
from loramux.errors import LoramuxError
from loramux.memory.disk_tier import DiskTier
from loramux.memory.host_tier import HostTier
from loramux.memory.loader import AdapterLoader, Arrival
from loramux.memory.policies import HELD_ABOVE_FACTOR, MISS_RATE_WEIGHT, miss_cost_s
from loramux.memory.tiers import AdapterState, TierCounters, check_move

# Of a GPU's bus, an NVMe disk and a folder of safetensors, until loads have been measured.
_COPY_GUESS = (1e-4, 2e10)
_DISK_GUESS = (1e-3, 1e9)
_SOURCE_GUESS = (1e-2, 2e8)


class Catalog(Protocol):
    def get(self, cid: str) -> KnownAdapter:
        """Raises AdapterNotFound."""
        ...


@dataclass(slots=True)
class ResidentAdapter:
    """An adapter whose weights are all in pages."""

    cid: str
    layout: DenseLayout | RankBlockLayout
    page_ids: list[int]
    num_leases: int = 0
    is_one_run: bool = field(init=False)
    """Its pages are neighbours, in order."""

    def __post_init__(self) -> None:
        self.is_one_run = all(b - a == 1 for a, b in pairwise(self.page_ids))

    @property
    def stacked(self) -> DenseLayout:
        """The layout, for kernels that work on copies."""
        assert isinstance(self.layout, DenseLayout)
        return self.layout


@dataclass(slots=True)
class MoveListeners:
    """Who hears, on the step loop's thread, of adapters that come to the device and leave it."""

    on_take: list[Callable[[list[int]], None]] = field(default_factory=list)
    """Pages were taken for a load."""
    on_arrive: list[Callable[[ResidentAdapter], None]] = field(default_factory=list)
    """May raise DoesNotFit: then the load has failed."""
    on_leave: list[Callable[[str], None]] = field(default_factory=list)
    """Of a CID whose pages are about to be free."""

    def take_pages(self, page_ids: list[int]) -> None:
        for tell in self.on_take:
            tell(page_ids)

    def arrive(self, adapter: ResidentAdapter) -> None:
        for tell in self.on_arrive:
            tell(adapter)

    def leave(self, cid: str) -> None:
        for tell in self.on_leave:
            tell(cid)


@dataclass(slots=True)
class AdapterRecord:
    known: KnownAdapter
    num_pages: int
    state: AdapterState = AdapterState.SOURCE
    page_ids: list[int] = field(default_factory=list)
    """Its own from the start of a load on."""
    num_wants: int = 0
    """Requests in the queue that need it."""
    want_tick: int = 0
    is_pinned: bool = False
    is_offered: bool = False
    is_protected: bool = False
    error: LoramuxError | None = None
    """Why the last load failed; for those who wanted it then."""
    hits: int = 0
    misses: int = 0
    last_use_s: float | None = None
    load_origin: AdapterState = AdapterState.SOURCE
    """The tier that the last load, finished or in flight, was started from."""
    load_s: float = 0.0
    """Seconds that its last load took, all the way to the device."""

    @property
    def cid(self) -> str:
        return self.known.cid

    @property
    def is_in_flight(self) -> bool:
        return self.state in (AdapterState.READING, AdapterState.COPYING)

    def move(self, new: AdapterState) -> None:
        check_move(self.cid, self.state, new)
        self.state = new


@dataclass(slots=True, kw_only=True)
class LowerTiers:
    catalog: Catalog
    host: HostTier
    disk: DiskTier | None
    loader: AdapterLoader
    device_counters: TierCounters = field(default_factory=TierCounters)
    source_counters: TierCounters = field(default_factory=TierCounters)
    on_device: Container[str] = ()
    """The adapters that the tier above has."""
    step_s: float = 0.0
    """How long steps take at present: a request whose adapter is missing sits one out."""
    device_miss_rate: float = HELD_ABOVE_FACTOR
    """Of the last hundred requests or so."""

    def resting_place(self, cid: str) -> AdapterState:
        if cid in self.host:
            return AdapterState.HOST
        if self.disk is not None and cid in self.disk:
            return AdapterState.DISK
        return AdapterState.SOURCE

    def count_use(self, cid: str, found: AdapterState, now: float) -> None:
        """A hit in the tier where it was found, a miss in those above."""
        is_miss = found is not AdapterState.DEVICE
        self.device_miss_rate += MISS_RATE_WEIGHT * (is_miss - self.device_miss_rate)
        if is_miss:
            self.host.used(cid, now)
        if self.disk is not None and found in (AdapterState.DISK, AdapterState.SOURCE):
            self.disk.used(cid, now)
        ladder = [
            (AdapterState.DEVICE, self.device_counters),
            (AdapterState.HOST, self.host.counters),
            (AdapterState.DISK, None if self.disk is None else self.disk.counters),
            (AdapterState.SOURCE, self.source_counters),
        ]
        for state, counters in ladder:
            if state is found:
                if counters is not None:
                    counters.hits += 1
                return
            if counters is not None:
                counters.misses += 1

    def keep_in_host(self, arrival: Arrival, num_bytes: int) -> None:
        """What came from below stays in host memory, and says how fast it came."""
        assert arrival.image is not None
        self.host.put(arrival.image)
        self.host.counters.loaded(num_bytes, arrival.read_s)
        came_from = self.source_counters
        if arrival.found is AdapterState.DISK and self.disk is not None:
            came_from = self.disk.counters
        came_from.loaded(num_bytes, arrival.read_s)

    def reload_s(self, cid: str, num_bytes: int) -> float:
        """Seconds that a request waits for it once it is no longer on the device."""
        copying = self.device_counters.seconds_for(num_bytes, *_COPY_GUESS)
        load_s = copying + self.read_s(cid, num_bytes, place=self.resting_place(cid))
        return miss_cost_s(load_s, step_s=self.step_s)

    def read_s(self, cid: str, num_bytes: int, *, place: AdapterState | None = None) -> float:
        """Seconds to bring it back to host memory once it is no longer there."""
        if place is AdapterState.HOST:
            return 0.0
        on_disk = self.disk is not None and cid in self.disk
        if place is None and on_disk or place is AdapterState.DISK:
            counters = self.disk.counters if self.disk is not None else self.source_counters
            return counters.seconds_for(num_bytes, *_DISK_GUESS)
        return self.source_counters.seconds_for(num_bytes, *_SOURCE_GUESS)
