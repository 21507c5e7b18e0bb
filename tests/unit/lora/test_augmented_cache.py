from __future__ import annotations

import random

import pytest
import torch

from loramux.kernels.gpu.lora_augmented.tables import make_augmented_weights
from loramux.kernels.reference import lora_augmented as augmented_reference
from loramux.lora.augmented import AugmentedCache
from tests.lora_factory import NUM_LAYERS, SITES
from tests.unit.lora.test_segmented import World


def make_augmented_cache(world: World, num_blocks: int, *, copy_after: int = 1) -> AugmentedCache:
    appended = [
        [torch.full((num_blocks, len(s.projections), 16, s.in_features), 9.0) for s in SITES]
        for _ in range(NUM_LAYERS)
    ]
    weights = make_augmented_weights(appended, world.pool)
    return AugmentedCache(
        augmented_reference, weights, world.directory, world.pool, copy_after=copy_after
    )


def slots_of(world: World, *cids: str) -> list[int]:
    return [world.directory.slots_of(((cid, 1.0),))[0][0] for cid in cids]


@pytest.fixture
def world() -> World:
    """Return a batch in which a and c need one block, b needs two."""
    found = World()
    for cid in ("a", "b", "c"):
        found.directory.add(found.residents[cid])
    return found


def test_an_adapter_is_copied_after_enough_consecutive_steps(world: World) -> None:
    cache = make_augmented_cache(world, 4, copy_after=2)
    (a, b) = slots_of(world, "a", "b")
    assert [cache.place([a]), cache.place([b]), cache.place([a])] == [False] * 3, "never twice"
    assert cache.place([a, a]) and cache.num_copies == 1
    assert not cache.place([a, b]), "b is not there yet"
    assert cache.place([a, b]) and cache.place([b]) and cache.num_copies == 2
    cache.check_integrity()


def test_the_least_recently_used_adapter_outside_the_batch_is_evicted(world: World) -> None:
    cache = make_augmented_cache(world, 3)
    (a, b, c) = slots_of(world, "a", "b", "c")
    assert cache.place([a]) and cache.place([c]) and cache.place([a])
    assert cache.place([b]), "two of three blocks: c is evicted, a was used since"
    assert set(cache.held) == {a, b}
    assert not cache.place([a, b, c]), "more than there are blocks"
    assert set(cache.held) == {a, b}, "and nothing moved for it"
    assert cache.place([b, c]) and set(cache.held) == {b, c}
    cache.check_integrity()


def test_a_step_that_computes_few_blocks_finds_its_adapters_among_them(world: World) -> None:
    """Catches a step that reads h of a block that its GEMM does not compute."""
    cache = make_augmented_cache(world, 4)
    (a, b, c) = slots_of(world, "a", "b", "c")
    assert cache.place([a]) and cache.place([a, b]) and cache.place([c])
    assert max(cache.held[c]) == 3
    assert cache.place([b, c], 3), "c replaces a"
    assert max(cache.held[b] + cache.held[c]) < 3 and a not in cache.held
    num_copies = cache.num_copies
    assert cache.place([b, c], 3) and cache.place([b, c]) and cache.num_copies == num_copies
    assert not cache.place([b, c], 2), "more than it computes"
    assert set(cache.held) == {b, c}, "and nothing moved for it"
    cache.check_integrity()


def test_an_evicted_adapter_frees_its_blocks(world: World) -> None:
    """Catches stale blocks of the slot's previous adapter."""
    cache = make_augmented_cache(world, 2)
    (b,) = slots_of(world, "b")
    assert cache.place([b]) and cache.num_copies == 1
    assert world.directory.remove("b") == b
    cache.forget(b)
    assert cache.held == {}
    world.directory.add(world.residents["b"])
    (again,) = slots_of(world, "b")
    assert again == b, "the slot of before"
    assert cache.place([b]) and cache.num_copies == 2
    cache.check_integrity()


def test_blocks_hold_their_adapters_weights_after_any_moves(world: World) -> None:
    cache = make_augmented_cache(world, 3)
    chance = random.Random(1)
    for _ in range(40):
        batch = chance.sample("abc", chance.randint(1, 2))
        limit = chance.choice([1, 2, 3, None])
        is_placed = cache.place(slots_of(world, *batch), limit)
        needed = sum({"a": 1, "b": 2, "c": 1}[cid] for cid in batch)
        assert is_placed == (needed <= (limit or 3))
        cache.check_integrity()
        for slot in slots_of(world, *batch) if is_placed else ():
            assert max(cache.held[slot]) < (limit or 3)
        for cid in batch if is_placed else ():
            (slot,) = slots_of(world, cid)
            blocks = cache.blocks[slot, : len(cache.held[slot])]
            assert tuple(blocks) == cache.held[slot]
            weight = cache._weights.weights[NUM_LAYERS - 1][1]
            ranks = {"a": 3, "b": 20, "c": 16}[cid]
            a = torch.cat([weight[int(block), 0] for block in blocks])
            assert torch.equal(a[:ranks], world.first_of(cid)) and not a[ranks:].any()


def test_warm_up_clears_block_0_and_caches_nothing() -> None:
    cache = make_augmented_cache(World(), 2)
    cache.warm_up()
    assert all(not weight[0].any() for layer in cache._weights.weights for weight in layer)
    assert cache.held == {} and cache.num_copies == 0
    cache.check_integrity()
