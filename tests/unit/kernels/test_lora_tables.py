from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from loramux.kernels.gpu.lora.tables import (
    PREFILL_LAUNCH,
    LaunchShape,
    LoraTables,
    decode_launch,
    make_tables,
)
from loramux.kernels.gpu.lora.work_list import FIRST_USED, SiteShape, WorkLimits

SITES = (
    SiteShape("qkv", 4096, (4096, 1024, 1024)),
    SiteShape("o", 4096, (4096,)),
    SiteShape("down", 14336, (4096,)),
)
LIMITS = WorkLimits(max_items=4, max_h_rows=8)


def tables_of(
    launch: LaunchShape, sites: Sequence[SiteShape] = SITES, *, num_layers: int = 1
) -> LoraTables:
    return make_tables(
        sites, num_layers=num_layers, limits=LIMITS, launch=launch, device=torch.device("cpu")
    )


def test_a_site_begins_where_the_projections_of_the_others_end() -> None:
    tables = tables_of(decode_launch(use_pdl=False), num_layers=2)
    assert [cut.first_projection for cut in tables.sites] == [0, 3, 4]
    words = [[word - FIRST_USED for word in tables.used_words(site)] for site in range(3)]
    assert words == [[0, 1, 2], [3], [4]]
    assert tables.items.shape == (2, 4, 8, 8)
    assert len(tables.work) == LIMITS.num_words


def test_the_parts_of_every_input_have_room_in_the_partial_sums() -> None:
    """Catches sums of one row that would be written over those of the next."""
    for launch in (decode_launch(use_pdl=True), PREFILL_LAUNCH):
        tables = tables_of(launch)
        for cut in tables.sites:
            assert cut.row_splits * cut.row_k >= cut.shape.in_features
            assert cut.tile_splits * cut.tile_k >= cut.shape.in_features
            assert max(cut.row_splits, cut.tile_splits) <= tables.max_splits
        assert tables.partials.shape == (8, 3, tables.max_splits, 16)


@pytest.mark.parametrize(
    ("num_inputs", "expected"),
    [(576, 1024), (4096, 4096), (14336, 2048), (11008, 4096), (5000, 1024), (5700, 2048)],
)
def test_parts_of_few_rows_leave_little_of_the_last_one_empty(
    num_inputs: int, expected: int
) -> None:
    launch = replace(decode_launch(use_pdl=False), row_k=4096)
    cut = tables_of(launch, [SiteShape("o", num_inputs, (64,))]).sites[0]
    assert cut.row_k == expected
    # What several parts cover in vain is little, but for the smallest parts.
    vain = cut.row_splits * cut.row_k - num_inputs
    assert cut.row_splits == 1 or vain * 8 <= num_inputs or cut.row_k == 1024


def test_a_shrink_of_few_rows_reads_the_same_bytes_of_every_dtype() -> None:
    launch = replace(decode_launch(use_pdl=False), row_values=16384)
    assert launch.row_ranks(4096, 2) == 4
    assert launch.row_ranks(4096, 4) == 2
    assert launch.row_ranks(64, 2) == 16
    assert launch.row_ranks(65536, 2) == 1


def test_overlapping_launches_are_a_choice_of_the_caller() -> None:
    assert decode_launch(use_pdl=True).use_pdl
    assert not decode_launch(use_pdl=False).use_pdl
