"""Counts the actions of a state machine over the adapter tiers, by action and tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from loramux.memory.disk_tier import DiskTier
from loramux.memory.tiers import AdapterState
from tests.memory_factory import TinyMemory

TIERS = ("device", "host", "disk")
ACTIONS = ("load", "evict", "pin", "reload", "abort", "fail", "out of space")


@dataclass
class Tally:
    num_steps: int = 0
    """Number of rules that ran, each followed by an integrity check."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, action: str, tier: str) -> None:
        self.counts[action, tier] += 1

    @property
    def never(self) -> list[tuple[str, str]]:
        return [pair for pair in product(ACTIONS, TIERS) if not self.counts[pair]]


@dataclass
class TierWatch:
    """Finds the actions by comparing the tiers before and after each step."""

    memory: TinyMemory
    disk: DiskTier
    cids: list[str]
    tally: Tally
    _held: dict[str, set[str]] = field(default_factory=dict)
    _left: dict[str, set[str]] = field(default_factory=dict)
    _evictions: dict[str, int] = field(default_factory=dict)
    _disk_failures: int = 0

    def __post_init__(self) -> None:
        self._held = {tier: set() for tier in TIERS}
        self._left = {tier: set() for tier in TIERS}
        self._evictions = dict.fromkeys(TIERS, 0)

    def look(self) -> None:
        """Compare the tiers with their contents at the last call."""
        counters = {
            "device": self.memory.costs.device,
            "host": self.memory.host.counters,
            "disk": self.disk.counters,
        }
        for tier, held in self._now().items():
            for cid in held - self._held[tier]:
                self.tally.note("load", tier)
                if cid in self._left[tier]:
                    self.tally.note("reload", tier)
            self._left[tier] |= self._held[tier] - held
            self._held[tier] = held
            self.tally.counts["evict", tier] += counters[tier].evictions - self._evictions[tier]
            self._evictions[tier] = counters[tier].evictions
        self.tally.counts["fail", "disk"] += self.disk.counters.failures - self._disk_failures
        self._disk_failures = self.disk.counters.failures

    def place_of(self, cid: str) -> str | None:
        """Return the fastest tier that holds the adapter; None if only its source does."""
        return next((tier for tier in TIERS if cid in self._now()[tier]), None)

    def note_stuck(self) -> None:
        """Count, after a poll, the adapters whose load did not start for lack of space."""
        loader = self.memory.tiers.loader
        if loader.num_active >= loader.max_active:
            return
        for record in self.memory.residency.records.values():
            is_waiting = record.num_waiters > 0 and record.error is None
            if is_waiting and not record.is_in_flight and record.state is not AdapterState.DEVICE:
                tier = "device" if record.cid in self.memory.host else "host"
                self.tally.note("out of space", tier)

    def _now(self) -> dict[str, set[str]]:
        holders = {"device": self.memory.residency, "host": self.memory.host, "disk": self.disk}
        return {tier: {cid for cid in self.cids if cid in holders[tier]} for tier in TIERS}
