"""What to evict first: one measure of worth for adapters and prefix pages, in every tier."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, Protocol, TypeVar, get_args

from loramux.errors import InvalidRequest

PolicyName = Literal["lru", "cost"]
Value = TypeVar("Value")

# Tuned with benchmarks/cache_simulation.py on seeds 1 to 8. A short half-life follows popularity
# that moves, a long one tells rarely used keys apart.
HALF_LIFE_TURNOVERS = 30.0
DRIFT_HALF_LIFE_TURNOVERS = 3.0
LOWER_HALF_LIFE_TURNOVERS = 80.0
HALF_LIFE_S = 24 * 3600.0
# Of the last use in the mean gain of the short memory, and a gain that says which is right.
GAIN_WEIGHT = 0.005
CLEAR_GAIN_BITS = 0.1
# Of the next use, what is expected of any key, whatever its past.
EVEN_SHARE = 0.1
MAX_KEYS = 262_144
# Of a miss in a tier while a faster one has a copy too: how likely it still is, at most and where
# that is not measured; and the weight of the last request where it is.
HELD_ABOVE_FACTOR = 0.7
MISS_RATE_WEIGHT = 0.01
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

    def doubt(self, trust: float) -> float:
        """To be added to the worth of what comes back this much seldomer than its uses say."""

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

    def doubt(self, trust: float) -> float:
        return 0.0

    def evicted(self, share: float) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)


class CostAwarePolicy:
    """log2(rate * cost_s / size): seconds of waiting that a unit of memory saves.

    The rate is a count of uses that fades: a use weighs half as much after every half-life. Age is
    counted in turnovers of the tier, so that a large tier, or one that seldom misses, remembers
    longer, and misses make it forget faster; days count too, for tiers that seldom turn over.
    All keys age alike: log2(sum of 2^(age at each use)) ranks them and never changes by itself,
    and the clock may run faster while popularity is seen to move.
    """

    def __init__(
        self,
        *,
        half_life_turnovers: float = HALF_LIFE_TURNOVERS,
        drift_half_life_turnovers: float | None = None,
        half_life_s: float = HALF_LIFE_S,
        last_use_bonus: float = 1.0,
        max_keys: int = MAX_KEYS,
    ) -> None:
        """`drift_half_life_turnovers`: the half-life while popularity moves; None: always the same.

        `last_use_bonus`: how many more uses the last one counts for, until the next.
        """
        self._half_life_turnovers = half_life_turnovers
        self._half_life_s = half_life_s
        self._last_use_bonus = last_use_bonus
        self._max_keys = max_keys
        self._num_half_lives = 0.0
        # log2 of the count, and the age at the last use; oldest use first.
        self._uses: dict[Hashable, tuple[float, float]] = {}
        self._drift: DriftMeter | None = None
        if drift_half_life_turnovers is not None:
            self._drift = DriftMeter(
                drift_half_life_turnovers, half_life_turnovers, max_keys=max_keys
            )

    @property
    def half_life_turnovers(self) -> float:
        """At present."""
        if self._drift is None:
            return self._half_life_turnovers
        return self._drift.half_life_turnovers

    def used(self, key: Hashable, now: float) -> None:
        if self._drift is not None:
            self._drift.used(key)
        age = self._num_half_lives + now / self._half_life_s
        log_count, _ = self._uses.get(key, (-math.inf, age))
        use = (_log2_sum(age, log_count), age)
        _put_last(self._uses, key, use, max_keys=self._max_keys)

    def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
        use = self._uses.get(key)
        log_rate = NEVER_USED if use is None else _log2_sum(*use, self._last_use_bonus)
        return log_rate + math.log2(max(cost_s, MIN_COST_S) / size)

    def doubt(self, trust: float) -> float:
        return math.log2(trust)

    def evicted(self, share: float) -> None:
        if self._drift is not None:
            self._drift.num_turnovers += share
        self._num_half_lives += share / self.half_life_turnovers

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)
        if self._drift is not None:
            self._drift.forget(key)


class DriftMeter:
    """Whether a short memory foretells the next use better than a long one, by what has come true.

    Each memory gives a key its share of the faded uses. The gain is how many bits likelier the
    short one thought the uses that came, on average over the last few hundred.
    """

    def __init__(self, short_turnovers: float, long_turnovers: float, *, max_keys: int) -> None:
        self._half_lives = (short_turnovers, long_turnovers)
        self._max_keys = max_keys
        # log2 of the faded counts of both memories; longest unused first.
        self._counts: dict[Hashable, tuple[float, float]] = {}
        self._totals = (-math.inf, -math.inf)
        self._gain_bits = 0.0
        self.num_turnovers = 0.0

    @property
    def half_life_turnovers(self) -> float:
        """Near the one whose forecasts are better, and between them while that is not clear."""
        short, long = self._half_lives
        doubt = max(-30.0, min(30.0, self._gain_bits / CLEAR_GAIN_BITS))
        return long * math.pow(short / long, 1 / (1 + math.exp(-doubt)))

    def used(self, key: Hashable) -> None:
        counts = self._counts.get(key)
        if counts is not None:
            short, long = map(self._chance, counts, self._totals)
            self._gain_bits += GAIN_WEIGHT * (math.log2(short / long) - self._gain_bits)
        short_age, long_age = (self.num_turnovers / half_life for half_life in self._half_lives)
        short_count, long_count = counts or (-math.inf, -math.inf)
        new = (_log2_sum(short_age, short_count), _log2_sum(long_age, long_count))
        _put_last(self._counts, key, new, max_keys=self._max_keys)
        self._totals = (
            _log2_sum(short_age, self._totals[0]),
            _log2_sum(long_age, self._totals[1]),
        )

    def forget(self, key: Hashable) -> None:
        self._counts.pop(key, None)

    def _chance(self, log_count: float, log_total: float) -> float:
        """Of the next use; a part goes to all keys alike, so that none is thought impossible."""
        share = math.pow(2.0, log_count - log_total)
        return (1 - EVEN_SHARE) * share + EVEN_SHARE / len(self._counts)


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
            return CostAwarePolicy(drift_half_life_turnovers=DRIFT_HALF_LIFE_TURNOVERS)
    raise InvalidRequest(
        f"No eviction policy is called {name!r}; the known ones are: "
        f"{', '.join(get_args(PolicyName))}.",
        param="eviction",
    )


def miss_cost_s(
    load_s: float,
    *,
    step_s: float = 0.0,
    is_held_above: bool = False,
    miss_rate_above: float = HELD_ABOVE_FACTOR,
) -> float:
    """What a miss costs a request: the load with its queue, and the step that it sits out.

    `is_held_above`: a faster tier has it too, so that this one is asked for it only if that tier
    has lost it by then. That is as likely as its misses are (`miss_rate_above`), up to a limit:
    where all keys are alike, a tier misses most of them and yet keeps its own for long.
    """
    still_asked = min(miss_rate_above, HELD_ABOVE_FACTOR) if is_held_above else 1.0
    return (load_s + step_s) * still_asked


def _log2_sum(first: float, second: float, weight: float = 1.0) -> float:
    """log2(2^first + weight * 2^second)."""
    high = max(first, second)
    return high + math.log2(2.0 ** (first - high) + weight * 2.0 ** (second - high))


def _put_last(table: dict[Hashable, Value], key: Hashable, value: Value, *, max_keys: int) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > max_keys:
        del table[next(iter(table))]
