from __future__ import annotations

import pytest

from benchmarks.lib.workloads import Arrival, first, slora
from benchmarks.studies.cache_model import (
    LINKS,
    POLICIES,
    STEP_S,
    CachePolicy,
    Link,
    Lru,
    Outcome,
    PolicyFactory,
    Simulation,
    adapter_bytes,
    service_s,
)
from loramux.memory.policies import HELD_ABOVE_FACTOR, MISS_RATE_WEIGHT

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


def test_a_rank_16_adapter_has_the_bytes_of_the_real_one() -> None:
    assert adapter_bytes(16) == pytest.approx(27.3e6, rel=0.002)


def test_a_miss_waits_for_the_link_of_the_tier_where_it_is_found() -> None:
    arrivals = [request(0.0, 0), request(10.0, 1), request(20.0, 3), request(30.0, 7)]
    outcome = simulate(arrivals, slots=(1, 2, 4))
    assert outcome.waits_s == pytest.approx([0.0, *map(load_s, LINKS)])
    assert outcome.found == {"device": 1, "host": 1, "disk": 1, "remote": 1}
    assert outcome.moved_bytes == dict.fromkeys(LINKS, SIZE)


def test_what_was_loaded_lies_in_every_tier_that_it_passed() -> None:
    arrivals = [request(0.0, 7), request(10.0, 1), request(20.0, 7)]
    outcome = simulate(arrivals, slots=(1, 3, 5))
    assert outcome.found == {"device": 0, "host": 2, "disk": 0, "remote": 1}


def test_loads_queue_on_their_link_and_requests_join_a_load_under_way() -> None:
    link = Link(1.0, 10.0)
    assert link.read(10, now=0.0) == 2.0 and link.read(10, now=1.0) == 4.0
    assert link.queue_s > 0
    arrivals = [request(0.0, 5), request(0.0, 6), request(0.0, 5)]
    outcome = simulate(arrivals, slots=(2, 8, 8))
    one = load_s("host")
    assert sorted(outcome.waits_s) == pytest.approx([one, one, 2 * one])
    assert outcome.moved_bytes["host"] == 2 * SIZE


def test_a_leased_adapter_stays_and_others_wait_until_its_request_ends() -> None:
    long, short = request(0.0, 0, output_tokens=1000), request(1.0, 1)
    outcome = simulate([long, short], slots=(1, 8, 8))
    assert outcome.waits_s[1] == pytest.approx(service_s(long) - 1.0 + load_s("host"))


def test_requests_and_loads_are_noticed_once_a_step() -> None:
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
    """The policies of device, host and disk after these requests."""
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


def test_a_copy_is_priced_anew_by_the_misses_above_when_the_tier_above_takes_or_loses_it() -> None:
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
