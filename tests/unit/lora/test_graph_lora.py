from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loramux.adapters.packed.paged import plan_rank_blocks
from loramux.kernels.gpu.lora_augmented.tables import AugmentedLaunch
from loramux.kernels.reference import lora_segmented
from loramux.lora.augmented_step import AugmentedStep, AugmentedWork
from loramux.lora.graph_lora import BASE_MODE, GraphLora, LoraMode, LoraPath
from loramux.lora.segmented import DeviceDirectory, LoraDevice, SegmentedWork, decode_work
from loramux.memory.records import ResidentAdapter
from loramux.types.model import LinearSpec
from loramux.types.request import Selection
from tests.lora_factory import (
    AUGMENTED,
    AUGMENTED_ATTENTION,
    NUM_LAYERS,
    PAGE_ELEMENTS,
    SEGMENTED,
    SEGMENTED_ATTENTION,
    SITES,
)
from tests.unit.lora.test_augmented_cache import make_augmented_cache
from tests.unit.lora.test_segmented import CPU, World

NARROW = LoraMode(LoraPath.AUGMENTED, num_blocks=1)
A: Selection = (("a", 1.0),)
BOTH: Selection = (("a", 0.5), ("b", 1.0))
MLP: Selection = (("mlp", 1.0),)
Modules = Sequence[tuple[int, str]]


def resident(
    cid: str, *places: tuple[int, str], sites: Sequence[LinearSpec] = SITES
) -> ResidentAdapter:
    """Return an adapter of rank 3 on the given (layer, projection) pairs."""
    layout = plan_rank_blocks(sites, dict.fromkeys(places, 3), PAGE_ELEMENTS)
    return ResidentAdapter(cid, layout, list(range(layout.num_pages)))


def make_lora(*, has_augmented: bool, num_blocks: int = 1) -> GraphLora:
    """Return adapters of which a and b change attention; b needs two rank blocks."""
    world = World()
    for cid in ("a", "b"):
        world.directory.add(world.residents[cid])
    world.directory.add(resident("mlp", (0, "up_proj")))
    segmented = decode_work(world.device(), 4, use_pdl=False)
    return GraphLora(
        segmented,
        AugmentedWork(segmented, make_augmented_cache(world, num_blocks))
        if has_augmented
        else None,
    )


def make_segmented(sites: Sequence[LinearSpec], *residents: ResidentAdapter) -> GraphLora:
    directory = DeviceDirectory(
        sites, num_layers=NUM_LAYERS, max_adapters=4, max_blocks=32, device=CPU
    )
    for one in residents:
        directory.add(one)
    device = LoraDevice(
        kernels=lora_segmented,
        directory=directory,
        num_layers=NUM_LAYERS,
        pool=torch.zeros(8, PAGE_ELEMENTS),
        num_sms=1,
    )
    return GraphLora(decode_work(device, 4, use_pdl=False), None)


def covered(lora: GraphLora, mode: LoraMode) -> list[str]:
    step = lora.begin(mode, 2)
    assert isinstance(step, SegmentedWork | AugmentedStep)
    cuts = enumerate(lora.segmented.tables.sites)
    return [cut.shape.name for site, cut in cuts if step.covers(site)]


def test_a_step_is_augmented_if_its_adapters_fit_and_segmented_otherwise() -> None:
    lora = make_lora(has_augmented=True)
    assert lora.modes(2) == [
        AUGMENTED,
        AUGMENTED_ATTENTION,
        SEGMENTED,
        SEGMENTED_ATTENTION,
        BASE_MODE,
    ]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([(), ()], [1, 1], 2, words) == BASE_MODE
    assert lora.fill([A, ()], [1, 1], 4, words) == AUGMENTED_ATTENTION
    assert lora.fill([MLP, ()], [1, 1], 4, words) == AUGMENTED
    assert lora.fill([BOTH], [1], 2, words) == SEGMENTED_ATTENTION
    assert lora.fill([BOTH, MLP], [1, 1], 2, words) == SEGMENTED
    assert lora.begin(BASE_MODE, 2) is None


def test_one_adapter_of_the_mlp_makes_all_sites_augmented() -> None:
    """Catches a site that a graph leaves out, and one that it computes in vain."""
    lora = make_lora(has_augmented=True, num_blocks=4)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) == AUGMENTED
    assert lora.fill([A, BOTH], [1, 2], 4, words) == AUGMENTED_ATTENTION
    assert lora.fill([(("a", 1.0), ("mlp", 0.5)), A], [1, 1], 2, words) == AUGMENTED
    assert set(covered(lora, AUGMENTED_ATTENTION)) == {"qkv", "o"}
    assert set(covered(lora, AUGMENTED)) == {"qkv", "o", "gate_up"}


