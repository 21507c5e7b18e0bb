"""The simulated fleet: every request ends, and the router's choice does what it is for."""

from __future__ import annotations

import pytest

from benchmarks.lib.fleet_simulation import POLICIES, Result, Setting, Simulation
from benchmarks.routing import COSTS

NUM_REQUESTS = 1500


def play(policy: str, **fields: object) -> Result:
    return Simulation(policy, Setting(requests=NUM_REQUESTS, **fields)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", ["zipf", "drift", "flash"])
def test_every_request_ends_and_every_place_is_free_again(policy: str, trace: str) -> None:
    simulation = Simulation(policy, Setting(requests=300, trace=trace))
    result = simulation.run()
    assert len(result.first_token_s) == sum(result.found.values()) == sum(result.served.values())
    assert all(one.known.own == 0 and not one.jobs for one in simulation.replicas.values())


def test_requests_of_a_lost_replica_are_answered_by_others() -> None:
    result = play("seconds", trace="loss")
    assert result.num_retried > 0 and len(result.served) == 3
    assert len(result.first_token_s) >= NUM_REQUESTS * 2 // 3 - 1


def test_choice_by_seconds_finds_more_adapters_on_the_device_than_two_choices() -> None:
    ours, others = play("seconds"), play("two choices")
    assert ours.share("device") > 1.2 * others.share("device")
    assert ours.percentile(0.99) < others.percentile(0.99)


def test_a_flash_crowd_is_spread_over_replicas() -> None:
    ours, hashed = play("seconds", trace="flash"), play("hash", trace="flash")
    assert ours.imbalance < hashed.imbalance


def test_a_fleet_of_more_than_sixteen_replicas_is_planned_too() -> None:
    result = play("seconds", replicas=24, adapters=2000)
    assert result.share("device") > play("two choices", replicas=24, adapters=2000).share("device")


def test_short_answers_do_not_drive_requests_away_from_their_adapters() -> None:
    """Catches waits that are reckoned by the length of other answers."""
    setting = Setting(requests=3000, load=0.7)
    ours, others = (
        Simulation(policy, setting, COSTS["sleeping"]).run()
        for policy in ("seconds", "two choices")
    )
    assert ours.share("device") > 1.25 * others.share("device")
    assert ours.percentile(0.99) < others.percentile(0.99)
