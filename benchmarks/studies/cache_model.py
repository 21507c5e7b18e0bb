"""A model of the adapter tiers in simulated time, and eviction policies to run in it.

Requests run over a device, a host and a disk tier with real sizes. The engine sees requests and
finished loads once per step. A request whose adapter is on the device starts at once and leases it
while it runs. Otherwise its load starts, in the order of arrival, as soon as idle adapters can be
evicted. Adapters that are leased, loading or waited for are not evicted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.lib.workloads import Arrival
from loramux.memory.policies import (
    HELD_ABOVE_FACTOR,
    MISS_RATE_WEIGHT,
    EvictionPolicy,
    make_policy,
    miss_cost_s,
)

Key = int


class CachePolicy(Protocol):
    """The eviction policy of one tier, and the events that the tier reports to it."""

    def used(self, key: Key, now: float) -> None:
        """Record that a request looked the key up in this tier, with or without success."""

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None: ...

    def priced(self, key: Key, cost_s: float) -> None:
        """Record that the cost of a miss of a resident key has changed."""

    def victim(self, busy: Container[Key], now: float) -> Key | None:
        """Return the key to evict next, or None if all are busy."""

    def evicted(self, key: Key) -> None: ...


class Scored:
    """Evicts the lowest score; scores are set at insertion and at every use."""

    def __init__(self) -> None:
        self._scores: dict[Key, float] = {}
        self._terms: dict[Key, tuple[float, int]] = {}
        # (score, order, key): among equals the one scored first is evicted. Stale entries are
        # skipped.
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        raise NotImplementedError

    def used(self, key: Key, now: float) -> None:
        if key in self._terms:
            self._set(key, self.score(key, *self._terms[key], now))

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None:
        self._terms[key] = (cost_s, size)
        self._set(key, self.score(key, cost_s, size, now))

    def priced(self, key: Key, cost_s: float) -> None:
        self._terms[key] = (cost_s, self._terms[key][1])

    def victim(self, busy: Container[Key], now: float) -> Key | None:
        passed: list[tuple[float, int, Key]] = []
        found = None
        while self._heap and found is None:
            score, _, key = self._heap[0]
            if self._scores.get(key) != score:
                heapq.heappop(self._heap)
            elif key in busy:
                passed.append(heapq.heappop(self._heap))
            else:
                found = key
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def evicted(self, key: Key) -> None:
        del self._scores[key], self._terms[key]

    def _set(self, key: Key, score: float) -> None:
        if self._scores.get(key) != score:
            self._scores[key] = score
            heapq.heappush(self._heap, (score, next(self._order), key))


class Lru(Scored):
    """Evicts the least recently used."""

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return now


class Lfu(Scored):
    """Evicts the least frequently used; counts survive eviction."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Key, int] = {}

    def used(self, key: Key, now: float) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        super().used(key, now)

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return self._counts.get(key, 0)


class Gdsf(Scored):
    """Scores floor + count * cost / size, where floor is the score of the last evicted key.

    The cost is 1, which maximizes the hit rate, or the seconds of a miss.
    """

    def __init__(self, *, in_seconds: bool) -> None:
        super().__init__()
        self._in_seconds = in_seconds
        self._floor = 0.0
        self._counts: dict[Key, int] = {}

    def used(self, key: Key, now: float) -> None:
        if key in self._counts:
            self._counts[key] += 1
        super().used(key, now)

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None:
        self._counts[key] = 1
        super().inserted(key, cost_s=cost_s, size=size, now=now)

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return self._floor + self._counts[key] * (cost_s if self._in_seconds else 1.0) / size

    def evicted(self, key: Key) -> None:
        self._floor = max(self._floor, self._scores[key])
        del self._counts[key]
        super().evicted(key)


