"""Eviction policies: one score for adapters and prefix pages, in every tier."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, Protocol, TypeVar, get_args

from loramux.errors import InvalidRequest

PolicyName = Literal["lru", "cost"]
Value = TypeVar("Value")

# Tuned with the cache simulation benchmark on seeds 1 to 8. A short half-life follows popularity
# that drifts, a long one tells rarely used keys apart.
HALF_LIFE_TURNOVERS = 30.0
DRIFT_HALF_LIFE_TURNOVERS = 3.0
LOWER_HALF_LIFE_TURNOVERS = 80.0
HALF_LIFE_S = 24 * 3600.0
# Weight of the newest use in the mean gain of the short half-life, and the gain at which one of the
# two half-lives is clearly better.
GAIN_WEIGHT = 0.005
CLEAR_GAIN_BITS = 0.1
# Part of the predicted probability that is spread evenly over all keys.
EVEN_SHARE = 0.1
MAX_KEYS = 262_144
# Probability that an image is asked for in a tier although a faster tier holds it too: the upper
# limit, and the value until it is measured. Then, the weight of a request in the measurement.
HELD_ABOVE_FACTOR = 0.7
MISS_RATE_WEIGHT = 0.01
# Lower limit of a cost, so that its logarithm is finite.
MIN_COST_S = 1e-9
# log2 of the rate of a key that was prefetched and never used: below that of any used key.
NEVER_USED = -1e6


class EvictionPolicy(Protocol):
    """Scores the keys of one tier by their uses. It does not know which keys are resident."""

    def used(self, key: Hashable, now: float) -> None:
        """Record that a request asked this tier for the key, hit or miss."""

    def score(self, key: Hashable, *, cost_s: float, size: int) -> float:
        """Return the key's score; the lowest score is evicted first.

        `cost_s` is the cost of a miss, `size` > 0 the memory that the key takes. The score changes
        only when the key is used, so that a heap may hold it until then.
        """

    def reuse_penalty(self, factor: float) -> float:
        """Return what to add to a score if the key's rate is `factor` times what its uses say."""

    def evicted(self, fraction: float) -> None:
        """Record that this fraction of the tier's memory was reclaimed from a key."""

    def forget(self, key: Hashable) -> None:
        """Drop the history of a key that will not come back."""


class LruPolicy:
    """Evicts the least recently used key, whatever its cost and size."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # Least recently used first.
        self._uses: dict[Hashable, int] = {}
        self._num_uses = 0

    def used(self, key: Hashable, now: float) -> None:
        self._num_uses += 1
        _put_last(self._uses, key, self._num_uses, max_keys=self._max_keys)

    def score(self, key: Hashable, *, cost_s: float, size: int) -> float:
        return self._uses.get(key, -math.inf)

    def reuse_penalty(self, factor: float) -> float:
        return 0.0

    def evicted(self, fraction: float) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)


class CostAwarePolicy:
    """Scores a key by log2(rate * cost_s / size), the seconds saved per unit of memory.

    The rate is an exponentially decayed count of uses: a use weighs half as much after every
    half-life. Age is counted in turnovers of the tier, so that a large tier, or one that seldom
    misses, has a longer history; wall time counts too, for tiers that seldom turn over. All keys
    decay alike, so that log2(sum of 2^(age at each use)) ranks them and does not change with time,
    and the clock may run faster while popularity is seen to drift.
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
        """Create a policy with a fixed or a drift-dependent half-life.

        `drift_half_life_turnovers`: half-life while popularity drifts; None: it is fixed.
        `last_use_bonus`: additional weight of the most recent use, until the next one.
        """
        self._half_life_turnovers = half_life_turnovers
        self._half_life_s = half_life_s
        self._last_use_bonus = last_use_bonus
        self._max_keys = max_keys
        self._num_half_lives = 0.0
        # (log2 of the decayed count, age at the last use); least recently used first.
        self._uses: dict[Hashable, tuple[float, float]] = {}
        self._drift: DriftDetector | None = None
        if drift_half_life_turnovers is not None:
            self._drift = DriftDetector(
                drift_half_life_turnovers, half_life_turnovers, max_keys=max_keys
            )

    @property
    def half_life_turnovers(self) -> float:
        """Returns the current half-life."""
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

    def score(self, key: Hashable, *, cost_s: float, size: int) -> float:
        use = self._uses.get(key)
        log_rate = NEVER_USED if use is None else _log2_sum(*use, self._last_use_bonus)
        return log_rate + math.log2(max(cost_s, MIN_COST_S) / size)

    def reuse_penalty(self, factor: float) -> float:
        return math.log2(factor)

    def evicted(self, fraction: float) -> None:
        if self._drift is not None:
            self._drift.num_turnovers += fraction
        self._num_half_lives += fraction / self.half_life_turnovers

    def forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)
        if self._drift is not None:
            self._drift.forget(key)


