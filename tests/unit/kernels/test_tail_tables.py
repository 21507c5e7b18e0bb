from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loramux.kernels.gpu.lora_augmented.tables import (
    AugmentedSite,
    augmented_launch,
    make_augmented_weights,
)
from tests.augmented_factory import ROW, TILE
from tests.lora_factory import make_world


def test_every_size_of_batch_has_a_launch_that_its_kernels_can_run() -> None:
    """A tile is what the matrix units take, or one row."""
    assert {augmented_launch(size).tile_rows for size in range(1, 600)} <= {1, 16, 64}
    assert all(augmented_launch(size).max_blocks >= min(size, 8) for size in range(1, 600))


def test_only_tiles_have_a_launch_of_their_own_before_a_norm() -> None:
    with pytest.raises(AssertionError, match="a row alone"):
        replace(ROW, fuses_norm=False)
    assert not replace(TILE, fuses_norm=False).fuses_norm


def test_programs_are_as_many_as_rows_or_as_tiles_usually_are() -> None:
    world = make_world([{"q_proj": 1}])
    row, tile = (AugmentedSite(world.tables, world.pool, launch, 0, 0) for launch in (ROW, TILE))
    assert [row.max_tiles(count) for count in (1, 7, 64)] == [1, 7, 64]
    assert tile.max_tiles(3) == 3 and 16 < tile.max_tiles(256) < 64


def test_tables_have_a_record_more_than_a_program_has_tiles() -> None:
    """Catches a read past the last layer's records: the next tile's is asked for in any case."""
    world = make_world([{"q_proj": 1}])
    row = AugmentedSite(world.tables, world.pool, ROW, 0, 0)
    with pytest.raises(AssertionError, match="too small"):
        row.max_tiles(world.tables.limits.max_items // 2 + 1)


def test_a_store_knows_where_its_tails_are() -> None:
    pool = torch.arange(10.0)
    weights = [[torch.zeros(2, 3, 16, 8), torch.zeros(2, 1, 16, 4)] for _ in range(2)]
    store = make_augmented_weights(weights, pool)
    assert store.num_blocks == 2
    assert store.shapes.tolist() == [[8, 3]] * 3 + [[4, 1]]
    first = store.places[1]
    assert int(first[0]) * 4 + pool.data_ptr() == weights[1][0].data_ptr()
    assert (first[1:3] - first[:2]).tolist() == [128, 128]
    assert int(first[3]) * 4 + pool.data_ptr() == weights[1][1].data_ptr()
