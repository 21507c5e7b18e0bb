"""Defines the states of an adapter in the memory tiers, and the counters of a tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AdapterState(StrEnum):
    SOURCE = "source"
    """The adapter exists only as the PEFT folder it was registered from."""
    DISK = "disk"
    """Its packed image is in the disk tier."""
    READING = "reading"
    """A loader thread reads it from source or disk."""
    HOST = "host"
    """Its packed image is in host memory."""
    COPYING = "copying"
    """A loader thread copies it from host memory into its pages."""
    DEVICE = "device"


_RESTING = frozenset({AdapterState.SOURCE, AdapterState.DISK, AdapterState.HOST})

# A resting adapter also moves between tiers without a load: a lower tier may evict its image.
TRANSITIONS: dict[AdapterState, frozenset[AdapterState]] = {
    AdapterState.SOURCE: _RESTING | {AdapterState.READING},
    AdapterState.DISK: _RESTING | {AdapterState.READING},
    AdapterState.HOST: _RESTING | {AdapterState.COPYING},
    AdapterState.READING: _RESTING | {AdapterState.DEVICE},
    AdapterState.COPYING: _RESTING | {AdapterState.DEVICE},
    AdapterState.DEVICE: _RESTING,
}


def check_transition(cid: str, old: AdapterState, new: AdapterState) -> None:
    assert new in TRANSITIONS[old], f"{cid} cannot go from {old} to {new}"


@dataclass(slots=True)
class TierCounters:
    """Counts the events of one tier since start.

    A hit is a request whose adapter was in this tier and in no faster one.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0

    def loaded(self, num_bytes: int, seconds: float) -> None:
        self.loads += 1
        self.load_bytes += num_bytes
        self.load_seconds += seconds

    def seconds_for(self, num_bytes: int, latency_s: float, bytes_per_s: float) -> float:
        """Estimates the time of a load of this size.

        The bandwidth is the measured one as soon as there is a measurement, else `bytes_per_s`.
        """
        if self.load_bytes == 0:
            return latency_s + num_bytes / bytes_per_s
        return latency_s + self.load_seconds * num_bytes / self.load_bytes