class Chameleon:
    """Scores 0.45 frequency + 0.10 recency + 0.45 size, normalized over the resident keys."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}
        self._last: dict[Key, float] = {}
        # Keys by (count, size), the least recently used first.
        self._by_count_and_size: dict[tuple[int, int], dict[Key, None]] = {}

    def used(self, key: Key, now: float) -> None:
        if key in self._sizes:
            self._leave(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        if key in self._sizes:
            self._join(key, now)

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None:
        self._counts.setdefault(key, 0)
        self._sizes[key] = size
        self._join(key, now)

    def priced(self, key: Key, cost_s: float) -> None:
        pass

    def victim(self, busy: Container[Key], now: float) -> Key | None:
        if not self._by_count_and_size:
            return None
        of_count = 0.45 / max(1, max(count for count, _ in self._by_count_and_size))
        of_size = 0.45 / max(size for _, size in self._by_count_and_size)
        oldest = min(self._last[next(iter(keys))] for keys in self._by_count_and_size.values())
        of_time = 0.10 / max(1e-9, now - oldest)
        best: tuple[float, Key | None] = (math.inf, None)
        for (count, size), keys in self._by_count_and_size.items():
            key = next((key for key in keys if key not in busy), None)
            if key is not None:
                score = of_count * count + of_time * (self._last[key] - oldest) + of_size * size
                best = min(best, (score, key), key=lambda entry: entry[0])
        return best[1]

    def evicted(self, key: Key) -> None:
        self._leave(key)
        del self._sizes[key], self._last[key]

    def _join(self, key: Key, now: float) -> None:
        self._by_count_and_size.setdefault((self._counts[key], self._sizes[key]), {})[key] = None
        self._last[key] = now

    def _leave(self, key: Key) -> None:
        alike = (self._counts[key], self._sizes[key])
        del self._by_count_and_size[alike][key]
        if not self._by_count_and_size[alike]:
            del self._by_count_and_size[alike]


class S3Fifo:
    """Small FIFO of a tenth of the capacity for new keys; reused keys move to the main FIFO."""

    def __init__(self, *, capacity: int, small_share: float = 0.1) -> None:
        self._small_limit = int(capacity * small_share)
        self._ghost_limit = capacity - self._small_limit
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        self._small_bytes = 0
        self._ghost_bytes = 0
        # Uses of resident keys, at most 3.
        self._uses: dict[Key, int] = {}

    def used(self, key: Key, now: float) -> None:
        if key in self._uses:
            self._uses[key] = min(3, self._uses[key] + 1)

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None:
        self._uses[key] = 0
        if key in self._ghosts:
            self._ghost_bytes -= self._ghosts.pop(key)
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_bytes += size

    def priced(self, key: Key, cost_s: float) -> None:
        pass

    def victim(self, busy: Container[Key], now: float) -> Key | None:
        found = self._from_small(busy) if self._small_bytes > self._small_limit else None
        if found is None:
            found = self._from_main(busy)
        if found is None:
            found = next((key for key in self._small if key not in busy), None)
        return found

    def evicted(self, key: Key) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        size = self._small.pop(key)
        self._small_bytes -= size
        self._ghosts[key] = size
        self._ghost_bytes += size
        while self._ghost_bytes > self._ghost_limit:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _from_small(self, busy: Container[Key]) -> Key | None:
        """Return the oldest unused key; used keys before it move to the main queue."""
        for key in [key for key in self._small if key not in busy]:
            if self._uses[key] == 0:
                return key
            self._small_bytes -= self._small[key]
            self._main[key] = self._small.pop(key)
            self._uses[key] = 0
            if self._small_bytes <= self._small_limit:
                return None
        return None

    def _from_main(self, busy: Container[Key]) -> Key | None:
        # Each round takes one use from every idle key, and no key has more than three.
        for _ in range(4 * len(self._main)):
            key = next(iter(self._main))
            if key not in busy:
                if self._uses[key] == 0:
                    return key
                self._uses[key] -= 1
            self._main.move_to_end(key)
        return None


class Own(Scored):
    """A policy of loramux, called as by the engine's tiers."""

    def __init__(self, policy: EvictionPolicy, *, capacity: int) -> None:
        super().__init__()
        self._policy = policy
        self._capacity = capacity

    def used(self, key: Key, now: float) -> None:
        self._policy.used(key, now)
        super().used(key, now)

    def priced(self, key: Key, cost_s: float) -> None:
        super().priced(key, cost_s)
        self._set(key, self.score(key, *self._terms[key], 0.0))

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return self._policy.score(key, cost_s=cost_s, size=size)

    def evicted(self, key: Key) -> None:
        self._policy.evicted(self._terms[key][1] / self._capacity)
        super().evicted(key)


PolicyFactory = Callable[[int, bool], CachePolicy]
"""Make a policy from a tier's capacity and whether the tier is below another."""

