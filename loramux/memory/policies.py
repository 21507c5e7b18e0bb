"""What to evict first: one measure of worth for adapters and prefix pages, in every tier."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, Protocol, TypeVar, get_args

from loramux.errors import InvalidRequest

PolicyName = Literal["lru", "cost"]
Value = TypeVar("Value")

# Tuned with benchmarks/cache_simulation.py. A short half-life follows popularity that moves, a
# long one tells rarely used keys apart.
HALF_LIFE_TURNOVERS = 10.0
LOWER_HALF_LIFE_TURNOVERS = 80.0
HALF_LIFE_S = 24 * 3600.0
MAX_KEYS = 262_144
# Of a miss in a tier while a faster one has a copy too: how likely it still is.
HELD_ABOVE_FACTOR = 0.5
# A miss that was measured to cost nothing must not stop the eviction of others.
MIN_COST_S = 1e-9
# Below any rate: what was only fetched ahead of its use leaves first, by cost and size.
NEVER_USED = -1e6


class EvictionPolicy(Protocol):
    """The policy of one tier: keys and their uses. It does not know which are resident."""

    def used(self, key: Hashable, now: float) -> None:
        """A request looked for it in this tier, hit or miss; a miss leaves a ghost entry."""

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        """Higher stays longer; cost_s is what a miss would cost, size > 0 what it takes.

        It changes only when the key is used, so that a heap may hold it until then.
        """

    def evicted(self, share: float) -> None:
        """This share of the tier's room was taken from one key for another."""

    def forget(self, key: Hashable) -> None:
        """The key will not come back: its adapter was removed."""


class LruPolicy:
    """The longest unused leaves first, whatever it costs."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Oldest use first.
        self._uses: dict[Hashable, int] = {}
        self._num_uses = 0

    def used(self, key: Hashable, now: float) -> None:
        self._num_uses += 1
        _put_last(self._uses, key, self._num_uses, max_keys=self._max_keys)

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        return self._uses.get(key, -math.inf)

    def evicted(self, share: float) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)


class CostAwarePolicy:
    """log2(rate * cost_s / size): seconds of waiting that a unit of memory saves.

    The rate is a count of uses that fades: a use weighs half as much after every half-life. Age is
    counted in turnovers of the tier, so that a large tier, or one that seldom misses, remembers
    longer, and misses make it forget faster; days count too, for tiers that seldom turn over.
    All keys age alike: log2(sum of 2^(age at each use)) ranks them and never changes by itself.
    """

    def __init__(
        self,
        *,
        half_life_turnovers: float = HALF_LIFE_TURNOVERS,
        half_life_s: float = HALF_LIFE_S,
        last_use_bonus: float = 1.0,
        max_keys: int = MAX_KEYS,
    ) -> None:
        """`last_use_bonus`: how many more uses the last one counts for, until the next."""
        self._half_life_turnovers = half_life_turnovers
        self._half_life_s = half_life_s
        self._last_use_bonus = last_use_bonus
        self._max_keys = max_keys
        self._num_turnovers = 0.0
        # log2 of the count, and the age at the last use; oldest use first.
        self._uses: dict[Hashable, tuple[float, float]] = {}

    def used(self, key: Hashable, now: float) -> None:
        age = self._num_turnovers / self._half_life_turnovers + now / self._half_life_s
        log_count, _ = self._uses.get(key, (-math.inf, age))
        use = (_log2_sum(age, log_count), age)
        _put_last(self._uses, key, use, max_keys=self._max_keys)

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        use = self._uses.get(key)
        log_rate = NEVER_USED if use is None else _log2_sum(*use, self._last_use_bonus)
        return log_rate + math.log2(max(cost_s, MIN_COST_S) / size)

    def evicted(self, share: float) -> None:
        self._num_turnovers += share

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)


def make_policy(name: PolicyName, *, is_lower_tier: bool = False) -> EvictionPolicy:
    """`is_lower_tier`: a faster tier stands above, and only its misses are asked for here.

    What was just asked for has moved up then, so that its last use says little of the next.
    """
    match name:
        case "lru":
            return LruPolicy()
        case "cost" if is_lower_tier:
            return CostAwarePolicy(
                half_life_turnovers=LOWER_HALF_LIFE_TURNOVERS, last_use_bonus=0.0
            )
        case "cost":
            return CostAwarePolicy()
    raise InvalidRequest(
        f"No eviction policy is called {name!r}; the known ones are: "
        f"{', '.join(get_args(PolicyName))}.",
        param="eviction_policy",
    )


def miss_cost_s(load_s: float, *, step_s: float = 0.0, is_held_above: bool = False) -> float:
    """What a miss costs a request: the load with its queue, and the step that it sits out.

    `is_held_above`: a faster tier has it too, so that this one is seldom asked for it.
    """
    return (load_s + step_s) * (HELD_ABOVE_FACTOR if is_held_above else 1.0)


def _log2_sum(first: float, second: float, weight: float = 1.0) -> float:
    """log2(2^first + weight * 2^second)."""
    high = max(first, second)
    return high + math.log2(2.0 ** (first - high) + weight * 2.0 ** (second - high))


def _put_last(table: dict[Hashable, Value], key: Hashable, value: Value, *, max_keys: int) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > max_keys:
        del table[next(iter(table))]
