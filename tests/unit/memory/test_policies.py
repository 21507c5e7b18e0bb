from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.errors import InvalidRequest
from loramux.memory.policies import (
    HELD_ABOVE_FACTOR,
    CostAwarePolicy,
    EvictionPolicy,
    LruPolicy,
    PolicyName,
    make_policy,
    miss_cost_s,
)

KEYS = st.sampled_from("abcd")
# (key used after so many seconds) or (share of the tier evicted)
EVENTS = st.lists(
    st.one_of(
        st.tuples(KEYS, st.floats(0, 1e5)),
        st.tuples(st.none(), st.floats(0, 3)),
    ),
    max_size=40,
)
POLICIES = st.sampled_from(
    [
        lambda: make_policy("lru"),
        lambda: make_policy("cost"),
        lambda: make_policy("cost", is_lower_tier=True),
    ]
)
HALF_LIFE_TURNOVERS = 2.0
HALF_LIFE_S = 1000.0


def replay(
    policy: EvictionPolicy, events: list[tuple[str | None, float]]
) -> dict[str, list[float]]:
    """Return the ages, in half-lives, at which each key was used; and the age at the
    end under ''.
    """
    now, turnovers = 0.0, 0.0
    ages: dict[str, list[float]] = {}
    for key, amount in events:
        if key is None:
            turnovers += amount
            policy.evicted(amount)
        else:
            now += amount
            policy.used(key, now)
            ages.setdefault(key, []).append(turnovers / HALF_LIFE_TURNOVERS + now / HALF_LIFE_S)
    ages[""] = [turnovers / HALF_LIFE_TURNOVERS + now / HALF_LIFE_S]
    return ages


def faded_count(ages: list[float], end: float, bonus: float) -> float:
    return sum(2.0 ** (age - end) for age in ages) + bonus * 2.0 ** (ages[-1] - end)


@given(events=EVENTS, bonus=st.sampled_from([0.0, 1.0]))
def test_worth_is_the_faded_count_times_cost_per_size(
    events: list[tuple[str | None, float]], bonus: float
) -> None:
    policy = CostAwarePolicy(
        half_life_turnovers=HALF_LIFE_TURNOVERS, half_life_s=HALF_LIFE_S, last_use_bonus=bonus
    )
    ages = replay(policy, events)
    (end,) = ages.pop("")
    for key, own_ages in ages.items():
        count = faded_count(own_ages, end, bonus)
        if count > 0:  # not faded beyond what a float can hold
            expected = math.log2(count) + end + math.log2(0.25 / 8)
            assert policy.score(key, cost_s=0.25, size=8) == pytest.approx(expected, abs=1e-6)


@given(before=EVENTS, after=EVENTS, name=st.sampled_from(["lru", "cost"]))
def test_a_worth_in_a_heap_stays_true_until_its_key_is_used(
    before: list[tuple[str | None, float]], after: list[tuple[str | None, float]], name: PolicyName
) -> None:
    policy = make_policy(name)
    replay(policy, before)
    worths = {key: policy.score(key, cost_s=0.01, size=3) for key in "abcd"}
    now = 1e7
    for key, amount in after:
        if key is None:
            policy.evicted(amount)
        else:
            now += amount
            policy.used(key, now)
            worths[key] = policy.score(key, cost_s=0.01, size=3)
    assert worths == {key: policy.score(key, cost_s=0.01, size=3) for key in "abcd"}


@given(
    events=EVENTS,
    make=POLICIES,
    costs_s=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
    sizes=st.lists(st.integers(1, 2**50), min_size=4, max_size=4),
)
def test_a_worth_is_a_number_and_its_order_the_same_in_pages_bytes_and_milliseconds(
    events: list[tuple[str | None, float]],
    make: Callable[[], EvictionPolicy],
    costs_s: list[float],
    sizes: list[int],
) -> None:
    """A NaN in a heap breaks the order of all others; a unit must not choose who leaves."""
    policy = make()
    replay(policy, events)

    def worths(*, per_page: int, per_s: float) -> list[float]:
        return [
            policy.score(key, cost_s=per_s * max(cost_s, 1e-6), size=per_page * size)
            for key, cost_s, size in zip("abcd", costs_s, sizes, strict=True)
        ]

    plain = worths(per_page=1, per_s=1.0)
    other = worths(per_page=2**16, per_s=1024.0)
    assert not any(math.isnan(worth) for worth in plain)
    for (first, first_other), (second, second_other) in itertools.combinations(
        zip(plain, other, strict=True), 2
    ):
        if not math.isclose(first, second, rel_tol=1e-12, abs_tol=1e-9):
            assert (first < second) is (first_other < second_other)


