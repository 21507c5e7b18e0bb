"""The longest queue is served first where no running adapter has a waiting request (R7)."""

from __future__ import annotations

import pytest

from loramux.scheduler.fairness import MAX_ADAPTER_LEAD
from loramux.scheduler.running_queues import RunningQueues
from tests.unit.scheduler.scheduler_factory import World, occupied, sequence_of


def fuller(num_first: int = 1, num_full: int = 2, tenant: str = "a") -> World:
    """Return a world in which y is first and z's queue is longer; neither runs."""
    world = occupied()
    for number in range(num_first):
        world.add(f"y{number}", 3, cid="y", tenant="a", max_tokens=2)
    for number in range(num_full):
        world.add(f"z{number}", 3, cid="z", tenant=tenant, max_tokens=2)
    world.step()
    return world


@pytest.mark.parametrize(("num_first", "num_full", "first"), [(1, 2, "z0"), (2, 2, "y0")])
def test_r7_without_a_running_adapter_the_longest_queue_is_first(
    num_first: int, num_full: int, first: str
) -> None:
    world = fuller(num_first, num_full)
    world.begin()
    assert set(world.running()) == {"x1", first}


def test_r7_the_rest_of_the_longest_queue_follows_its_head() -> None:
    world = occupied(max_sequences=5)
    world.add("y", 3, cid="y")
    world.add("z", 3, cid="z", n=3)
    world.begin()
    assert sorted(world.running()) == ["base", "x1", "z", "z", "z"]


@pytest.mark.parametrize(("lead", "first"), [(-1.0, "z0"), (0.0, "y0")])
def test_r7_the_longest_queue_is_first_only_within_the_maximum_lead(
    lead: float, first: str
) -> None:
    world = fuller()
    y, z = sequence_of(world, "y0").clients.adapter, sequence_of(world, "z0").clients.adapter
    z.counter = y.counter + MAX_ADAPTER_LEAD + lead
    world.begin()
    assert set(world.running()) == {"x1", first}


def test_r7_the_longest_queue_of_another_tenant_is_not_first() -> None:
    world = fuller(tenant="b")
    tenants = [sequence_of(world, name).clients.tenant for name in ("y0", "z0")]
    tenants[0].counter, tenants[1].counter = 0.0, 1.0
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_r7_a_longer_queue_that_is_loading_does_not_block() -> None:
    world = occupied()
    world.add("y0", 3, cid="y")
    world.adapters.load_s = 9.0
    world.add("z0", 3, cid="z", n=2)
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_r7_the_longest_queue_stays_within_max_loras() -> None:
    """The other adapter is above max_loras; y is not and may start."""
    world = occupied(max_loras=2)
    world.add("y0", 3, cid="y")
    world.add("z0", 3, selection=(("z", 1.0), ("w", 1.0)), n=2)
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y0"}


def test_r7_a_queue_that_shrank_during_the_pass_has_its_new_length() -> None:
    world = fuller(1, 3)
    world.add("w", 3, cid="w", tenant="a", n=2)
    waiting = world.scheduler._waiting
    queues = {queue.head.cids[0]: queue for queue in waiting.queues()}
    running = RunningQueues(waiting.queues(), world.scheduler._batch)
    for name in ("z0", "z1"):
        waiting.remove(sequence_of(world, name))
    assert running.pop_longer(queues["y"]) is queues["w"]
    assert running.pop_longer(queues["y"]) is None


def test_r7_a_queue_is_found_after_its_missing_adapter_has_changed() -> None:
    """Its missing adapter is z; after x has left the batch, x is its first missing one."""
    world = occupied(max_sequences=3)
    world.add("y0", 3, cid="y")
    world.add("z0", 3, selection=(("x", 1.0), ("z", 1.0)), n=2)
    batch, waiting = world.scheduler._batch, world.scheduler._waiting
    queues = {queue.head.cids: queue for queue in waiting.queues()}
    running = RunningQueues(waiting.queues(), batch)
    batch.remove(sequence_of(world, "x1"))
    assert running.pop_longer(queues["y",]) is queues["x", "z"]
    running.add(queues["x", "z"])
    assert batch.admit(sequence_of(world, "x1"), num_reserved=0)
    running.adapters_started(["x"])
    assert running.pop_longer(queues["y",]) is queues["x", "z"]


def test_r7_a_running_queue_is_not_a_longer_one() -> None:
    world = fuller(1, 3)
    batch, waiting = world.scheduler._batch, world.scheduler._waiting
    queues = {queue.head.cids: queue for queue in waiting.queues()}
    running = RunningQueues(waiting.queues(), batch)
    first = queues["z",].head
    assert batch.admit(first, num_reserved=0)
    running.adapters_started(["z"])
    batch.remove(first)
    assert running.pop_longer(queues["y",]) is None
    assert running.pop_running(queues["y",].clients) is None
    assert running.pop_longer(queues["y",]) is queues["z",]
