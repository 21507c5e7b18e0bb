"""Eviction policies as the simulator drives them: the known ones, and loramux's own."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Protocol

from loramux.memory.policies import EvictionPolicy, make_policy

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