@given(events=EVENTS, make=POLICIES, key=KEYS, wait_s=st.floats(0, 1e6))
def test_a_use_never_makes_a_key_worth_less(
    events: list[tuple[str | None, float]],
    make: Callable[[], EvictionPolicy],
    key: str,
    wait_s: float,
) -> None:
    policy = make()
    replay(policy, events)
    now = sum(amount for used, amount in events if used is not None)
    before = policy.score(key, cost_s=0.01, size=3)
    policy.used(key, now + wait_s)
    assert policy.score(key, cost_s=0.01, size=3) >= before


@given(events=EVENTS)
def test_the_half_life_stays_between_the_short_and_the_long_one(
    events: list[tuple[str | None, float]],
) -> None:
    """Else the clock would stand still, or run away from all that is remembered."""
    policy = CostAwarePolicy(half_life_turnovers=30.0, drift_half_life_turnovers=3.0)
    replay(policy, events)
    assert 3.0 <= policy.half_life_turnovers <= 30.0


def test_lru_looks_at_the_last_use_alone_even_within_one_tick_of_the_clock() -> None:
    policy = LruPolicy()
    for key in ("often", "often", "early", "late"):
        policy.used(key, now=5.0)
    worths = [
        policy.score(key, cost_s=cost_s, size=size)
        for key, cost_s, size in (
            ("unknown", 9, 1),
            ("often", 9, 1),
            ("early", 1, 9),
            ("late", 1, 9),
        )
    ]
    assert worths == sorted(worths) and len(set(worths)) == 4


def test_a_miss_that_costs_more_or_a_key_that_takes_less_is_worth_keeping() -> None:
    policy = CostAwarePolicy()
    policy.used("key", now=0.0)
    plain = policy.score("key", cost_s=0.01, size=8)
    assert policy.score("key", cost_s=0.02, size=8) == pytest.approx(plain + 1)
    assert policy.score("key", cost_s=0.01, size=4) == pytest.approx(plain + 1)


def test_what_was_popular_loses_to_what_is_after_enough_turnovers_or_hours_only() -> None:
    for turnovers, hours, old_stays in ((0, 0, True), (400, 0, False), (0, 240, False)):
        policy = CostAwarePolicy()
        for _ in range(50):
            policy.used("old", now=0.0)
        policy.evicted(turnovers)
        policy.used("new", now=hours * 3600)
        old, new = (policy.score(key, cost_s=1, size=1) for key in ("old", "new"))
        assert (old > new) is old_stays


def test_what_was_never_used_leaves_before_all_else_and_the_dearest_of_it_last() -> None:
    policy = CostAwarePolicy()
    policy.used("used", now=0.0)
    worths = [
        policy.score("prewarmed", cost_s=0.01, size=64),
        policy.score("prewarmed too", cost_s=0.01, size=8),
        policy.score("used", cost_s=1e-6, size=10**9),
    ]
    assert worths == sorted(worths) and len(set(worths)) == 3


@pytest.mark.parametrize("policy_type", [LruPolicy, CostAwarePolicy])
def test_no_more_keys_are_remembered_than_allowed_and_the_longest_unused_go(
    policy_type: type[LruPolicy] | type[CostAwarePolicy],
) -> None:
    policy = policy_type(max_keys=3)
    for time_s, key in enumerate(["kept", "dropped", "kept", "x", "y"]):
        policy.used(key, now=float(time_s))
    unknown = policy.score("unknown", cost_s=1, size=1)
    assert policy.score("dropped", cost_s=1, size=1) == unknown
    assert policy.score("kept", cost_s=1, size=1) > unknown


@pytest.mark.parametrize("name", ["lru", "cost"])
def test_a_removed_adapter_leaves_nothing_behind(name: PolicyName) -> None:
    policy = make_policy(name)
    policy.used("gone", now=1.0)
    policy.forget("gone")
    policy.forget("never seen")
    unknown = policy.score("unknown", cost_s=1, size=1)
    assert policy.score("gone", cost_s=1, size=1) == unknown


