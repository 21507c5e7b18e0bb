"""Estimates in seconds what each eviction would cost, from measured loads and steps."""

from __future__ import annotations

from loramux.memory.policies import HELD_ABOVE_FACTOR, MISS_RATE_WEIGHT, miss_cost_s
from loramux.memory.records import Placement
from loramux.memory.tiers import AdapterState, TierCounters

# (latency in seconds, bytes per second) of a PCIe bus, an NVMe disk and a PEFT folder: used until
# loads have been measured.
_COPY_GUESS = (1e-4, 2e10)
_DISK_GUESS = (1e-3, 1e9)
_SOURCE_GUESS = (1e-2, 2e8)
_INITIAL_TOKEN_S = 1e-3
# Only steps with this many tokens say what a prefill token costs.
_MIN_PREFILL_TOKENS = 64
_SMOOTHING = 0.1


class CostModel:
    """Holds the counters of all tiers and the smoothed step times."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.device = TierCounters()
        self.host = TierCounters()
        self.disk = TierCounters()
        self.source = TierCounters()
        self.step_s = 0.0
        """Smoothed duration of a step: a request whose adapter is missing waits one step more."""
        self.token_s = _INITIAL_TOKEN_S
        """Smoothed seconds to compute a prefill token."""
        # Of the most recent requests, about a hundred.
        self._device_miss_rate = HELD_ABOVE_FACTOR

    def record_step(self, seconds: float, num_tokens: int) -> None:
        self.step_s += _SMOOTHING * (seconds - self.step_s)
        if num_tokens >= _MIN_PREFILL_TOKENS:
            self.token_s += _SMOOTHING * (seconds / num_tokens - self.token_s)

    def record_use(self, found: AdapterState) -> None:
        """Count a hit in the tier that has the adapter and a miss in each faster one."""
        is_miss = found is not AdapterState.DEVICE
        self._device_miss_rate += MISS_RATE_WEIGHT * (is_miss - self._device_miss_rate)
        for state, counters in (
            (AdapterState.DEVICE, self.device),
            (AdapterState.HOST, self.host),
            (AdapterState.DISK, self.disk),
            (AdapterState.SOURCE, self.source),
        ):
            if state is found:
                counters.hits += 1
                return
            counters.misses += 1

    def load_seconds(self) -> tuple[float, ...]:
        """Return the seconds from each Tier to the device for the mean size of the loads so far.

        A load in flight is expected to have half of a copy left.
        """
        loads = self.host.loads or self.device.loads
        num_bytes = (self.host.load_bytes or self.device.load_bytes) // loads if loads else 0
        copy_s = self.device.seconds_for(num_bytes, *_COPY_GUESS)
        source_s = copy_s + self.source.seconds_for(num_bytes, *_SOURCE_GUESS)
        disk_s = copy_s + self.disk.seconds_for(num_bytes, *_DISK_GUESS)
        return (source_s, source_s, min(disk_s, source_s), copy_s, copy_s / 2, 0.0)

    def record_read(self, found: AdapterState, num_bytes: int, seconds: float) -> None:
        """Count a load into host memory, from disk or source."""
        self.host.loaded(num_bytes, seconds)
        origin = self.disk if found is AdapterState.DISK else self.source
        origin.loaded(num_bytes, seconds)

    def reload_s(self, cid: str, num_bytes: int) -> float:
        """Return the seconds that a request waits if the adapter leaves the device."""
        load_s = self.device.seconds_for(num_bytes, *_COPY_GUESS)
        if cid not in self._placement.host:
            load_s += self._read_s(cid, num_bytes)
        return miss_cost_s(load_s, step_s=self.step_s)

    def host_miss_s(self, cid: str, num_bytes: int) -> float:
        """Return the expected seconds that a request waits if the image leaves host memory."""
        return miss_cost_s(
            self._read_s(cid, num_bytes),
            is_held_above=cid in self._placement.device,
            miss_rate_above=self._device_miss_rate,
        )

    def disk_miss_s(self, cid: str, num_bytes: int) -> float:
        """Return the expected seconds that a request waits if the image leaves the disk tier."""
        latency_s, bytes_per_s = _SOURCE_GUESS
        return miss_cost_s(
            latency_s + num_bytes / bytes_per_s, is_held_above=cid in self._placement.host
        )

    def recompute_s(self, num_tokens: float) -> float:
        """Return the seconds to compute the KV cache of so many tokens again."""
        return num_tokens * self.token_s

    def _read_s(self, cid: str, num_bytes: int) -> float:
        if cid in self._placement.disk:
            return self.disk.seconds_for(num_bytes, *_DISK_GUESS)
        return self.source.seconds_for(num_bytes, *_SOURCE_GUESS)
