"""Adapter affinity (R6) and its limits (R8)."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from loramux.scheduler.admission import Admission
from loramux.scheduler.fairness import MAX_ADAPTER_LEAD, MAX_TENANT_LEAD
from loramux.scheduler.queue import AdapterQueue
from loramux.scheduler.running_queues import RunningQueues
from loramux.scheduler.sequence import Sequence
from loramux.types.request import TokenEvent
from tests.unit.scheduler.scheduler_factory import World, occupied, sequence_of, wide


def first_seen(events: list[TokenEvent]) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in events))


def start_of(world: World, name: str, limit: int = 200) -> float:
    """Return the time at which the request started."""
    for _ in range(limit):
        world.begin()
        if world.plan is not None and name in world.running():
            return world.now
        world.end()
    raise AssertionError(f"{name} never ran")


@pytest.mark.parametrize("num_between", [1, 500])
def test_r6_a_queue_with_a_running_adapter_is_found_among_many(
    num_between: int,
) -> None:
    world = occupied()
    for number in range(num_between):
        world.add(f"y{number}", 3, cid=f"y{number}", max_tokens=1)
    world.add("x2", 3, cid="x")
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "x2"}


def test_r6_a_queue_whose_adapter_started_in_the_same_pass_is_found() -> None:
    """One adapter of p2 runs already, and the other one starts with p1 in the same pass."""
    world = wide(3)
    world.add("q", 2, cid="q", max_tokens=50)
    world.step()
    world.add("p1", 1, cid="p")
    world.add("y", 1, cid="y")
    world.add("p2", 1, selection=(("q", 1.0), ("p", 0.5)))
    world.begin()
    assert set(world.running()) == {"q", "p1", "p2"}


@pytest.mark.parametrize(("lead", "is_first"), [(-1.0, True), (0.0, False)])
def test_r6_an_adapter_is_first_only_within_the_maximum_lead(lead: float, is_first: bool) -> None:
    world = occupied()
    world.add("y1", 3, cid="y")
    world.add("x2", 3, cid="x")
    world.step()
    x, y = sequence_of(world, "x2").clients.adapter, sequence_of(world, "y1").clients.adapter
    x.counter = y.counter + MAX_ADAPTER_LEAD + lead
    world.begin()
    assert ("x2" in world.running()) is is_first


@pytest.mark.parametrize(("lead", "is_first"), [(-1.0, True), (0.0, False)])
def test_r6_the_maximum_lead_between_tenants_is_a_short_request(
    lead: float, is_first: bool
) -> None:
    world = occupied()
    world.add("y1", 3, cid="y", tenant="a")
    world.add("x2", 3, cid="x", tenant="b")
    world.step()
    a, b = sequence_of(world, "y1").clients.tenant, sequence_of(world, "x2").clients.tenant
    a.counter, b.counter = 0.0, MAX_TENANT_LEAD + lead
    world.begin()
    assert ("x2" in world.running()) is is_first


def test_r6_another_tenants_queue_must_be_within_its_own_adapter_lead() -> None:
    world = occupied()
    world.add("y1", 3, cid="y", tenant="a")
    world.add("z1", 3, cid="z", tenant="b")
    world.add("x2", 3, cid="x", tenant="b")
    world.step()
    z, x = sequence_of(world, "z1").clients.adapter, sequence_of(world, "x2").clients.adapter
    x.counter = z.counter + MAX_ADAPTER_LEAD
    world.begin()
    assert "x2" not in world.running()


def feed(world: World, cid: str, number: int) -> None:
    """Keep a request for the adapter waiting, without a lead."""
    world.add(f"{cid}-{number}", 3, cid=cid, max_tokens=2)
    for sequence in world.scheduler._sequences.values():
        if sequence.cids == (cid,):
            sequence.clients.adapter.counter = 1.0


def test_r8_a_bypassed_sequence_is_first_after_max_wait() -> None:
    """x has no lead and never runs out of requests; y is first and not entitled."""
    world = occupied(max_wait_s=1.0)
    world.add("y1", 3, cid="y", max_tokens=2)
    world.add("y2", 3, cid="y", max_tokens=2)
    y1 = sequence_of(world, "y1")
    number, bypassed_since_s = 0, None
    while y1.started_s is None:
        feed(world, "x", number)
        # Never late: what ends the wait must be the time for which it was passed over.
        y1.clients.adapter.counter, y1.queued_s = 0.0, world.now
        world.step()
        number += 1
        assert number < 100
        bypassed_since_s = y1.bypassed_since_s if bypassed_since_s is None else bypassed_since_s
    assert bypassed_since_s is not None and number > 5
    place_s = 3 * world.step_s
    assert 1.0 <= y1.started_s - bypassed_since_s <= 1.0 + place_s
    assert world.scheduler.num_preemptions == 0


def test_r8_a_preempted_sequence_may_be_bypassed_again() -> None:
    world = occupied()
    sequence = sequence_of(world, "x1")
    sequence.bypassed_since_s = 0.0
    world.scheduler._admission.preempt(sequence, world.now)
    assert sequence.bypassed_since_s is None


def test_r8_an_entitled_sequence_is_not_bypassed() -> None:
    """x runs twice with a higher counter than y; without R8 x3 would get the free slot."""
    world = occupied(max_wait_s=0.35, max_sequences=3)
    world.add("x2", 3, cid="x", max_tokens=10_000)
    world.add("y1", 3, cid="y", max_tokens=2)
    world.add("x3", 3, cid="x", max_tokens=2)
    sequence_of(world, "y1").clients.adapter.counter = 0.0
    came, started = world.now, start_of(world, "y1")
    assert started - came <= 0.35 + 3 * world.step_s


def test_r8_an_unserved_entitled_sequence_ends_the_affinity_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = occupied()
    world.add("y1", 3, cid="y")
    world.add("x2", 3, cid="x")
    world.step()
    unserved = {sequence_of(world, "y1").sequence_id}
    monkeypatch.setattr(
        Admission, "_preempt_for_entitled", lambda self, now: setattr(self, "_unserved", unserved)
    )
    world.begin()
    assert "x2" not in world.running()


def test_r8_an_overdue_sequence_that_is_not_entitled_may_be_bypassed() -> None:
    """y is overdue, but not entitled to a slot of x, which runs for another tenant."""
    world = occupied(max_wait_s=0.05)
    world.add("y1", 3, cid="y", tenant="a")
    world.add("x2", 3, cid="x", tenant="a")
    world.step()
    tenants = {s.clients.tenant for s in world.scheduler._sequences.values()}
    for tenant in tenants:
        tenant.counter = 5.0
    world.begin()
    assert world.now - sequence_of(world, "y1").queued_s >= 0.05
    assert "x2" in world.running()


def test_r8_a_sequence_that_would_be_preempted_at_once_is_not_admitted() -> None:
    """y is overdue and not entitled to a slot of x yet, whose only slot is new."""
    world = occupied(max_wait_s=1.0)
    world.add("y1", 3, cid="y")
    world.add("x2", 3, cid="x")
    world.step()
    sequence_of(world, "y1").queued_s = -1.0
    x1 = sequence_of(world, "x1")
    x1.start_counters, x1.started_s = (0.0, 0.0), world.now
    assert x1.clients.adapter.counter > sequence_of(world, "y1").clients.adapter.counter
    world.begin()
    assert set(world.running()) == {"x1", "y1"}


def test_r8_the_adapter_of_the_first_sequence_is_not_evicted() -> None:
    world = occupied(num_pages=14)
    world.add("y1", 3, cid="y")
    world.add("x2", 40, cid="x")
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y1"}


def test_r6_fcfs_has_no_affinity() -> None:
    world = occupied(schedule="fcfs")
    world.add("y1", 3, cid="y")
    world.add("x2", 3, cid="x")
    world.step()
    world.begin()
    assert set(world.running()) == {"x1", "y1"}


def test_r6_a_pass_examines_a_queue_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search through all queues for each of many free slots."""
    num_queues, num_places = 300, 60
    world = wide(num_places)
    world.adapters.load_s = 0.0
    world.add("x", 1, cid="x0", max_tokens=3)
    world.step()
    for number in range(num_queues):
        world.add(f"a{number}", 1, cid=f"x{number}", max_tokens=1, tenant="a")
        world.add(f"b{number}", 1, cid=f"x{number}", max_tokens=1, tenant=f"b{number % 50}")
    heads = 0
    head = AdapterQueue.head.fget  # type: ignore[attr-defined]

    def count(queue: AdapterQueue) -> Sequence:
        nonlocal heads
        heads += 1
        return head(queue)  # type: ignore[no-any-return]

    monkeypatch.setattr(AdapterQueue, "head", property(count))
    world.begin()
    assert len(world.running()) >= 50
    assert heads < 2 * num_queues * 20


