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
    tails = [
        [torch.full((num_blocks, len(s.projections), 16, s.in_features), 9.0) for s in SITES]
        for _ in range(NUM_LAYERS)
    ]
    store = make_augmented_weights(tails, world.pool)
    return AugmentedCache(
        augmented_reference, store, world.directory, world.pool, copy_after=copy_after
    )


def slots_of(world: World, *cids: str) -> list[int]:
    return [world.directory.slots_of(((cid, 1.0),))[0][0] for cid in cids]


@pytest.fixture
def world() -> World:
    """a and c need one block, b needs two."""
    found = World()
    for cid in ("a", "b", "c"):
        found.directory.add(found.residents[cid])
    return found


def test_an_adapter_is_brought_after_it_was_asked_for_often_enough_in_a_row(world: World) -> None:
    tail = make_augmented_cache(world, 4, copy_after=2)
    (a, b) = slots_of(world, "a", "b")
    assert [tail.place([a]), tail.place([b]), tail.place([a])] == [False] * 3, "never twice"
    assert tail.place([a, a]) and tail.num_copies == 1
    assert not tail.place([a, b]), "one waits for the other"
    assert tail.place([a, b]) and tail.place([b]) and tail.num_copies == 2
    tail.check_integrity()


def test_who_was_used_last_stays_and_nobody_of_the_batch_goes(world: World) -> None:
    tail = make_augmented_cache(world, 3)
    (a, b, c) = slots_of(world, "a", "b", "c")
    assert tail.place([a]) and tail.place([c]) and tail.place([a])
    assert tail.place([b]), "two of three blocks: c goes, a was used since"
    assert set(tail.held) == {a, b}
    assert not tail.place([a, b, c]), "more than there are blocks"
    assert set(tail.held) == {a, b}, "and nothing moved for it"
    assert tail.place([b, c]) and set(tail.held) == {b, c}
    tail.check_integrity()


def test_a_step_that_computes_few_blocks_finds_its_adapters_among_them(world: World) -> None:
    """Catches a step that reads h of a block behind those that its product computes."""
    tail = make_augmented_cache(world, 4)
    (a, b, c) = slots_of(world, "a", "b", "c")
    assert tail.place([a]) and tail.place([a, b]) and tail.place([c])
    assert max(tail.held[c]) == 3
    assert tail.place([b, c], 3), "c takes the place of a"
    assert max(tail.held[b] + tail.held[c]) < 3 and a not in tail.held
    num_copies = tail.num_copies
    assert tail.place([b, c], 3) and tail.place([b, c]) and tail.num_copies == num_copies
    assert not tail.place([b, c], 2), "more than it computes"
    assert set(tail.held) == {b, c}, "and nothing moved for it"
    tail.check_integrity()


def test_an_adapter_that_leaves_the_device_leaves_its_blocks(world: World) -> None:
    """Catches blocks that the next adapter of the slot would take for its own."""
    tail = make_augmented_cache(world, 2)
    (b,) = slots_of(world, "b")
    assert tail.place([b]) and tail.num_copies == 1
    world.directory.remove("b")
    assert tail.held == {}
    world.directory.add(world.residents["b"])
    (again,) = slots_of(world, "b")
    assert again == b, "the slot of before"
    assert tail.place([b]) and tail.num_copies == 2
    tail.check_integrity()


def test_blocks_have_the_weights_of_who_holds_them_after_any_moves(world: World) -> None:
    tail = make_augmented_cache(world, 3)
    chance = random.Random(1)
    for _ in range(40):
        batch = chance.sample("abc", chance.randint(1, 2))
        limit = chance.choice([1, 2, 3, None])
        is_placed = tail.place(slots_of(world, *batch), limit)
        needed = sum({"a": 1, "b": 2, "c": 1}[cid] for cid in batch)
        assert is_placed == (needed <= (limit or 3))
        tail.check_integrity()
        for slot in slots_of(world, *batch) if is_placed else ():
            assert max(tail.held[slot]) < (limit or 3)
        for cid in batch if is_placed else ():
            (slot,) = slots_of(world, cid)
            blocks = tail.blocks[slot, : len(tail.held[slot])]
            assert tuple(blocks) == tail.held[slot]
            weight = tail._weights.weights[NUM_LAYERS - 1][1]
            ranks = {"a": 3, "b": 20, "c": 16}[cid]
            a = torch.cat([weight[int(block), 0] for block in blocks])
            assert torch.equal(a[:ranks], world.first_of(cid)) and not a[ranks:].any()


def test_the_first_copy_is_made_before_there_is_anything_to_copy() -> None:
    tail = make_augmented_cache(World(), 2)
    tail.warm_up()
    assert all(not weight[0].any() for layer in tail._weights.weights for weight in layer)
    assert tail.held == {} and tail.num_copies == 0
    tail.check_integrity()
