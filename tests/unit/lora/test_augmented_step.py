from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loramux.kernels.gpu.lora.work_list import HEADER_WORDS, NUM_ROWS, ROW_START
from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch
from loramux.kernels.reference import lora_augmented as augmented_reference
from loramux.lora.augmented_step import AugmentedWork, augmented_work
from loramux.lora.segmented import decode_work
from loramux.types.request import Selection
from tests.augmented_factory import ROW, TILE
from tests.lora_factory import NUM_LAYERS, SITES
from tests.unit.lora.test_augmented_cache import make_augmented_cache
from tests.unit.lora.test_segmented import BOTH, A, World

MAX_ROWS = 8


def make_work(
    world: World, launch: AugmentedLaunch, *, num_blocks: int = 4
) -> tuple[AugmentedWork, Ints]:
    for cid in ("a", "b", "c"):
        world.directory.add(world.residents[cid])
    segmented = decode_work(world.device(), MAX_ROWS, use_pdl=False)
    words = np.full(segmented.tables.limits.num_words, 77, dtype=np.int32)
    segmented.read_from(torch.from_numpy(words))
    return AugmentedWork(
        segmented, make_augmented_cache(world, num_blocks), lambda _: launch
    ), words


Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


def expand(work: AugmentedWork, x: torch.Tensor) -> torch.Tensor:
    """Return the output of site o of the last layer with a base of zeros."""
    step = work.step(len(x))
    step.resolve()
    layer, site = NUM_LAYERS - 1, 1
    appended = work.cache._weights.weights[layer][site].reshape(-1, x.shape[1])
    num_outputs = SITES[site].out_features[0]
    y = torch.cat((torch.zeros(len(x), num_outputs), x @ appended.t()), dim=1)
    augmented_reference.expand(y, step.at(layer, site))
    assert step.at(layer, site).num_outputs == num_outputs
    return y[:, :num_outputs]


@pytest.mark.parametrize("launch", [ROW, TILE], ids=["rows", "tiles"])
@pytest.mark.parametrize("selections", [[A, A, ()], [A, (), BOTH, BOTH]], ids=["plain", "weighted"])
def test_rows_get_their_own_adapters_and_base_and_padding_rows_none(
    selections: list[Selection], launch: AugmentedLaunch
) -> None:
    world = World()
    work, words = make_work(world, launch)
    assert work.fill(selections, [1] * len(selections), 6, words)
    rows: list[Selection] = [*selections, *[()] * (6 - len(selections))]
    x = torch.randn(6, SITES[1].in_features)
    torch.testing.assert_close(expand(work, x), world.expected(x, rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("launch", [ROW, TILE], ids=["rows", "tiles"])
def test_every_row_of_a_graph_has_a_first_item(launch: AugmentedLaunch) -> None:
    """Padding rows included: a graph computes them with the tables of an earlier step."""
    world = World()
    work, words = make_work(world, launch)
    assert work.fill([A, BOTH, BOTH], [1] * 3, 5, words)
    limits = work._work.tables.limits
    items = words[HEADER_WORDS : limits.row_map_start].reshape(-1, 8)
    first_items = words[limits.row_map_start : limits.row_map_start + 5]
    for row, index in enumerate(first_items):
        first, count = items[index, ROW_START], items[index, NUM_ROWS]
        assert first <= row < first + count
    assert work.step(5).launch == replace(launch, max_blocks=4), "as many as there are"


def test_a_step_that_does_not_fit_is_left_to_others() -> None:
    world = World()
    work, words = make_work(world, ROW, num_blocks=2)
    assert not work.fill([BOTH], [1], 1, words), "three blocks"
    assert work.fill([A], [1], 1, words)
    tables = work._work.tables
    work._work.tables = replace(tables, limits=replace(tables.limits, max_items=1))
    assert not work.fill([A, A], [1, 1], 2, words), "more items than the tables hold"


def test_weights_without_appended_rows_have_no_augmented_work() -> None:
    world = World()
    segmented = decode_work(world.device(), 2, use_pdl=False)
    assert augmented_work(segmented, None, augmented_reference) is None
    appended = [
        [torch.zeros(1, len(s.projections), 16, s.in_features) for s in SITES]
        for _ in range(NUM_LAYERS)
    ]
    assert augmented_work(segmented, appended, augmented_reference) is not None
