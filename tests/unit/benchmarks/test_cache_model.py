"""Eviction policies and tiers of the simulation."""

from __future__ import annotations

import pytest

from benchmarks.lib.workloads import Arrival, first, slora
from benchmarks.studies.cache_model import (
    LINKS,
    POLICIES,
    STEP_S,
    CachePolicy,
    Chameleon,
    Gdsf,
    Lfu,
    Link,
    Lru,
    Outcome,
    Own,
    PolicyFactory,
    S3Fifo,
    Simulation,
    adapter_bytes,
    service_s,
)
from loramux.memory.policies import HELD_ABOVE_FACTOR, MISS_RATE_WEIGHT, CostAwarePolicy


def fill(policy: CachePolicy, sizes: dict[int, int]) -> None:
    for now, (key, size) in enumerate(sizes.items()):
        policy.used(key, now)
        policy.inserted(key, cost_s=1.0, size=size, now=now)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("is_lower", [False, True])
def test_busy_keys_are_never_evicted_and_all_others_can_be(
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


def test_lru_evicts_the_least_recently_and_lfu_the_least_frequently_used() -> None:
    for policy, expected in ((Lru(), 1), (Lfu(), 2)):
        fill(policy, {1: 10, 2: 10})
        policy.used(1, 5.0)
        policy.used(1, 6.0)
        policy.used(2, 7.0)
        assert policy.victim({}, 8.0) == expected


def test_lfu_counts_survive_eviction() -> None:
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


def test_s3_fifo_evicts_keys_used_once_and_promotes_returning_ghosts() -> None:
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


def test_our_policy_sees_evictions_and_new_costs() -> None:
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


SIZE = adapter_bytes(16)


def request(time_s: float, adapter: int, output_tokens: int = 10) -> Arrival:
    return Arrival(time_s, adapter, 16, 10, output_tokens)


def simulate(
    arrivals: list[Arrival],
    *,
    slots: tuple[int, int, int],
    make: PolicyFactory = lambda capacity, is_lower: Lru(),
    num_adapters: int = 8,
    step_s: float = 0.0,
) -> Outcome:
    """Adapters 0 to 7 of equal size; at first every tier holds the first of them."""
    device, host, disk = (count * SIZE for count in slots)
    simulation = Simulation(
        dict.fromkeys(range(num_adapters), SIZE),
        capacities=(device, host, disk),
        make=make,
        step_s=step_s,
    )
    return simulation.run(arrivals)


def load_s(link: str) -> float:
    start_s, bytes_per_s = LINKS[link]
    return start_s + SIZE / bytes_per_s


def test_a_rank_16_adapter_has_its_real_size() -> None:
    assert adapter_bytes(16) == pytest.approx(27.3e6, rel=0.002)


def test_a_miss_waits_for_the_link_of_the_tier_with_the_adapter() -> None:
    arrivals = [request(0.0, 0), request(10.0, 1), request(20.0, 3), request(30.0, 7)]
    outcome = simulate(arrivals, slots=(1, 2, 4))
    assert outcome.waits_s == pytest.approx([0.0, *map(load_s, LINKS)])
    assert outcome.found == {"device": 1, "host": 1, "disk": 1, "remote": 1}
    assert outcome.moved_bytes == dict.fromkeys(LINKS, SIZE)


def test_a_loaded_adapter_is_in_every_tier_on_its_way() -> None:
    arrivals = [request(0.0, 7), request(10.0, 1), request(20.0, 7)]
    outcome = simulate(arrivals, slots=(1, 3, 5))
    assert outcome.found == {"device": 0, "host": 2, "disk": 0, "remote": 1}


def test_loads_queue_on_their_link_and_requests_join_a_load_in_flight() -> None:
    link = Link(1.0, 10.0)
    assert link.read(10, now=0.0) == 2.0 and link.read(10, now=1.0) == 4.0
    assert link.queue_s > 0
    arrivals = [request(0.0, 5), request(0.0, 6), request(0.0, 5)]
    outcome = simulate(arrivals, slots=(2, 8, 8))
    one = load_s("host")
    assert sorted(outcome.waits_s) == pytest.approx([one, one, 2 * one])
    assert outcome.moved_bytes["host"] == 2 * SIZE


def test_a_leased_adapter_is_not_evicted_until_its_request_ends() -> None:
    long, short = request(0.0, 0, output_tokens=1000), request(1.0, 1)
    outcome = simulate([long, short], slots=(1, 8, 8))
    assert outcome.waits_s[1] == pytest.approx(service_s(long) - 1.0 + load_s("host"))


def test_requests_and_loads_are_seen_once_per_step() -> None:
    arrivals = [request(0.5 * STEP_S, 0), request(99 * STEP_S, 1)]
    outcome = simulate(arrivals, slots=(1, 8, 8), step_s=STEP_S)
    assert outcome.waits_s == pytest.approx([0.0, STEP_S])


class Watched(Lru):
    """Remembers what the simulation says that a miss of a key would cost."""

    def __init__(self) -> None:
        super().__init__()
        self.prices: dict[int, list[float]] = {}

    def inserted(self, key: int, *, cost_s: float, size: int, now: float) -> None:
        super().inserted(key, cost_s=cost_s, size=size, now=now)
        self.prices[key] = [cost_s]

    def priced(self, key: int, cost_s: float) -> None:
        super().priced(key, cost_s)
        self.prices[key].append(cost_s)


def watch(arrivals: list[Arrival], *, slots: tuple[int, int, int]) -> list[Watched]:
    """Return the policies of device, host and disk after these requests."""
    policies: list[Watched] = []

    def make(capacity: int, is_lower: bool) -> CachePolicy:
        policies.append(Watched())
        return policies[-1]

    simulate(arrivals, slots=slots, make=make)
    return policies


def test_a_copy_costs_less_to_lose_while_the_tier_above_has_it() -> None:
    device, host, disk = watch([], slots=(1, 2, 8))
    from_disk, from_remote = load_s("disk"), load_s("remote")
    assert device.prices == {0: [pytest.approx(load_s("host"))]}
    assert host.prices == {
        0: [pytest.approx(HELD_ABOVE_FACTOR * from_disk)],
        1: [pytest.approx(from_disk)],
    }
    assert disk.prices == {
        key: [pytest.approx((HELD_ABOVE_FACTOR if key < 2 else 1.0) * from_remote)]
        for key in range(8)
    }


def test_a_copy_gets_a_new_cost_when_the_tier_above_gains_or_loses_it() -> None:
    """A hit of 0, then a miss of 1, which takes its place."""
    _, host, disk = watch([request(0.0, 0), request(9.0, 1)], slots=(1, 8, 8))
    miss_rate = HELD_ABOVE_FACTOR * (1 - MISS_RATE_WEIGHT) ** 2 + MISS_RATE_WEIGHT
    assert miss_rate < HELD_ABOVE_FACTOR
    assert host.prices[0][1:] == [pytest.approx(load_s("disk"))]
    assert host.prices[1][1:] == [pytest.approx(miss_rate * load_s("disk"))]
    assert all(len(prices) == 1 for prices in disk.prices.values())


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_every_request_starts_once_whatever_the_policy(make: PolicyFactory) -> None:
    trace = slora(num_adapters=8, alpha=0.5, requests_per_s=3, cv=4, tokens=(8, 64), seed=3)
    arrivals = first(trace, 300)
    outcome = simulate(arrivals, slots=(2, 4, 6), make=make, step_s=STEP_S)
    assert len(outcome.waits_s) == sum(outcome.found.values()) == 300
    assert min(outcome.waits_s) >= 0
