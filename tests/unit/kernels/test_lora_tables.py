from __future__ import annotations

import torch

from loramux.kernels.lora_tables import PROMPT, decode_launch, make_tables
from loramux.kernels.lora_work import FIRST_USED, SiteShape, WorkLimits

SITES = (
    SiteShape("qkv", 4096, (4096, 1024, 1024)),
    SiteShape("o", 4096, (4096,)),
    SiteShape("down", 14336, (4096,)),
)
LIMITS = WorkLimits(max_units=4, max_h_rows=8)


def test_a_site_begins_where_the_projections_of_the_others_end() -> None:
    tables = make_tables(
        SITES,
        num_layers=2,
        limits=LIMITS,
        launch=decode_launch(1, use_pdl=False),
        device=torch.device("cpu"),
    )
    assert [cut.first_projection for cut in tables.sites] == [0, 3, 4]
    words = [[word - FIRST_USED for word in tables.used_words(site)] for site in range(3)]
    assert words == [[0, 1, 2], [3], [4]]
    assert tables.records.shape == (2, 4, 8, 8)
    assert len(tables.work) == LIMITS.num_words


def test_the_parts_of_every_input_have_room_in_the_partial_sums() -> None:
    """Catches sums of one row that would be written over those of the next."""
    for launch in (decode_launch(1, use_pdl=True), decode_launch(256, use_pdl=True), PROMPT):
        tables = make_tables(
            SITES, num_layers=1, limits=LIMITS, launch=launch, device=torch.device("cpu")
        )
        for cut in tables.sites:
            assert cut.num_splits * cut.block_k >= cut.shape.in_features
            assert cut.num_splits <= tables.max_splits
        assert tables.max_splits & (tables.max_splits - 1) == 0
        assert tables.partials.shape == (8, 3, tables.max_splits, 16)


def test_overlapping_launches_are_a_choice_of_the_caller() -> None:
    assert decode_launch(256, use_pdl=True).use_pdl
    assert not decode_launch(256, use_pdl=False).use_pdl