OURS = "loramux"
POLICIES: dict[str, PolicyFactory] = {
    "LRU": lambda capacity, is_lower: Lru(),
    "LFU": lambda capacity, is_lower: Lfu(),
    "GDSF hits": lambda capacity, is_lower: Gdsf(in_seconds=False),
    "GDSF seconds": lambda capacity, is_lower: Gdsf(in_seconds=True),
    "S3-FIFO": lambda capacity, is_lower: S3Fifo(capacity=capacity),
    "Chameleon": lambda capacity, is_lower: Chameleon(),
    OURS: lambda capacity, is_lower: Own(
        make_policy("cost", is_lower_tier=is_lower), capacity=capacity
    ),
}


# Llama-3.1-8B, q,k,v,o of 32 layers in bfloat16: 27.3 MB at rank 16.
BYTES_PER_RANK = 32 * 2 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
# A decode step of a medium batch; a prompt token in a chunked prefill.
STEP_S = 6e-3
PROMPT_TOKEN_S = 30e-6
LINKS = {"host": (1e-4, 55e9), "disk": (1e-3, 3e9), "remote": (3e-2, 0.5e9)}
"""(latency in seconds, bytes per second) of pinned host memory, NVMe and an object store."""
DEVICE = "device"
QUEUE_WEIGHT = 0.02
"""Weight of the last load in the moving average of the queueing time of a link."""


def adapter_bytes(rank: int) -> int:
    return rank * BYTES_PER_RANK


class Link:
    """A link that transfers one adapter at a time."""

    def __init__(self, start_s: float, bytes_per_s: float) -> None:
        self._start_s = start_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.queue_s = 0.0
        """Moving average of the time that loads wait for the link."""

    def seconds(self, size: int) -> float:
        return self._start_s + size / self._bytes_per_s

    def read(self, size: int, now: float) -> float:
        begins = max(now, self._free_at)
        self.queue_s += QUEUE_WEIGHT * (begins - now - self.queue_s)
        self._free_at = begins + self.seconds(size)
        return self._free_at


class Tier:
    """A tier with a byte capacity; misses are read over the link from below."""

    def __init__(self, *, capacity: int, policy: CachePolicy, link: Link, step_s: float) -> None:
        self.capacity = capacity
        self.policy = policy
        self.sizes: dict[Key, int] = {}
        self.num_bytes = 0
        self.above: Tier | None = None
        self.below: Tier | None = None
        self.miss_rate = HELD_ABOVE_FACTOR
        """The miss rate as the engine estimates it."""
        self._link = link
        self._step_s = step_s

    def __contains__(self, key: Key) -> bool:
        return key in self.sizes

    def looked_up(self, key: Key, now: float) -> None:
        self.miss_rate += MISS_RATE_WEIGHT * ((key not in self.sizes) - self.miss_rate)
        self.policy.used(key, now)

    def insert(self, key: Key, size: int, *, busy: Mapping[Key, int], now: float) -> bool:
        """Insert a key after evictions; return False if busy keys leave no room."""
        while self.num_bytes + size > self.capacity:
            victim = self.policy.victim(busy, now)
            if victim is None:
                return False
            self._evict(victim)
        self.sizes[key] = size
        self.num_bytes += size
        self.policy.inserted(key, cost_s=self._cost_s(key), size=size, now=now)
        self._reprice_below(key)
        return True

    def _evict(self, key: Key) -> None:
        self.policy.evicted(key)
        self.num_bytes -= self.sizes.pop(key)
        self._reprice_below(key)

    def _cost_s(self, key: Key) -> float:
        load_s = self._link.queue_s + self._link.seconds(self.sizes[key])
        if self.above is None or key not in self.above:
            return miss_cost_s(load_s, step_s=self._step_s)
        return miss_cost_s(
            load_s,
            step_s=self._step_s,
            is_held_above=True,
            miss_rate_above=self.above.miss_rate,
        )

    def _reprice_below(self, key: Key) -> None:
        if self.below is not None and key in self.below:
            self.below.policy.priced(key, self.below._cost_s(key))


@dataclass(slots=True)
class Outcome:
    """Counts after the warm-up; waits start at the step that sees the request."""

    waits_s: list[float] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys((DEVICE, *LINKS), 0))
    """Requests by the fastest tier with the adapter; joining a load counts as its source."""
    moved_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))


