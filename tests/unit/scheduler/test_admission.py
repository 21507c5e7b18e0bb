"""Admission and preemption, by the rules of docs/scheduling.md. The bound is in test_bound.py."""

from __future__ import annotations

import random

import pytest

from loramux.types.request import FinishReason, TokenEvent
from tests.unit.scheduler.scheduler_factory import World, make_request

SCHEDULES = ("fair", "fcfs")


def first_seen(events: list[TokenEvent]) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in events))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r5_a_request_whose_adapter_is_loading_is_skipped(schedule: str) -> None:
    world = World(load_s=0.55, schedule=schedule)
    world.add("cold", 3, cid="x")
    world.add("base", 3, max_tokens=20)
    world.begin()
    assert world.running() == ["base"]
    assert world.scheduler.num_loading == 1
    events = world.end()
    while "cold" not in first_seen(events):
        events = world.step()
    assert world.now == pytest.approx(0.7)
    assert first_seen(world.run())


def test_r5_there_is_no_plan_while_every_request_loads() -> None:
    world = World(load_s=0.5)
    world.add("a", 3, cid="x", n=2)
    assert world.begin() is None
    assert world.scheduler.num_loading == 2
    world.end()
    assert {e.finish_reason for e in world.run()} == {None, FinishReason.LENGTH}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r5_a_failed_load_ends_exactly_the_requests_that_named_it(schedule: str) -> None:
    world = World(load_s=0.15, schedule=schedule)
    world.add("a", 3, cid="bad", n=2)
    world.add("b", 3, selection=(("x", 1.0), ("bad", 0.5)))
    world.add("c", 3, cid="x")
    world.add("d", 3)
    events = world.run()
    errors = [e for e in events if e.error is not None]
    assert sorted(e.request_id for e in errors) == ["a", "a", "b"]
    assert {(e.error, e.error_code) for e in errors} == {("bad is broken.", "adapter")}
    assert sum(e.request_id in "cd" for e in events) == 8


def test_r5_a_failed_load_is_reported_at_once_and_may_be_tried_again() -> None:
    """Catches a request with a broken adapter that waits for a slot before it fails."""
    world = World(max_sequences=1)
    world.add("long", 3, max_tokens=50)
    for _ in range(2):
        world.add("a", 3, cid="bad")
        assert [e.request_id for e in world.step() if e.error] == ["a"]
    world.run()


def test_r4_fcfs_orders_by_arrival() -> None:
    world = World(schedule="fcfs", max_sequences=1)
    for number, name in enumerate("abcde"):
        world.add(name, 2, tenant=f"t{number % 2}", cid=f"x{number % 3}", max_tokens=2)
    assert first_seen(world.run()) == list("abcde")


def test_r2_tenants_get_tokens_in_proportion_to_their_shares() -> None:
    world = World(max_sequences=1, max_wait_s=1e9)
    for number in range(40):
        world.add(f"a{number}", 4, tenant="a", tenant_share=3.0)
        world.add(f"b{number}", 4, tenant="b")
    events: list[TokenEvent] = []
    while len(events) < 100:
        events += world.step()
    share = sum(e.request_id.startswith("a") for e in events) / len(events)
    assert share == pytest.approx(0.75, abs=0.05)


def test_r2_adapters_of_a_tenant_get_equal_tokens() -> None:
    world = World(max_sequences=1, max_wait_s=1e9)
    for number in range(30):
        world.add(f"hot{number}", 4, cid="hot")
    for number in range(10):
        world.add(f"cold{number}", 4, cid="cold")
    order = [name.rstrip("0123456789") for name in first_seen(world.run())]
    assert abs(order[:16].count("hot") - 8) <= 1


