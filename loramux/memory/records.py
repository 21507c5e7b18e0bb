"""Describes each adapter in memory: its pages, tier, waiters and uses; and what each tier holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from loramux.adapters.packed.dense import DenseLayout
from loramux.adapters.packed.image import AdapterImage, AdapterLayout
from loramux.errors import LoramuxError
from loramux.memory.moves import MoveLog, TierTable
from loramux.memory.tiers import AdapterState, check_transition
from loramux.types.adapter import AdapterCard
from loramux.types.residency import Tier


@dataclass(frozen=True, slots=True)
class ResidencyDelta:
    """The tiers of the adapters that moved since an earlier version."""

    version: int
    tiers: tuple[tuple[str, Tier], ...]
    """By CID; GONE: no tier has it."""
    is_full: bool = False
    """If true, `tiers` replaces what the reader had."""


@dataclass(slots=True)
class ResidentAdapter:
    """An adapter whose weights are all in pages."""

    cid: str
    layout: AdapterLayout
    page_ids: list[int]
    num_leases: int = 0
    """Number of running sequences that use it."""
    is_contiguous: bool = field(init=False)
    """Whether its pages follow each other in the pool, in order."""

    def __post_init__(self) -> None:
        self.is_contiguous = all(b - a == 1 for a, b in pairwise(self.page_ids))

    @property
    def stacked(self) -> DenseLayout:
        """Returns the layout for kernels that gather adapters into stacked copies."""
        assert isinstance(self.layout, DenseLayout)
        return self.layout


@dataclass(slots=True)
class AdapterRecord:
    known: AdapterCard
    num_pages: int
    state: AdapterState = AdapterState.SOURCE
    page_ids: list[int] = field(default_factory=list)
    """Its pages, owned from the start of a load on."""
    num_waiters: int = 0
    """Number of queued sequences that need it."""
    wait_tick: int = 0
    """Orders adapters by the arrival of their first current waiter; lower is served first."""
    is_pinned: bool = False
    is_candidate: bool = False
    """Whether the reclaimer may evict it: on the device, not leased and not pinned."""
    is_protected: bool = False
    """Whether it is a candidate that queued sequences wait for, evicted after all others."""
    error: LoramuxError | None = None
    """Why the last load failed; reported to the sequences that waited for it."""
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
        check_transition(self.cid, self.state, new)
        self.state = new


class Placement:
    """Holds the contents of every tier, by CID.

    Each table is written by its own tier only. Single reads are atomic, so that any thread may ask
    whether a tier holds an adapter.
    """

    def __init__(self) -> None:
        self.moves = MoveLog()
        """What came to a tier or left it."""
        self.device: dict[str, ResidentAdapter] = TierTable(self.moves)
        self.host: dict[str, AdapterImage] = TierTable(self.moves)
        self.disk: dict[str, int] = TierTable(self.moves)
        """Size in bytes of each image file."""

    def resting_state(self, cid: str) -> AdapterState:
        """Return the fastest tier below the device that holds the adapter."""
        if cid in self.host:
            return AdapterState.HOST
        return AdapterState.DISK if cid in self.disk else AdapterState.SOURCE

    def changes_since(self, version: int) -> ResidencyDelta:
        """Return the current tiers of the adapters that moved since a version.

        They are those of all adapters if the version is older than the log of moves.
        """
        moved = self.moves.since(version)
        cids = moved.cids
        if cids is None:
            cids = tuple(dict.fromkeys((*self.device, *self.host, *self.disk)))
        tiers = tuple((cid, self._tier_of(cid)) for cid in cids)
        return ResidencyDelta(moved.version, tiers, is_full=moved.cids is None)

    def _tier_of(self, cid: str) -> Tier:
        if cid in self.device:
            return Tier.DEVICE
        if cid in self.host:
            return Tier.HOST
        return Tier.DISK if cid in self.disk else Tier.GONE
