"""Eviction policies as the simulator drives them: the known ones, and loramux's own."""

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
    """The policy of one tier, which tells it of what happens there."""

    def used(self, key: Key, now: float) -> None:
        """A request looked for it in this tier, whether it was there or not."""

    def inserted(self, key: Key, *, cost_s: float, size: int, now: float) -> None: ...

    def priced(self, key: Key, cost_s: float) -> None:
        """What a miss of a resident key would cost has changed."""

    def victim(self, busy: Container[Key], now: float) -> Key | None:
        """Which key leaves next; None: all are busy."""

    def evicted(self, key: Key) -> None: ...


class Scored:
    """The lowest score leaves; it is set when its key comes in and at every use."""

    def __init__(self) -> None:
        self._scores: dict[Key, float] = {}
        self._terms: dict[Key, tuple[float, int]] = {}
        # (score, order, key): of equals the one that was scored first leaves. Entries that are no
        # longer a key's score are skipped.
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
    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return now


class Lfu(Scored):
    """Counts outlive eviction."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Key, int] = {}

    def used(self, key: Key, now: float) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        super().used(key, now)

    def score(self, key: Key, cost_s: float, size: int, now: float) -> float:
        return self._counts.get(key, 0)


class Gdsf(Scored):
    """floor + count * cost / size, where the floor is the score of the last that left.

    The cost is 1 (which counts hits) or the seconds of a miss.
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
    """0.45 frequency + 0.10 recency + 0.45 size, each normalised over what is resident."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}
        self._last: dict[Key, float] = {}
        # Of one (count, size) the longest unused leaves first, and stands first.
        self._alike: dict[tuple[int, int], dict[Key, None]] = {}

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
        if not self._alike:
            return None
        of_count = 0.45 / max(1, max(count for count, _ in self._alike))
        of_size = 0.45 / max(size for _, size in self._alike)
        oldest = min(self._last[next(iter(keys))] for keys in self._alike.values())
        of_time = 0.10 / max(1e-9, now - oldest)
        best: tuple[float, Key | None] = (math.inf, None)
        for (count, size), keys in self._alike.items():
            key = next((key for key in keys if key not in busy), None)
            if key is not None:
                score = of_count * count + of_time * (self._last[key] - oldest) + of_size * size
                best = min(best, (score, key), key=lambda entry: entry[0])
        return best[1]

    def evicted(self, key: Key) -> None:
        self._leave(key)
        del self._sizes[key], self._last[key]

    def _join(self, key: Key, now: float) -> None:
        self._alike.setdefault((self._counts[key], self._sizes[key]), {})[key] = None
        self._last[key] = now

    def _leave(self, key: Key) -> None:
        alike = (self._counts[key], self._sizes[key])
        del self._alike[alike][key]
        if not self._alike[alike]:
            del self._alike[alike]


class S3Fifo:
    """Newcomers queue in a tenth of the room; what is used there, or comes back, joins the main."""

    def __init__(self, *, capacity: int, small_share: float = 0.1) -> None:
        self._small_limit = int(capacity * small_share)
        self._ghost_limit = capacity - self._small_limit
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        self._small_bytes = 0
        self._ghost_bytes = 0
        # 0 to 3, of what is resident.
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
        """The oldest that was not used; those before it that were move to the main queue."""
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
        # Each round takes one use from every idle key, and none has more than three.
        for _ in range(4 * len(self._main)):
            key = next(iter(self._main))
            if key not in busy:
                if self._uses[key] == 0:
                    return key
                self._uses[key] -= 1
            self._main.move_to_end(key)
        return None


class Own(Scored):
    """A policy of loramux, called as the engine's tiers call it."""

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
        return self._policy.worth(key, cost_s=cost_s, size=size)

    def evicted(self, key: Key) -> None:
        self._policy.evicted(self._terms[key][1] / self._capacity)
        super().evicted(key)


PolicyFactory = Callable[[int, bool], CachePolicy]
"""Of a tier: its bytes, and whether it stands below another one."""

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
# A decode step at a middling batch; a prompt token in a chunked prefill.
STEP_S = 6e-3
PROMPT_TOKEN_S = 30e-6
# Seconds to start, bytes per second: pinned host memory, NVMe, object store.
LINKS = {"host": (1e-4, 55e9), "disk": (1e-3, 3e9), "remote": (3e-2, 0.5e9)}
DEVICE = "device"
# Of the last load in the mean time that loads wait for a link.
QUEUE_WEIGHT = 0.02


def adapter_bytes(rank: int) -> int:
    return rank * BYTES_PER_RANK


class Link:
    """Reads one adapter at a time."""

    def __init__(self, start_s: float, bytes_per_s: float) -> None:
        self._start_s = start_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.queue_s = 0.0
        """What the last loads have waited for the link."""

    def seconds(self, size: int) -> float:
        return self._start_s + size / self._bytes_per_s

    def read(self, size: int, now: float) -> float:
        begins = max(now, self._free_at)
        self.queue_s += QUEUE_WEIGHT * (begins - now - self.queue_s)
        self._free_at = begins + self.seconds(size)
        return self._free_at


class Tier:
    """A budget of bytes; misses are read over the link to what stands below."""

    def __init__(self, *, capacity: int, policy: CachePolicy, link: Link, step_s: float) -> None:
        self.capacity = capacity
        self.policy = policy
        self.sizes: dict[Key, int] = {}
        self.num_bytes = 0
        self.above: Tier | None = None
        self.below: Tier | None = None
        self.miss_rate = HELD_ABOVE_FACTOR
        """As the engine knows it: measured on the device."""
        self._link = link
        self._step_s = step_s

    def __contains__(self, key: Key) -> bool:
        return key in self.sizes

    def asked(self, key: Key, now: float) -> None:
        self.miss_rate += MISS_RATE_WEIGHT * ((key not in self.sizes) - self.miss_rate)
        self.policy.used(key, now)

    def insert(self, key: Key, size: int, *, busy: Mapping[Key, int], now: float) -> bool:
        """False: what is busy leaves no room, though idle ones may have left."""
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
    """What happened after the warm-up. Waits are counted from the step that saw the request."""

    waits_s: list[float] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys((DEVICE, *LINKS), 0))
    """Requests by the fastest tier that had the adapter; one that joins a load counts like it."""
    moved_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))


class Simulation:
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
        # How many requests run with it or wait for it.
        self._busy: dict[Key, int] = {}
        self._waiting: dict[Key, list[Arrival]] = {}
        self._source_of: dict[Key, str] = {}
        self._queue: deque[Key] = deque()
        # (time, order, adapter, is the end of a load, not of a request)
        self._events: list[tuple[float, int, Key, bool]] = []
        self._order = itertools.count()
        self.outcome = Outcome()

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Every tier begins full of whatever comes first in `sizes`."""
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
        # The margin keeps a time on a boundary where it is.
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
        self._device.asked(key, now)
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
        """Where it lies; on its way up it comes into every tier that it passes."""
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