def test_r2_tokens_from_the_prefix_cache_are_not_charged() -> None:
    prompt = list(range(33))
    world = World(max_batch_tokens=64)
    world.add("a", prompt, tenant="a", max_tokens=1)
    world.add("b", list(range(50, 83)), tenant="b", max_tokens=1)
    world.run()
    for name in ("a2", "a3"):
        world.add(name, prompt, tenant="a", max_tokens=9)
    world.add("b2", list(range(150, 183)), tenant="b", max_tokens=9)
    world.step()
    counters = {
        s.request.tenant: s.clients.tenant.counter for s in world.scheduler._sequences.values()
    }
    # Two last tokens and two of output, against a whole prompt and one of output.
    assert counters["b"] - counters["a"] >= 33 - 2 - 2 - 2


@pytest.mark.parametrize(("schedule", "second"), [("fair", "c"), ("fcfs", "b")])
def test_r9_over_max_loras_fair_skips_and_fcfs_blocks(schedule: str, second: str) -> None:
    world = World(max_loras=1, schedule=schedule)
    world.add("a", 3, cid="x", max_tokens=9)
    world.add("b", 3, cid="y")
    world.add("c", 3, cid="x")
    assert first_seen(world.run())[1] == second


def test_r12_a_full_pool_does_not_starve_a_cold_adapter_under_fcfs() -> None:
    """Newer requests with a resident adapter must leave pages for the load of an older one."""
    world = World(num_pages=14, schedule="fcfs", max_wait_s=0.5)
    world.add("hot0", 3, cid="hot", max_tokens=30)
    world.step()
    events: list[TokenEvent] = []
    for number in range(60):
        world.add(f"hot{number + 1}", 12, cid="hot", max_tokens=8)
        if number == 3:
            world.add("cold", 12, cid="cold", max_tokens=8)
        events += world.step()
    assert "cold" in first_seen(events)
    world.run()