def make_narrow(num_blocks: int) -> GraphLora:
    lora = make_lora(has_augmented=True, num_blocks=num_blocks)
    assert lora.augmented is not None
    lora.augmented.launch_of = lambda _: AugmentedLaunch(tile_rows=1, narrow_blocks=1)
    return lora


def test_adapters_that_need_few_blocks_compute_no_more_of_them() -> None:
    lora = make_narrow(4)
    assert lora.modes(2) == [
        AUGMENTED,
        NARROW,
        AUGMENTED_ATTENTION,
        SEGMENTED,
        SEGMENTED_ATTENTION,
        BASE_MODE,
    ]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) == AUGMENTED, "they have two blocks"
    assert lora.fill([A], [1], 2, words) == AUGMENTED_ATTENTION
    assert lora.fill([MLP], [1], 2, words) == NARROW
    assert lora.augmented is not None and (0,) in lora.augmented.cache.held.values()
    widths = {AUGMENTED: 4, NARROW: 1, AUGMENTED_ATTENTION: 4}
    for mode, num_blocks in widths.items():
        step = lora.begin(mode, 2)
        assert isinstance(step, AugmentedStep) and step.launch.max_blocks == num_blocks


def test_an_adapter_that_has_to_move_to_the_first_blocks_is_served_where_it_is() -> None:
    """Catches a segmented step although all its adapters are in augmented weights."""
    lora = make_narrow(2)
    assert lora.augmented is not None
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) == AUGMENTED
    lora.augmented.cache.copy_after = 2
    found = [lora.fill([MLP], [1], 2, words) for _ in range(3)]
    assert found == [AUGMENTED, NARROW, NARROW]


def test_augmented_weights_of_few_blocks_have_one_mode() -> None:
    lora = make_narrow(1)
    assert NARROW not in lora.modes(2)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([MLP], [1], 2, words) == AUGMENTED


def test_without_augmented_weights_steps_are_segmented_until_the_list_is_full() -> None:
    lora = make_lora(has_augmented=False)
    assert lora.modes(2) == [SEGMENTED, SEGMENTED_ATTENTION, BASE_MODE]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([MLP], [1], 1, words) == SEGMENTED
    assert lora.fill([A], [1], 1, words) == SEGMENTED_ATTENTION, "the last list does not matter"
    tables = lora.segmented.tables
    lora.segmented.tables = replace(tables, limits=replace(tables.limits, max_items=0))
    assert lora.fill([A], [1], 1, words) is None


@pytest.mark.parametrize(
    ("modules", "mode"),
    [
        ([(0, "q_proj")], SEGMENTED_ATTENTION),
        ([(1, "v_proj"), (0, "o_proj")], SEGMENTED_ATTENTION),
        ([(1, "up_proj")], SEGMENTED),
        ([(0, "q_proj"), (1, "gate_proj")], SEGMENTED),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_one_weight_outside_attention_makes_it_a_step_for_all_sites(
    modules: Modules, mode: LoraMode, is_reversed: bool
) -> None:
    """Catches an MLP that a graph leaves out: alone, in a mix, with two adapters, in a prefill."""
    sites, attention = SITES, SEGMENTED_ATTENTION
    if is_reversed:
        sites, attention = SITES[::-1], replace(attention, sites=("o", "qkv"))
    expected = attention if mode == SEGMENTED_ATTENTION else mode
    some = resident("some", *modules, sites=sites)
    lora = make_segmented(sites, resident("a", (0, "q_proj"), sites=sites), some)
    words = np.zeros(lora.num_words, dtype=np.int32)
    one: Selection = (("some", 1.0),)
    for selections, lengths in (
        ([one], [1]),
        ([(), A, one], [1, 1, 1]),
        ([(("a", 1.0), ("some", 0.25)), A], [1, 1]),
        ([A, one], [1, 3]),
    ):
        assert lora.fill(selections, lengths, 4, words) == expected
    assert lora.fill([A, ()], [1, 1], 4, words) == attention
    assert set(covered(lora, attention)) == {"qkv", "o"}
    assert set(covered(lora, SEGMENTED)) == {"qkv", "o", "gate_up"}


def test_a_step_reads_its_list_from_the_given_buffer() -> None:
    lora = make_lora(has_augmented=False)
    words = torch.zeros(lora.num_words, dtype=torch.int32)
    lora.segmented.read_from(words)
    step = lora.begin(SEGMENTED_ATTENTION, 2)
    assert isinstance(step, SegmentedWork) and step.tables.work is words


def test_a_model_of_attention_sites_only_has_no_attention_mode() -> None:
    lora = make_segmented(SITES[:2], resident("a", (0, "q_proj"), sites=SITES[:2]))
    assert lora.modes(2) == [SEGMENTED, BASE_MODE]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A], [1], 1, words) == SEGMENTED
