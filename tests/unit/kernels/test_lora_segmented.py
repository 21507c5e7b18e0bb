"""The segmented (SGMV) kernels against dense float64, in the interpreter or on a GPU.

The interpreter's dot rounds bfloat16 differently, so bfloat16 is checked on a GPU only.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.lora_factory import LAUNCH, LIMITS, LoraWorld, Selection, make_world, random_rows

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora import segmented as lora_gpu
from loramux.kernels.reference import lora_segmented

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
QKV, O_PROJ, GATE_UP = range(3)


def rows_of(counts: list[int]) -> list[Selection]:
    """counts[slot] rows of each adapter."""
    return [((slot, 1.0),) for slot, count in enumerate(counts) for _ in range(count)]


def check(world: LoraWorld, rows: list[Selection], site: int, *, layer: int = 0) -> None:
    world.plan(rows)
    # Partial sums that this step did not write must not reach y.
    world.tables.partials.fill_(float("nan"))
    x, y = random_rows(len(rows), site, dtype=world.pool.dtype)
    expected = world.expected(y, x, rows, layer, site)
    lora_gpu.shrink(world.tables, world.pool, x, layer, site)
    lora_gpu.expand(world.tables, world.pool, y, layer, site)
    limit = 1e-4 if world.pool.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), expected, atol=limit, rtol=limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "rank", "site"),
    [
        ([1, 1, 1], 16, QKV),
        ([1, 1, 1], 1, GATE_UP),
        ([19], 3, QKV),
        ([2, 2], 16, O_PROJ),
        ([1, 2], 20, QKV),
        ([5, 2, 1], 8, GATE_UP),
        ([1, 2], 64, O_PROJ),
        ([1], 200, O_PROJ),
    ],
    ids=["distinct", "rank 1", "identical", "pairs", "rank 20", "skewed", "rank 64", "rank 200"],
)
def test_every_mix_of_popularity_and_rank(counts: list[int], rank: int, site: int) -> None:
    check(make_world([dict.fromkeys(ALL, rank)] * len(counts)), rows_of(counts), site)


@pytest.mark.parametrize("counts", [[1, 1], [3]], ids=["rows", "tile"])
def test_float16(counts: list[int]) -> None:
    world = make_world([dict.fromkeys(ALL, 8)] * len(counts), dtype=torch.float16)
    check(world, rows_of(counts), QKV)


def test_adapters_of_other_ranks_beside_base_rows() -> None:
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 20)])
    check(world, [((0, 1.0),), (), ((1, 1.0),), ((1, 1.0),), ()], QKV)


def test_several_weighted_adapters_on_one_row_add_up() -> None:
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 17)])
    pair = ((0, 0.5), (1, -2.0))
    check(world, [pair, pair, ((1, 1.0), (0, 2.0)), ((0, 3.0),)], O_PROJ)


def test_random_sums_of_up_to_eight_adapters_beside_plain_and_base_rows() -> None:
    ranks = [dict.fromkeys(ALL, rank) for rank in (1, 3, 16, 20, 4, 4)]
    world = make_world([*ranks, {"q_proj": 5}, {"o_proj": 17, "v_proj": 2}])
    draw = random.Random(0)
    eight = tuple((slot, draw.uniform(-2, 2)) for slot in range(8))
    rows: list[Selection] = [eight, (), ((0, 1.0),), ((2, 1.0),), ((2, 1.0),)]
    for _ in range(6):
        slots = draw.sample(range(8), draw.randint(1, 4))
        rows += [tuple((slot, draw.uniform(-2, 2)) for slot in slots)] * draw.choice((1, 1, 4))
    check(world, rows, QKV)


def test_projections_and_layers_that_an_adapter_does_not_change() -> None:
    world = make_world([{"q_proj": 3}, {"v_proj": 20}, dict.fromkeys(ALL, 4)], skip=[(2, 1)])
    rows: list[Selection] = [((0, 1.0),), ((1, 1.0),), ((2, 1.0),), ((2, 1.0),)]
    check(world, rows, QKV, layer=1)


def test_rows_of_one_adapter_need_not_be_adjacent() -> None:
    world = make_world([dict.fromkeys(ALL, 4)] * 2)
    check(world, [((1, 1.0),), ((0, 1.0),), ((1, 1.0),), ((1, 1.0),)], O_PROJ)


def test_ctas_loop_over_more_tiles() -> None:
    """One CTA, and many tiles of both kinds."""
    launch = replace(LAUNCH, shrinks_per_sm=1, expands_per_sm=1)
    world = make_world([dict.fromkeys(ALL, 4)] * 3, launch=launch)
    check(world, rows_of([1, 3, 1]), QKV)


def test_the_grid_covers_all_tiles() -> None:
    """A pair beside a single row: a grid that is too small would lose work."""
    launch = replace(LAUNCH, expands_per_sm=64)
    world = make_world([dict.fromkeys(ALL, 4)] * 2, launch=launch)
    check(world, rows_of([2, 1]), O_PROJ)
    check(world, rows_of([1, 2]), QKV)


def test_prefill_lists_have_single_rows_as_tiles() -> None:
    world = make_world([dict.fromkeys(ALL, 4), {"v_proj": 18}], limits=replace(LIMITS, few_rows=0))
    check(world, rows_of([5, 1]), QKV)
    check(world, rows_of([1, 2]), O_PROJ)


def test_a_step_without_adapters_changes_nothing() -> None:
    world = make_world([dict.fromkeys(ALL, 4)])
    world.plan([(), ()])
    x, y = random_rows(2, QKV)
    before = y.clone()
    lora_gpu.shrink(world.tables, world.pool, x, 0, QKV)
    lora_gpu.expand(world.tables, world.pool, y, 0, QKV)
    assert torch.equal(y, before)


def test_base_rows_keep_their_bits() -> None:
    world = make_world([dict.fromkeys(ALL, 3)])
    rows: list[Selection] = [(), ((0, 1.0),), ((0, 1.0),), ()]
    world.plan(rows)
    x, y = random_rows(len(rows), O_PROJ)
    before = y.clone()
    lora_gpu.shrink(world.tables, world.pool, x, 0, O_PROJ)
    lora_gpu.expand(world.tables, world.pool, y, 0, O_PROJ)
    assert torch.equal(y[[0, 3]], before[[0, 3]])
    assert not torch.equal(y[[1, 2]], before[[1, 2]])


def test_resolve_equals_the_reference() -> None:
    world = make_world([dict.fromkeys(ALL, 20), {"k_proj": 3}], skip=[(0, 1)])
    world.plan([((0, 1.0),), ((0, 1.0),), ((1, 0.5), (0, 1.0))])
    expected = world.tables.items.clone()
    world.tables.items.zero_()
    lora_gpu.resolve(world.tables, world.directory, world.slots)
    assert torch.equal(world.tables.items, expected)


PAIR = ((0, 0.5), (1, -2.0))
FEW_ROWS = pytest.mark.parametrize("few_rows", [1, 4, 0], ids=["tiles", "few rows", "prefill"])


@FEW_ROWS
def test_partial_sums_equal_the_reference(few_rows: int) -> None:
    """Catches a split that has another split's columns, which the reduction would hide."""
    limits = replace(LIMITS, few_rows=few_rows)
    world = make_world([dict.fromkeys(ALL, 3), {"v_proj": 18}], limits=limits)
    world.plan([((0, 1.0),), ((1, 1.0),), ((1, 1.0),), ()])
    x, _ = random_rows(4, site=0)
    found = {}
    for kernels in (lora_segmented, lora_gpu):
        world.tables.partials.zero_()
        kernels.shrink(world.tables, world.pool, x, 1, 0)
        found[kernels] = world.tables.partials.clone()
    expected = found[lora_segmented]
    torch.testing.assert_close(found[lora_gpu], expected, atol=1e-5, rtol=1e-5)
    assert expected.any()


@FEW_ROWS
def test_expand_of_the_same_partial_sums_equals_the_reference(few_rows: int) -> None:
    """Catches a partial sum that is added twice, or to another slice's columns."""
    limits = replace(LIMITS, few_rows=few_rows)
    world = make_world([dict.fromkeys(ALL, 3), dict.fromkeys(ALL, 18)], limits=limits)
    world.plan([((0, 1.0),), ((1, 1.0),), ((1, 1.0),), (), PAIR])
    x, y = random_rows(5, site=0)
    lora_segmented.shrink(world.tables, world.pool, x, 1, 0)
    found = {}
    for kernels in (lora_segmented, lora_gpu):
        found[kernels] = y.clone()
        kernels.expand(world.tables, world.pool, found[kernels], 1, 0)
    expected = found[lora_segmented]
    torch.testing.assert_close(found[lora_gpu], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected, y)