class Simulation:
    """Runs a trace through the three tiers."""

    def __init__(
        self,
        sizes: Mapping[Key, int],
        *,
        capacities: tuple[int, int, int],
        make: PolicyFactory,
        step_s: float = STEP_S,
        warm_up_s: float = 0.0,
    ) -> None:
        self._sizes = sizes
        self._step_s = step_s
        self._warm_up_s = warm_up_s
        self._links = {name: Link(*terms) for name, terms in LINKS.items()}
        self._device, self._host, self._disk = (
            Tier(capacity=capacity, policy=make(capacity, level > 0), link=link, step_s=step_s)
            for level, (capacity, link) in enumerate(
                zip(capacities, self._links.values(), strict=True)
            )
        )
        self._device.below, self._host.below = self._host, self._disk
        self._host.above, self._disk.above = self._device, self._host
        # Requests that run with an adapter or wait for it.
        self._busy: dict[Key, int] = {}
        self._waiting: dict[Key, list[Arrival]] = {}
        self._source_of: dict[Key, str] = {}
        self._queue: deque[Key] = deque()
        # (time, order, adapter, whether it is the end of a load or of a request)
        self._events: list[tuple[float, int, Key, bool]] = []
        self._order = itertools.count()
        self.outcome = Outcome()

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Simulate the arrivals; every tier starts full of the first adapters of `sizes`."""
        for tier in (self._device, self._host, self._disk):
            for key, size in self._sizes.items():
                if tier.num_bytes + size <= tier.capacity:
                    tier.insert(key, size, busy={}, now=0.0)
        for arrival in arrivals:
            seen_s = self._next_step(arrival.time_s)
            self._advance(seen_s)
            self._arrive(replace(arrival, time_s=seen_s))
        self._advance(math.inf)
        return self.outcome

    def _next_step(self, time_s: float) -> float:
        if not self._step_s:
            return time_s
        # The margin keeps times on a boundary.
        return math.ceil(time_s / self._step_s - 1e-6) * self._step_s

    def _advance(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            now, _, key, is_load = heapq.heappop(self._events)
            if is_load:
                self._loaded(key, now)
            else:
                self._finished(key, now)

    def _arrive(self, arrival: Arrival) -> None:
        key, now = arrival.adapter, arrival.time_s
        self._busy[key] = self._busy.get(key, 0) + 1
        self._device.looked_up(key, now)
        if key in self._waiting:
            self._waiting[key].append(arrival)
            if key in self._source_of:
                self._count(arrival, self._source_of[key])
        elif key in self._device:
            self._count(arrival, DEVICE)
            self._start(arrival, now)
        else:
            self._waiting[key] = [arrival]
            self._queue.append(key)
            self._load_queued(now)

    def _load_queued(self, now: float) -> None:
        while self._queue:
            key = self._queue[0]
            size = self._sizes[key]
            if not self._device.insert(key, size, busy=self._busy, now=now):
                return
            self._queue.popleft()
            source = self._find(key, now)
            self._source_of[key] = source
            for arrival in self._waiting[key]:
                self._count(arrival, source)
            if now >= self._warm_up_s:
                self.outcome.moved_bytes[source] += size
            self._push(self._links[source].read(size, now), key, is_load=True)

    def _find(self, key: Key, now: float) -> str:
        """Return the tier with the adapter, and insert it into the tiers on its way up."""
        size = self._sizes[key]
        self._host.policy.used(key, now)
        if key in self._host:
            return "host"
        self._disk.policy.used(key, now)
        source = "disk" if key in self._disk else "remote"
        if source == "remote":
            self._disk.insert(key, size, busy=self._busy, now=now)
        self._host.insert(key, size, busy=self._busy, now=now)
        return source

    def _loaded(self, key: Key, now: float) -> None:
        del self._source_of[key]
        for arrival in self._waiting.pop(key):
            self._start(arrival, now)

    def _start(self, arrival: Arrival, now: float) -> None:
        if arrival.time_s >= self._warm_up_s:
            self.outcome.waits_s.append(now - arrival.time_s)
        self._push(now + service_s(arrival), arrival.adapter, is_load=False)

    def _finished(self, key: Key, now: float) -> None:
        self._busy[key] -= 1
        if not self._busy[key]:
            del self._busy[key]
            self._load_queued(now)

    def _push(self, time_s: float, key: Key, *, is_load: bool) -> None:
        event = (self._next_step(time_s), next(self._order), key, is_load)
        heapq.heappush(self._events, event)

    def _count(self, arrival: Arrival, tier: str) -> None:
        if arrival.time_s >= self._warm_up_s:
            self.outcome.found[tier] += 1


def service_s(arrival: Arrival) -> float:
    return arrival.prompt_tokens * PROMPT_TOKEN_S + arrival.output_tokens * STEP_S
