"""Where an adapter's bytes are, and which moves between the places exist."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AdapterState(StrEnum):
    SOURCE = "source"
    """Only where it came from: its PEFT folder."""
    DISK = "disk"
    """Packed, in the disk tier."""
    READING = "reading"
    """On its way from source or disk, on a worker thread."""
    HOST = "host"
    COPYING = "copying"
    """From host memory into pages that are already its own."""
    DEVICE = "device"


_RESTING = frozenset({AdapterState.SOURCE, AdapterState.DISK, AdapterState.HOST})

# A resting adapter may sink by itself, when the tier that held it gives its bytes up.
MOVES: dict[AdapterState, frozenset[AdapterState]] = {
    AdapterState.SOURCE: _RESTING | {AdapterState.READING},
    AdapterState.DISK: _RESTING | {AdapterState.READING},
    AdapterState.HOST: _RESTING | {AdapterState.COPYING},
    AdapterState.READING: _RESTING | {AdapterState.DEVICE},
    AdapterState.COPYING: _RESTING | {AdapterState.DEVICE},
    AdapterState.DEVICE: _RESTING,
}


def check_move(cid: str, old: AdapterState, new: AdapterState) -> None:
    assert new in MOVES[old], f"{cid} cannot go from {old} to {new}"


@dataclass(slots=True)
class TierCounters:
    """Since start. A hit is a request whose adapter was found in this tier, and no higher."""

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

    def seconds_for(self, num_bytes: int, guess_s: float, guess_bytes_per_s: float) -> float:
        """What a load of this size takes, by what loads have taken so far."""
        if self.load_bytes == 0:
            return guess_s + num_bytes / guess_bytes_per_s
        return guess_s + self.load_seconds * num_bytes / self.load_bytes