def test_r6_queues_of_an_adapter_that_left_the_batch_are_no_longer_preferred() -> None:
    world = occupied()
    world.add("x2", 3, cid="x")
    batch, queues = world.scheduler._batch, world.scheduler._waiting.queues()
    running = RunningQueues(queues, batch)
    x1, x2 = sequence_of(world, "x1"), sequence_of(world, "x2")
    batch.remove(x1)
    assert running.pop_running(x2.clients) is None
    assert batch.admit(x1, num_reserved=0)
    running.adapters_started(["x"])
    queue = running.pop_running(x2.clients)
    assert queue is not None and queue.head is x2


def distinct_adapters(num_waiting: int = 24, num_places: int = 24) -> float:
    """Return the mean number of adapters in a full batch with uniform popularity."""
    source = random.Random(1)
    world = wide(num_places)
    count, counts = 0, []
    for step in range(300):
        while world.scheduler.num_waiting < num_waiting:
            cid, count = f"a{source.randrange(96)}", count + 1
            world.add(str(count), 3, cid=cid, max_tokens=source.randrange(10, 40))
        world.step()
        if step > 60:
            counts.append(len(world.scheduler.running_adapters()))
    return mean(counts)


def test_r6_affinity_lowers_the_number_of_adapters_in_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preferred = distinct_adapters()
    monkeypatch.setattr(Admission, "_admit_by_affinity", lambda *arguments: None)
    assert preferred < 0.8 * distinct_adapters()


def test_r7_longer_queues_lower_the_number_of_adapters_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preferred = distinct_adapters()
    monkeypatch.setattr(RunningQueues, "pop_longer", lambda *arguments: None)
    assert preferred < 0.97 * distinct_adapters()


def test_r6_in_an_empty_batch_the_first_sequence_is_admitted() -> None:
    """A base sequence adds no adapter either, but there is no running adapter to prefer."""
    world = wide(1)
    world.add("y", 3, cid="y")
    world.add("base", 3)
    assert first_seen(world.run()) == ["y", "base"]