def test_years_of_uptime_and_turnovers_neither_overflow_nor_blur_the_order() -> None:
    policy = CostAwarePolicy()
    policy.used("first", now=0.0)
    policy.evicted(1e6)
    policy.used("first", now=1e9)
    policy.used("second", now=1e9)
    policy.used("second", now=1e9)
    assert policy.score("second", cost_s=1, size=1) > policy.score("first", cost_s=1, size=1)


def test_a_lower_tier_is_less_moved_by_the_last_use() -> None:
    def newer_wins(policy: EvictionPolicy) -> bool:
        policy.used("twice", now=0.0)
        policy.used("twice", now=0.0)
        policy.evicted(10.0)
        policy.used("once", now=0.0)
        twice, once = (policy.score(key, cost_s=1, size=1) for key in ("twice", "once"))
        return once > twice

    assert newer_wins(make_policy("cost"))
    assert not newer_wins(make_policy("cost", is_lower_tier=True))


def test_an_unknown_policy_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'mru'.*lru, cost") as refusal:
        make_policy(cast(PolicyName, "mru"))
    assert refusal.value.param == "eviction"


@given(load_s=st.floats(0, 10), step_s=st.floats(0, 1), miss_rate=st.floats(0, 1))
def test_a_copy_that_a_faster_tier_has_too_is_cheaper_to_lose(
    load_s: float, step_s: float, miss_rate: float
) -> None:
    """By how often that tier misses; but not at full price, however often that is."""

    def cost_s(*, is_held_above: bool) -> float:
        return miss_cost_s(
            load_s, step_s=step_s, is_held_above=is_held_above, miss_rate_above=miss_rate
        )

    whole_s = load_s + step_s
    assert cost_s(is_held_above=False) == whole_s
    limited = min(miss_rate, HELD_ABOVE_FACTOR)
    assert cost_s(is_held_above=True) == pytest.approx(limited * whole_s)
    unmeasured_s = miss_cost_s(load_s, step_s=step_s, is_held_above=True)
    assert unmeasured_s == pytest.approx(HELD_ABOVE_FACTOR * whole_s)


def test_a_miss_that_costs_nothing_is_the_first_to_leave_and_no_error() -> None:
    policy = CostAwarePolicy()
    policy.used("free", now=0.0)
    policy.used("dear", now=0.0)
    free = policy.score("free", cost_s=0.0, size=1)
    assert free < policy.score("dear", cost_s=1e-6, size=1)


def drive(policy: CostAwarePolicy, *, swap_every: int | None) -> None:
    """4,000 uses of 40 keys, by Zipf's law; the order of popularity moves, or does not."""
    source = random.Random(7)
    keys = list(range(40))
    weights = [1 / (1 + index) for index in range(40)]
    for time_s in range(4000):
        if swap_every is not None and time_s % swap_every == 0:
            source.shuffle(keys)
        policy.used(source.choices(keys, weights)[0], now=float(time_s))
        policy.evicted(0.1)


def test_the_memory_is_short_while_popularity_moves_and_long_while_it_stays() -> None:
    moving, steady, fixed = (
        CostAwarePolicy(half_life_turnovers=30.0, drift_half_life_turnovers=drift)
        for drift in (3.0, 3.0, None)
    )
    drive(moving, swap_every=100)
    drive(steady, swap_every=None)
    drive(fixed, swap_every=100)
    assert moving.half_life_turnovers < 5
    assert steady.half_life_turnovers > 20
    assert fixed.half_life_turnovers == 30.0


def test_a_memory_that_was_short_grows_long_again() -> None:
    policy = CostAwarePolicy(half_life_turnovers=30.0, drift_half_life_turnovers=3.0)
    drive(policy, swap_every=100)
    drive(policy, swap_every=None)
    assert policy.half_life_turnovers > 20


def test_one_key_alone_or_a_forgotten_one_tells_nothing_of_drift() -> None:
    policy = CostAwarePolicy(half_life_turnovers=30.0, drift_half_life_turnovers=3.0)
    between = policy.half_life_turnovers
    for time_s in range(300):
        policy.used("only", now=float(time_s))
        policy.evicted(1.0)
    policy.forget("only")
    assert policy.half_life_turnovers == pytest.approx(between, rel=0.01)
