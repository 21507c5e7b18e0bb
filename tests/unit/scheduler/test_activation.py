"""R16 and R17: aLoRA adapters over one context."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.scheduler.scheduler_factory import World

CONTEXT = list(range(100, 140))
BLOCK = 4


def make_world(budget: int, **settings: object) -> World:
    defaults = {"num_pages": 400, "max_model_len": 200, "max_wait_s": 1e9}
    return World(max_batch_tokens=budget, **{**defaults, **settings})  # type: ignore[arg-type]


def add(world: World, name: str, context: list[int], **fields: object) -> None:
    prompt = [*context, 7, int(name)]
    fields = {"cid": f"adapter {name}", "adapter_start": len(context), **fields}
    world.add(name, prompt, **fields)  # type: ignore[arg-type]


def num_computed(world: World) -> Counter[str]:
    """Run all; return the number of prompt tokens that each request computed."""
    found: Counter[str] = Counter()
    while world.scheduler.has_work:
        world.begin()
        if world.plan is not None:
            for name, chunk in zip(world.running(), world.plan.chunks, strict=True):
                found[name] += len(chunk.token_ids) if chunk.start < len(CONTEXT) + 2 else 0
        world.end()
    return found


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 1000])
def test_r17_requests_that_arrive_at_once_compute_their_context_once(
    budget: int, runs_ahead: bool
) -> None:
    world = make_world(budget, runs_ahead=runs_ahead)
    for number in range(8):
        add(world, str(number), CONTEXT)
    found = num_computed(world)
    assert sorted(found.values()) == [2] * 7 + [42]


@pytest.mark.parametrize(
    "apart",
    [
        {"tenant": "b"},
        {"cache_salt": "b"},
        {"prompt_logprobs": 0},
        {"adapter_start": 0},
        {"context": [1, *CONTEXT[1:]]},
    ],
    ids=str,
)
def test_r17_nobody_waits_for_what_it_cannot_share(apart: dict[str, object]) -> None:
    world = make_world(60)
    add(world, "1", CONTEXT)
    add(world, "2", **{"context": CONTEXT, **apart})  # type: ignore[arg-type]
    world.begin()
    assert sorted(world.running()) == ["1", "2"]


def test_r17_an_overdue_request_and_a_cache_that_is_off_do_not_wait() -> None:
    for settings in ({"max_wait_s": 0.0}, {"has_prefixes": False}):
        world = make_world(60, **settings)
        add(world, "1", CONTEXT)
        add(world, "2", CONTEXT)
        world.begin()
        assert sorted(world.running()) == ["1", "2"], settings


def test_r17_the_wait_ends_with_the_one_that_computes() -> None:
    world = make_world(16)
    add(world, "1", CONTEXT)
    world.step()
    add(world, "2", CONTEXT)
    world.begin()
    assert world.running() == ["1"]
    world.end()
    world.scheduler.abort("1")
    world.begin()
    assert world.running() == ["2"]
    assert world.plan is not None
    assert world.plan.chunks[0].start == 32, "what was computed is kept"


def test_r16_a_context_that_ends_inside_a_block_is_shared_without_that_block() -> None:
    world = make_world(64)
    add(world, "1", CONTEXT[:-2])
    world.run()
    add(world, "2", CONTEXT[:-2])
    add(world, "3", CONTEXT[:-2], cid=None, adapter_start=0)
    world.begin()
    assert world.plan is not None
    assert [chunk.start for chunk in world.plan.chunks] == [36, 36]
    assert [len(chunk.token_ids) for chunk in world.plan.chunks] == [2, 4]
