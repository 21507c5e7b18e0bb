"""What running sequences hold: shared prefixes, pages and adapters."""

from __future__ import annotations

import pytest

from loramux.types.request import TokenEvent
from tests.unit.scheduler.scheduler_factory import World

PROMPT = list(range(100, 122))


def reused(events: list[TokenEvent]) -> dict[str, int]:
    """Return the number of reused tokens that the events of each request report."""
    found: dict[str, int] = {}
    for event in events:
        found[event.request_id] = found.get(event.request_id, 0) + event.num_reused
    return found


def test_a_cached_prompt_is_not_computed_again() -> None:
    world = World()
    world.add("a", PROMPT)
    world.run()
    world.add("b", PROMPT)
    plan = world.begin()
    assert plan is not None and (plan.chunks[0].start, len(plan.chunks[0].token_ids)) == (20, 2)
    assert reused(world.end() + world.run()) == {"b": 20}


def test_the_last_token_is_always_computed() -> None:
    """Without a computed token there are no logits to sample from."""
    world = World()
    for name in "ab":
        world.add(name, PROMPT[:20])
        events = world.run()
    assert reused(events) == {"b": 16}


def test_a_running_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    world = World(max_batch_tokens=32)
    world.add("a", PROMPT, max_tokens=30)
    world.step()
    world.add("b", PROMPT, max_tokens=30)
    events = world.step()
    assert reused(events)["b"] == 20
    first, second = world.scheduler.prefix_leases()
    assert first.page_ids == second.page_ids


def test_equal_prompts_of_one_step_end_up_on_the_same_pages() -> None:
    world = World(max_batch_tokens=64)
    world.add("a", PROMPT, max_tokens=2, n=2)
    world.step()
    assert world.pages.num_pages - world.pages.num_free == 5 + 2
    world.run()


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    world = World()
    world.add("a", PROMPT, max_tokens=7)
    world.run()
    world.add("b", PROMPT + [7] * 7 + [50, 51])
    assert reused(world.run()) == {"b": 28}


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"tenant": "ab", "cache_salt": "c"},
        {"cache_salt": "s"},
        {"cid": "x"},
        {"selection": (("y", 0.5),)},
        {"prompt_logprobs": 0},
    ],
)
def test_a_prefix_is_shared_only_where_it_is_the_same_and_allowed(other: dict[str, object]) -> None:
    """Catches KV of another tenant, salt, adapter or weight in an answer."""
    world = World()
    world.add("a", PROMPT, tenant="a", cache_salt="bc")
    world.add("b", PROMPT)
    world.add("c", PROMPT, cid="y")
    world.run()
    world.add("d", PROMPT, **other)
    assert reused(world.run()) == {"d": 0}


def test_r13_a_preempted_sequence_continues_from_the_prefix_cache() -> None:
    world = World(num_pages=12, max_batch_tokens=32)
    world.add("a", list(range(20)), max_tokens=20)
    world.add("b", list(range(50, 66)), max_tokens=20)
    starts: list[int] = []
    while world.scheduler.has_work:
        plan = world.begin()
        if plan is not None:
            starts += [c.start for c in plan.chunks if c.sequence_id == 1]
        world.end()
    assert world.scheduler.num_preemptions > 0
    fallen = [now for before, now in zip(starts, starts[1:], strict=False) if now < before]
    assert fallen and all(start > 0 for start in fallen)


def test_a_refused_prompt_does_not_count_as_a_use_of_the_cache() -> None:
    """Catches hit rates that grow while a request waits for pages."""
    world = World(num_pages=11, max_batch_tokens=64)
    assert world.prefixes is not None
    world.add("a", PROMPT[:8])
    world.run()
    world.add("b", list(range(20)), max_tokens=16)
    world.add("c", PROMPT + list(range(200, 204)))
    world.step()
    before = world.prefixes.num_query_tokens
    for _ in range(10):
        world.step()
    assert world.scheduler.num_waiting == 1
    assert world.prefixes.num_query_tokens - before <= 25
    world.run()


def test_r9_no_more_adapters_run_than_allowed() -> None:
    world = World(max_loras=2)
    for number in range(6):
        world.add(str(number), 3, cid=f"x{number % 4}")
    while world.scheduler.has_work:
        world.step()
        assert len(world.scheduler.leases()) <= 2


def test_r9_a_base_request_does_not_count_as_an_adapter() -> None:
    world = World(max_loras=1)
    world.add("a", 3, cid="x")
    world.add("b", 3)
    world.begin()
    assert sorted(world.running()) == ["a", "b"]


def test_without_a_cache_pages_are_a_sequences_own() -> None:
    world = World(has_prefixes=False)
    for name in "ab":
        world.add(name, PROMPT)
    assert reused(world.run()) == {"a": 0, "b": 0}
    assert world.pages.num_free == world.pages.num_pages
