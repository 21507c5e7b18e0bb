"""Tiles of the kernels for augmented weights: more tiles than CTAs, long tiles, launch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed with torch for NVIDIA GPUs only")

from loramux.kernels.gpu.lora_augmented import ops as augmented_gpu
from loramux.kernels.gpu.lora_augmented.tables import (
    AugmentedSite,
    augmented_launch,
    make_augmented_weights,
)
from loramux.kernels.ops import KVTarget, Rotation
from loramux.kernels.reference import elementwise as fused_torch
from loramux.kernels.reference import lora_augmented as augmented_reference
from loramux.types.kv import KVLayout
from tests.attention_factory import random_angles
from tests.augmented_factory import LONG_TILE, ROW, TILE, make_augmented_world, two_ctas  # noqa: E402
from tests.lora_factory import NUM_LAYERS, Selection, make_world, random_rows  # noqa: E402

QKV, O_PROJ, GATE_UP = range(3)
each_order = pytest.mark.parametrize("is_early", [True, False], ids=["B first", "y first"])


@each_order
def test_activating_ctas_loop_over_more_tiles(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CTAs, and a tile for every row.

    Adapter 2 has two rank blocks, which only a CTA's second tile has.
    """
    names = ("gate_proj", "up_proj")
    ranks = (2, 2, 20)
    world = make_augmented_world(
        [dict.fromkeys(names, rank) for rank in ranks], augmented_reference
    )
    rows: list[Selection] = [((slot, 1.0),) for slot in (0, 1, 2, 0, 2)]
    world.step(rows, TILE)
    two_ctas(monkeypatch, is_early=is_early)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.gemm(x, 1, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(1, GATE_UP, TILE))
    expected = fused_torch.activate_mul(world.expected(x, rows, 1, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@each_order
@pytest.mark.parametrize("splits", [1, 2])
def test_expanding_ctas_loop_over_more_tiles(
    splits: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base row stands between the tiles."""
    world = make_augmented_world([{"o_proj": 2}, {"o_proj": 20}], augmented_reference)
    rows: list[Selection] = [((0, 1.0),), (), ((1, 1.0),), ((0, 1.0),), ((1, 1.0),)]
    world.step(rows, TILE)
    two_ctas(monkeypatch, is_early=is_early)
    x, _ = random_rows(len(rows), O_PROJ)
    y = world.split_k(x, 1, O_PROJ, splits) if splits > 1 else world.gemm(x, 1, O_PROJ)
    actual = augmented_gpu.expand(y, world.at(1, O_PROJ, TILE))
    expected = world.expected(x, rows, 1, O_PROJ)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_long_tiles_with_one_and_with_two_rank_blocks() -> None:
    """20 rows of one rank block, 20 of two: the second 16 rows of a tile use the same B."""
    names = ("gate_proj", "up_proj")
    world = make_augmented_world([dict.fromkeys(names, 5), {"gate_proj": 20}], augmented_reference)
    rows: list[Selection] = [((0, 1.0),)] * 20 + [((1, 0.5),)] * 20 + [()] * 18
    world.step(rows, LONG_TILE)
    x, _ = random_rows(len(rows), GATE_UP)
    y = world.gemm(x, 0, GATE_UP)
    actual = augmented_gpu.activate_mul(y, "silu", world.at(0, GATE_UP, LONG_TILE))
    expected = fused_torch.activate_mul(world.expected(x, rows, 0, GATE_UP), "silu")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@each_order
def test_rotating_ctas_loop_over_more_tiles(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are rotated in place, keys and values go to their pages.

    Adapter 1 has two rank blocks, which only a CTA's second tile has.
    """
    names = ("q_proj", "k_proj", "v_proj")
    world = make_augmented_world(
        [dict.fromkeys(names, 2), dict.fromkeys(names, 20)], augmented_reference
    )
    rows: list[Selection] = [((0, 1.0),), (), ((1, 1.0),), ((0, 1.0),), ((1, 1.0),)]
    world.step(rows, TILE)
    two_ctas(monkeypatch, is_early=is_early)
    layout = KVLayout(NUM_LAYERS, num_kv_heads=1, head_dim=16, block_tokens=4)
    rotation = Rotation(*random_angles(len(rows), head_dim=16))
    slots = torch.tensor([3, 5, -1, 9, 1], dtype=torch.int32)
    storage = torch.randn(4, NUM_LAYERS * 2 * 4 * 16)
    found, known = (KVTarget(storage.clone(), slots, layout, 1) for _ in range(2))
    x, _ = random_rows(len(rows), QKV)
    y = world.gemm(x, 1, QKV)
    actual = augmented_gpu.rotate_write(y, rotation, found, world.at(1, QKV, TILE))
    expected = fused_torch.rotate_write(world.expected(x, rows, 1, QKV), rotation, known)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.storage, known.storage, atol=1e-4, rtol=1e-4)


def test_every_size_of_batch_has_a_launch_that_its_kernels_can_run() -> None:
    """A tile has one row, or a multiple of an MMA's 16."""
    assert {augmented_launch(size).tile_rows for size in range(1, 600)} <= {1, 16, 64}
    assert all(augmented_launch(size).max_blocks >= min(size, 8) for size in range(1, 600))


def test_only_tiles_have_an_expand_launch_before_a_norm() -> None:
    with pytest.raises(AssertionError, match="single rows"):
        replace(ROW, fuses_norm=False)
    assert not replace(TILE, fuses_norm=False).fuses_norm


def test_there_are_as_many_ctas_as_rows_or_typical_tiles() -> None:
    world = make_world([{"q_proj": 1}])
    row, tile = (AugmentedSite(world.tables, world.pool, launch, 0, 0) for launch in (ROW, TILE))
    assert [row.max_tiles(count) for count in (1, 7, 64)] == [1, 7, 64]
    assert tile.max_tiles(3) == 3 and 16 < tile.max_tiles(256) < 64


def test_tables_have_one_item_more_than_a_cta_has_tiles() -> None:
    """Catches a load past the last layer's items: the next tile's item is loaded in any case."""
    world = make_world([{"q_proj": 1}])
    row = AugmentedSite(world.tables, world.pool, ROW, 0, 0)
    with pytest.raises(AssertionError, match="too small"):
        row.max_tiles(world.tables.limits.max_items // 2 + 1)


def test_offsets_of_appended_rows_are_relative_to_the_pool() -> None:
    pool = torch.arange(10.0)
    weights = [[torch.zeros(2, 3, 16, 8), torch.zeros(2, 1, 16, 4)] for _ in range(2)]
    augmented = make_augmented_weights(weights, pool)
    assert augmented.num_blocks == 2
    assert augmented.shapes.tolist() == [[8, 3]] * 3 + [[4, 1]]
    first = augmented.offsets[1]
    assert int(first[0]) * 4 + pool.data_ptr() == weights[1][0].data_ptr()
    assert (first[1:3] - first[:2]).tolist() == [128, 128]
    assert int(first[3]) * 4 + pool.data_ptr() == weights[1][1].data_ptr()