def test_r12_two_requests_of_two_adapters_each_do_not_deadlock() -> None:
    """Each retains one adapter, and the pool has pages for three."""
    world = World(num_pages=7, load_s=0.3)
    world.add("a", 3, selection=(("p", 1.0), ("q", 1.0)))
    world.add("b", 3, selection=(("r", 1.0), ("s", 1.0)))
    assert {e.request_id for e in world.run() if e.finish_reason} == {"a", "b"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r14_overlapping_sums_all_end_in_a_pool_for_two_adapters(schedule: str) -> None:
    """Catches requests that each keep an adapter which another one waits for."""
    world = World(num_pages=6, load_s=0.3, schedule=schedule)
    draw = random.Random(0)
    for number in range(40):
        pair = sorted(draw.sample("pqrst", 2))
        weights = draw.choice(((1.0, 1.0), (0.5, -1.0)))
        world.add(f"{number}", 3, selection=tuple(zip(pair, weights, strict=True)), max_tokens=2)
        world.step()
    ended = {event.request_id for event in world.run(2000) if event.finish_reason}
    assert all(event.error is None for event in world.run())
    assert "39" in ended


def test_a_step_does_not_examine_every_waiting_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(max_sequences=2, load_s=1e9, num_pages=2100)
    world.add("a", 3, max_tokens=60, n=2)
    world.step()
    for number in range(1000):
        world.scheduler.add(make_request(f"cold{number}", 3, cid=f"x{number}"), world.now)
    asked: list[object] = []
    is_ready = world.adapters.is_ready
    monkeypatch.setattr(
        world.adapters, "is_ready", lambda cids: (asked.append(cids), is_ready(cids))[1]
    )
    world.step()
    assert 0 < len(asked) <= 64


def long_hot(world: World, num_sequences: int, **fields: object) -> None:
    """Add two long requests on one adapter, so that its client may be preempted."""
    world.add("hot", 4, cid="hot", max_tokens=500, n=num_sequences, **fields)
    world.add("more", 4, cid="hot", max_tokens=500, **fields)
    world.step()


def test_r11_the_newest_of_the_most_served_is_preempted_and_not_too_early() -> None:
    world = World(max_sequences=3, max_wait_s=1.0, max_model_len=600, num_pages=600)
    long_hot(world, 3, tenant="a")
    world.add("cold", 4, cid="cold", tenant="b", max_tokens=500)
    while world.now < 1.05:
        world.step()
        assert world.scheduler.num_preemptions == 0
    world.step()
    world.begin()
    assert sorted(world.running()) == ["cold", "hot", "hot"]
    assert world.scheduler.num_preemptions == 1
    waiting = [s for s in world.scheduler._waiting if s.request.request_id == "hot"]
    assert [s.index for s in waiting] == [2]


def test_r11_a_preempted_sequence_does_not_preempt_in_turn_at_once() -> None:
    """Two floods share one slot: it changes after max_wait_s, not with every token."""
    world = World(max_sequences=1, max_wait_s=1.0, max_model_len=600, num_pages=600)
    for tenant in "ab":
        world.add(tenant, 4, tenant=tenant, max_tokens=500, n=2)
    turns: list[str] = []
    for _ in range(60):
        if world.begin() is not None:
            turns += world.running()
        world.end()
    changes = sum(now != before for before, now in zip(turns, turns[1:], strict=False))
    assert 4 <= changes <= 6
    assert abs(turns.count("a") - turns.count("b")) <= 12


def full_pool() -> World:
    world = World(num_pages=22, max_wait_s=0.5, load_s=0.3, max_sequences=8)
    long_hot(world, 4, tenant="a")
    while world.reclaimer.num_available:
        world.step()
    return world


def test_r12_pages_are_reserved_for_an_overdue_load() -> None:
    """Five sequences of a page each and their adapter fill the pool; none grows soon."""
    world = World(num_pages=7, max_wait_s=0.5, max_batch_tokens=32, block_tokens=32)
    long_hot(world, 4, tenant="a")
    world.adapters.load_s = 0.3
    world.add("cold", 4, cid="cold", tenant="b")
    came = world.now
    for number in range(20):
        world.add(f"hot{number}", 4, cid="hot", tenant="a", max_tokens=2)
    while world.begin() is not None and not world.scheduler.num_preemptions:
        world.end()
    assert world.now - came == pytest.approx(0.5, abs=world.step_s + 1e-6)
    assert (world.scheduler.num_preemptions, world.pages.num_free) == (2, 2)
    while "cold" not in world.running():
        world.end()
        world.begin()
    assert world.now - came < 0.5 + 0.3 + 3 * world.step_s


def test_r12_an_overdue_load_is_prioritized() -> None:
    """Otherwise the pages that were freed for it go to the other client's next adapters."""
    world = full_pool()
    for number in range(40):
        world.add(f"next{number}", 4, cid=f"next{number}", tenant="a", max_tokens=9)
    world.add("cold", 4, cid="cold", tenant="b")
    came = world.now
    while world.begin() is None or "cold" not in world.running():
        world.end()
    assert world.now - came < 0.5 + 0.3 + 3 * world.step_s


@pytest.mark.parametrize("max_wait_s", [0.5, 1.1])
def test_r12_an_unused_reservation_does_not_block_others(max_wait_s: float) -> None:
    """If the host tier is full, running sequences must neither wait for the load nor end early."""
    world = World(num_pages=8, max_wait_s=max_wait_s, max_sequences=1)
    long_hot(world, 1, tenant="a")
    world.adapters.is_stuck = True
    world.add("cold", 4, cid="cold", tenant="b")
    events: list[TokenEvent] = []
    for _ in range(60):
        events += world.step()
    assert sum(e.request_id == "hot" for e in events) == (8 - 2) * 4 - 4 - 1
    assert sum(e.request_id == "more" for e in events) >= 10
    world.adapters.is_stuck = False
    world.run()


def test_r12_requests_that_each_hold_half_of_the_adapters_both_end() -> None:
    """p is old, q is new, r and s are in between: no adapter is evicted for a newer request."""
    world = World(num_pages=5, load_s=0.3)
    world.add("one", 3, cid="p", max_tokens=1)
    world.add("zed", 3, selection=(("r", 1.0), ("s", 1.0)), max_tokens=1)
    world.add("ex", 3, selection=(("p", 1.0), ("q", 1.0)), max_tokens=1)
    assert {e.request_id for e in world.run() if e.finish_reason} == {"one", "zed", "ex"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r12_an_overdue_request_retains_its_resident_adapters(schedule: str) -> None:
    """While its second adapter loads, a base request must not evict the first."""
    world = World(num_pages=8, max_wait_s=0.3, schedule=schedule)
    world.add("first", 2, cid="p", max_tokens=1)
    world.run()
    world.adapters.load_s = 2.0
    world.add("pair", 2, selection=(("p", 1.0), ("q", 1.0)), max_tokens=2)
    world.now += 0.5
    world.add("base", 20, max_tokens=2)
    assert first_seen(world.run()) == ["pair", "base"]


def test_r14_a_prompt_that_can_never_get_pages_is_refused() -> None:
    """Adapters were pinned after the check at arrival; the request must not wait forever."""
    world = World(num_pages=12, check_every=10**9)
    world.pages.allocate(("adapter", "pinned"), 6)
    world.add("big", 40, max_tokens=1)
    world.add("small", 8)
    events = world.run()
    error = next(e for e in events if e.error is not None)
    assert (error.request_id, error.error_code) == ("big", "memory")
    assert error.error is not None and "needs 10 pages" in error.error and "only 6" in error.error
    assert sum(e.request_id == "small" for e in events) == 4


def test_r13_an_output_ends_where_pinned_adapters_leave_no_pages() -> None:
    world = World(num_pages=8, check_every=10**9)
    world.add("a", 8, max_tokens=30)
    world.step()
    world.pages.allocate(("adapter", "pinned"), 5)
    events = world.run()
    assert events[-1].finish_reason is FinishReason.LENGTH
    # Three pages, and the token that follows them.
    assert sum(e.token_id is not None for e in events) == 3 * 4 + 1 - 8 - 1


def test_r13_the_last_sequence_waits_for_the_pages_of_a_load() -> None:
    """The load owns the pages; ending the sequence would make the two alternate forever."""
    world = World(num_pages=5, load_s=0.5)
    world.add("a", 8, max_tokens=9)
    world.step()
    world.add("b", 4, cid="x", max_tokens=2)
    events = world.run()
    assert world.scheduler.num_preemptions == 0
    assert sum(e.request_id == "a" for e in events) == 8
    assert sum(e.request_id == "b" for e in events) == 2


@pytest.mark.parametrize("tenants", ["a", "ab"])
@pytest.mark.parametrize("num_adapters", [1, 4, 30])
def test_r10_the_index_finds_the_same_entitled_queues_as_a_full_comparison(
    tenants: str, num_adapters: int
) -> None:
    """Catches a shortcut that misses a client with a preemptible slot."""
    source = random.Random(num_adapters)
    world = World(
        num_pages=4000, max_sequences=70, max_batch_tokens=200, max_wait_s=0.25, check_every=20
    )
    num_owed = 0
    for number in range(90):
        world.add(f"first {number}", 3, cid="x0", tenant="a", max_tokens=60)
    for step in range(60):
        for number in range(source.choice([0, 4, 12])):
            cid = f"x{int(num_adapters * source.random() ** 3)}"
            name, tenant = f"{step}-{number}", source.choice(tenants)
            world.add(name, 3, cid=cid, tenant=tenant, max_tokens=source.randrange(1, 30))
        admission = world.scheduler._admission
        limits = [s.preemption_limit(world.now, 0.25) for s in world.scheduler._batch]
        expected = {
            queue
            for queue in admission.waiting.queues()
            if world.now - queue.head.queued_s >= 0.25
            and any(limit.allows(queue.clients) for limit in limits)
        }
        assert set(admission._entitled_queues(world.now)) == expected
        num_owed += len(expected)
        world.step()
    assert num_owed > 0 or num_adapters == 1
