"""Where no running adapter has a request waiting, the lane where most wait goes first."""

from __future__ import annotations

import pytest

from loramux.scheduler.fairness import MAX_ADAPTER_LEAD
from loramux.scheduler.running_queues import RunningLanes
from tests.unit.scheduler.scheduler_factory import World, occupied, sequence_of


def fuller(num_first: int = 1, num_full: int = 2, tenant: str = "a") -> World:
    """y comes first, and z's lane is fuller; neither runs."""
    world = occupied()
    for number in range(num_first):
        world.add(f"y{number}", 3, cid="y", tenant="a", max_tokens=2)
    for number in range(num_full):
        world.add(f"z{number}", 3, cid="z", tenant=tenant, max_tokens=2)
    world.step()
    return world


@pytest.mark.parametrize(("num_first", "num_full", "first"), [(1, 2, "z0"), (2, 2, "y0")])
def test_without_a_running_adapter_the_fullest_lane_goes_first(
    num_first: int, num_full: int, first: str
) -> None:
    world = fuller(num_first, num_full)
    world.begin()
    assert set(world.running()) == {"x1", first}


def test_the_rest_of_a_full_lane_follows_its_head() -> None:
    world = occupied(max_sequences=5)
    world.add("y", 3, cid="y")
    world.add("z", 3, cid="z", n=3)
    world.begin()
    assert sorted(world.running()) == ["base", "x1", "z", "z", "z"]


@pytest.mark.parametrize(("lead", "first"), [(-1.0, "z0"), (0.0, "y0")])
def test_a_full_lane_goes_first_only_within_its_lead(lead: float, first: str) -> None:
    world = fuller()
    y, z = sequence_of(world, "y0").standing.adapter, sequence_of(world, "z0").standing.adapter
    z.counter = y.counter + MAX_ADAPTER_LEAD + lead
    world.begin()
    assert set(world.running()) == {"x1", first}


def test_a_full_lane_of_another_tenant_does_not_go_first() -> None:
    world = fuller(tenant="b")
    tenants = [sequence_of(world, name).standing.tenant for name in ("y0", "z0")]
    tenants[0].counter, tenants[1].counter = 0.0, 1.0
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_a_full_lane_whose_adapter_is_on_its_way_keeps_nobody_waiting() -> None:
    world = occupied()
    world.add("y0", 3, cid="y")
    world.adapters.load_s = 9.0
    world.add("z0", 3, cid="z", n=2)
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_a_full_lane_stays_within_the_cap_of_adapters() -> None:
    """One of two adapters has no place; y, which has one, is the best that may start."""
    world = occupied(max_loras=2)
    world.add("y0", 3, cid="y")
    world.add("z0", 3, selection=(("z", 1.0), ("w", 1.0)), n=2)
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_lanes_of_a_pass_that_shrank_are_as_full_as_they_are() -> None:
    world = fuller(1, 3)
    world.add("w", 3, cid="w", tenant="a", n=2)
    waiting = world.scheduler._waiting
    lanes = {lane.head.cids[0]: lane for lane in waiting.lanes()}
    running = RunningLanes(waiting.lanes(), world.scheduler._batch)
    for name in ("z0", "z1"):
        waiting.remove(sequence_of(world, name))
    assert running.pop_fuller(lanes["y"]) is lanes["w"]
    assert running.pop_fuller(lanes["y"]) is None


def test_a_full_lane_is_found_when_what_it_lacks_has_changed() -> None:
    """It lacks z; then x leaves the batch as well, and x is the first that it lacks."""
    world = occupied(max_sequences=3)
    world.add("y0", 3, cid="y")
    world.add("z0", 3, selection=(("x", 1.0), ("z", 1.0)), n=2)
    batch, waiting = world.scheduler._batch, world.scheduler._waiting
    lanes = {lane.head.cids: lane for lane in waiting.lanes()}
    running = RunningLanes(waiting.lanes(), batch)
    batch.remove(sequence_of(world, "x1"))
    assert running.pop_fuller(lanes["y",]) is lanes["x", "z"]
    running.add(lanes["x", "z"])
    assert batch.admit(sequence_of(world, "x1"), num_held=0)
    running.enter(["x"])
    assert running.pop_fuller(lanes["y",]) is lanes["x", "z"]


def test_a_lane_that_runs_is_no_full_one_even_if_its_adapter_leaves() -> None:
    world = fuller(1, 3)
    batch, waiting = world.scheduler._batch, world.scheduler._waiting
    lanes = {lane.head.cids: lane for lane in waiting.lanes()}
    running = RunningLanes(waiting.lanes(), batch)
    first = lanes["z",].head
    assert batch.admit(first, num_held=0)
    running.enter(["z"])
    batch.remove(first)
    assert running.pop_fuller(lanes["y",]) is None
    assert running.pop(lanes["y",].standing) is None
    assert running.pop_fuller(lanes["y",]) is lanes["z",]