class DriftDetector:
    """Detects whether a short half-life predicts the next use better than a long one.

    For each half-life, a key's predicted probability is its share of all decayed uses. The gain is
    the mean log2 ratio of the short and the long prediction, over the last few hundred uses.
    """

    def __init__(self, short_turnovers: float, long_turnovers: float, *, max_keys: int) -> None:
        self._half_lives = (short_turnovers, long_turnovers)
        self._max_keys = max_keys
        # log2 of the decayed counts for both half-lives; least recently used first.
        self._counts: dict[Hashable, tuple[float, float]] = {}
        self._totals = (-math.inf, -math.inf)
        self._gain_bits = 0.0
        self.num_turnovers = 0.0

    @property
    def half_life_turnovers(self) -> float:
        """Returns the better half-life, or a value between both while the gain is small."""
        short, long = self._half_lives
        gain = max(-30.0, min(30.0, self._gain_bits / CLEAR_GAIN_BITS))
        return long * math.pow(short / long, 1 / (1 + math.exp(-gain)))

    def used(self, key: Hashable) -> None:
        counts = self._counts.get(key)
        if counts is not None:
            short, long = map(self._probability, counts, self._totals)
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

    def _probability(self, log_count: float, log_total: float) -> float:
        """Return the predicted probability of the next use; it is never 0."""
        share = math.pow(2.0, log_count - log_total)
        return (1 - EVEN_SHARE) * share + EVEN_SHARE / len(self._counts)


def make_policy(name: PolicyName, *, is_lower_tier: bool = False) -> EvictionPolicy:
    """Create the policy of a tier.

    `is_lower_tier`: the tier sees only the misses of a faster one. A key that was just used is in
    the faster tier then, so that its last use says little about the next one here.
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
        f"There is no eviction policy {name!r}. Valid values: {', '.join(get_args(PolicyName))}.",
        param="eviction",
    )


def miss_cost_s(
    load_s: float,
    *,
    step_s: float = 0.0,
    is_held_above: bool = False,
    miss_rate_above: float = HELD_ABOVE_FACTOR,
) -> float:
    """Return the expected cost of a miss: the load, and the step that the request misses.

    `is_held_above`: a faster tier holds the key too, so that this tier is asked for it only after
    the faster one has evicted it. The probability of that is the faster tier's miss rate, up to a
    limit: with uniform popularity a tier misses most keys and still keeps its own for long.
    """
    probability = min(miss_rate_above, HELD_ABOVE_FACTOR) if is_held_above else 1.0
    return (load_s + step_s) * probability


def _log2_sum(first: float, second: float, weight: float = 1.0) -> float:
    """Return log2(2^first + weight * 2^second)."""
    high = max(first, second)
    return high + math.log2(2.0 ** (first - high) + weight * 2.0 ** (second - high))


def _put_last(table: dict[Hashable, Value], key: Hashable, value: Value, *, max_keys: int) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > max_keys:
        del table[next(iter(table))]
