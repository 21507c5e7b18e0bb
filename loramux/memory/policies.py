"""What to evict first: one measure of worth for adapters and prefix pages, whatever their tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Literal, Protocol

from loramux.errors import InvalidRequest

PolicyName = Literal["lru", "cost"]

# Chosen by benchmarks/cache_simulation.py on traces whose popularity stays and on some where it
# moves: fewer turnovers follow changes faster, more of them tell rare keys apart better.
HALF_LIFE_TURNOVERS = 12.0
HALF_LIFE_S = 6 * 3600.0
MAX_KEYS = 262_144
# What a copy in a slower tier is worth while a faster one has it too: misses are rarer then.
_HELD_ABOVE_FACTOR = 0.5


class EvictionPolicy(Protocol):
    """The policy of one tier: keys and their uses. It does not know which are resident."""

    def used(self, key: Hashable, now: float) -> None:
        """A request looked for it in this tier, hit or miss; misses leave a ghost entry.

        `now` never runs backwards.
        """

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        """Higher stays longer; cost_s > 0 is what a miss would cost, size > 0 what it takes.

        It changes only when the key is used, so a heap may hold it until then.
        """

    def evicted(self, share: float) -> None:
        """This share of the tier's room was taken from someone for someone else."""

    def forget(self, key: Hashable) -> None:
        """The key will not come back: its adapter was removed."""


class LruPolicy:
    """The longest unused leaves first, whatever it costs."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Oldest use first.
        self._uses: dict[Hashable, float] = {}
        self._num_uses = 0

    def used(self, key: Hashable, now: float) -> None:
        self._num_uses += 1
        _put_last(self._uses, key, self._num_uses, self._max_keys)

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        return self._uses.get(key, -math.inf)

    def evicted(self, share: float) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)


class CostAwarePolicy:
    """log2(rate * cost_s / size): the seconds of waiting that a unit of memory saves.

    The rate is a count in which a use weighs half as much after every half-life. Age is counted in
    turnovers of the tier: a large tier, or one that seldom misses, must remember longer to tell its
    keys apart, and when popularity moves, misses make it forget faster. Seconds count a little, for
    tiers that never turn over. All keys age alike, so that log2(sum of 2^(age at each use)) ranks
    them at any time and does not change by itself.
    """

    def __init__(
        self,
        *,
        half_life_turnovers: float = HALF_LIFE_TURNOVERS,
        half_life_s: float = HALF_LIFE_S,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._half_life_turnovers = half_life_turnovers
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._num_turnovers = 0.0
        # Oldest use first.
        self._log_rates: dict[Hashable, float] = {}

    def used(self, key: Hashable, now: float) -> None:
        age = self._num_turnovers / self._half_life_turnovers + now / self._half_life_s
        before = self._log_rates.get(key, -math.inf)
        log_rate = age + math.log2(1.0 + 2.0 ** (before - age))
        _put_last(self._log_rates, key, log_rate, self._max_keys)

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        return self._log_rates.get(key, -math.inf) + math.log2(cost_s / size)

    def evicted(self, share: float) -> None:
        self._num_turnovers += share

    def forget(self, key: Hashable) -> None:
        self._log_rates.pop(key, None)


def miss_cost_s(load_s: float, *, step_s: float = 0.0, is_held_above: bool = False) -> float:
    """What a miss costs a request: the load, and the step that it sits out before it is noticed.

    `is_held_above`: a faster tier has it too, so that this tier is seldom asked for it.
    """
    return (load_s + step_s) * (_HELD_ABOVE_FACTOR if is_held_above else 1.0)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "cost": CostAwarePolicy}


def make_policy(name: PolicyName) -> EvictionPolicy:
    if name not in POLICIES:
        raise InvalidRequest(
            f"No eviction policy is called {name!r}; the known ones are: {', '.join(POLICIES)}.",
            param="eviction_policy",
        )
    return POLICIES[name]()


def _put_last(table: dict[Hashable, float], key: Hashable, value: float, max_keys: int) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > max_keys:
        del table[next(iter(table))]
