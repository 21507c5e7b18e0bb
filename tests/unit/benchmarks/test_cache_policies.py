from __future__ import annotations

import pytest

from benchmarks.studies.cache_model import (
    POLICIES,
    CachePolicy,
    Chameleon,
    Gdsf,
    Lfu,
    Lru,
    Own,
    PolicyFactory,
    S3Fifo,
)
from loramux.memory.policies import CostAwarePolicy


def fill(policy: CachePolicy, sizes: dict[int, int]) -> None:
    for now, (key, size) in enumerate(sizes.items()):
        policy.used(key, now)
        policy.inserted(key, cost_s=1.0, size=size, now=now)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("is_lower", [False, True])
def test_a_busy_key_never_leaves_and_everything_else_can(
    make: PolicyFactory, is_lower: bool
) -> None:
    policy = make(50, is_lower)
    fill(policy, dict.fromkeys(range(5), 10))
    policy.used(3, 9.0)
    left = []
    while (victim := policy.victim({1}, 10.0)) is not None:
        policy.evicted(victim)
        left.append(victim)
    assert sorted(left) == [0, 2, 3, 4]
    assert policy.victim({}, 11.0) == 1


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_an_empty_tier_has_no_victim(make: PolicyFactory) -> None:
    assert make(50, False).victim({}, 0.0) is None


def test_lru_takes_the_longest_unused_and_lfu_the_least_used() -> None:
    for policy, expected in ((Lru(), 1), (Lfu(), 2)):
        fill(policy, {1: 10, 2: 10})
        policy.used(1, 5.0)
        policy.used(1, 6.0)
        policy.used(2, 7.0)
        assert policy.victim({}, 8.0) == expected


def test_lfu_remembers_counts_of_what_has_left() -> None:
    policy = Lfu()
    fill(policy, {1: 10, 2: 10})
    policy.used(1, 2.0)
    policy.evicted(1)
    policy.used(2, 3.0)
    policy.used(1, 4.0)
    policy.inserted(1, cost_s=1, size=10, now=4.0)
    assert policy.victim({}, 5.0) == 2


def test_gdsf_counts_hits_per_byte_or_seconds_per_byte_and_ages_by_its_floor() -> None:
    for in_seconds, expected in ((False, 1), (True, 2)):
        policy = Gdsf(in_seconds=in_seconds)
        policy.inserted(1, cost_s=10.0, size=20, now=0)
        policy.inserted(2, cost_s=1.0, size=10, now=0)
        assert policy.victim({}, 1.0) == expected
    policy = Gdsf(in_seconds=False)
    fill(policy, {1: 10, 2: 10, 3: 2})
    policy.used(1, 4.0)
    policy.evicted(3)
    policy.inserted(4, cost_s=1, size=10, now=5.0)
    assert policy.victim({}, 6.0) == 2, "the floor lifts a newcomer over what came before it"
    policy.evicted(2)
    assert policy.victim({}, 6.0) == 1


def test_chameleon_keeps_a_large_adapter_over_a_more_frequent_small_one() -> None:
    policy = Chameleon()
    fill(policy, {1: 10, 2: 80, 3: 10})
    policy.used(3, 4.0)
    policy.used(3, 5.0)
    # 2: 0.45 * 1/3 + 0.10 * 1/6 + 0.45 = 0.62; 3: 0.45 + 0.10 * 5/6 + 0.45 * 1/8 = 0.59.
    assert [policy.victim(busy, 6.0) for busy in ({}, {1}, {1, 3})] == [1, 3, 2]


def test_s3_fifo_lets_one_time_visitors_go_and_returning_ghosts_into_the_main_queue() -> None:
    policy = S3Fifo(capacity=100)
    fill(policy, dict.fromkeys(range(10), 10))
    policy.used(0, 20.0)
    assert policy.victim({}, 21.0) == 1, "key 0 was used again and moves on to the main queue"
    policy.evicted(1)
    policy.inserted(1, cost_s=1, size=10, now=22.0)
    left = []
    for _ in range(10):
        victim = policy.victim({}, 23.0)
        assert victim is not None
        policy.evicted(victim)
        left.append(victim)
    assert left == [2, 3, 4, 5, 6, 7, 8, 0, 1, 9], "a tenth of the room is for newcomers"


def test_own_policy_is_told_of_turnovers_and_of_new_prices() -> None:
    policy = Own(CostAwarePolicy(half_life_turnovers=1.0), capacity=20)
    fill(policy, {1: 10, 2: 10})
    policy.used(1, 2.0)
    assert policy.victim({}, 3.0) == 2
    policy.priced(1, 0.1)
    assert policy.victim({}, 3.0) == 1
    policy.priced(1, 1.0)
    for key in range(3, 9):
        policy.used(key, 3.0)
        policy.inserted(key, cost_s=1.0, size=10, now=3.0)
        policy.evicted(key)
    policy.used(2, 4.0)
    assert policy.victim({}, 5.0) == 1, "three turnovers outweigh a use more"
