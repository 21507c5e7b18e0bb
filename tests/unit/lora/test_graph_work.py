from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loramux.adapters.packed.dense import ATTENTION_SITES, FUSED_PROJECTIONS, Site
from loramux.adapters.packed.paged import plan_groups
from loramux.kernels.gpu.lora_augmented.tables import TailLaunch
from loramux.kernels.reference import lora_segmented as lora_grouped_torch
from loramux.lora.augmented_step import TailStep, TailWork
from loramux.lora.graph_lora import GraphLora, LoraKind
from loramux.lora.segmented import DeviceDirectory, LoraDevice, LoraWork, decode_work
from loramux.memory.records import ResidentAdapter
from loramux.types.request import Selection
from tests.lora_factory import NUM_LAYERS, PAGE_ELEMENTS, SITES
from tests.unit.lora.test_device_work import CPU, World
from tests.unit.lora.test_tail import make_tail

A: Selection = (("a", 1.0),)
BOTH: Selection = (("a", 0.5), ("b", 1.0))
MLP: Selection = (("mlp", 1.0),)
Places = Sequence[tuple[int, str]]


def resident(cid: str, *places: tuple[int, str], sites: Sequence[Site] = SITES) -> ResidentAdapter:
    """Of rank 3 at some projections of some layers."""
    layout = plan_groups(sites, dict.fromkeys(places, 3), PAGE_ELEMENTS)
    return ResidentAdapter(cid, layout, list(range(layout.num_pages)))


def make_lora(*, has_tail: bool, num_blocks: int = 1) -> GraphLora:
    """a and b change attention; b needs two blocks of ranks."""
    world = World()
    for cid in ("a", "b"):
        world.directory.add(world.residents[cid])
    world.directory.add(resident("mlp", (0, "up_proj")))
    lists = decode_work(world.device(), 4, use_pdl=False)
    return GraphLora(lists, TailWork(lists, make_tail(world, num_blocks)) if has_tail else None)


def make_lists(sites: Sequence[Site], *residents: ResidentAdapter) -> GraphLora:
    directory = DeviceDirectory(
        sites, num_layers=NUM_LAYERS, max_adapters=4, max_groups=32, device=CPU
    )
    for one in residents:
        directory.add(one)
    device = LoraDevice(
        kernels=lora_grouped_torch,
        directory=directory,
        num_layers=NUM_LAYERS,
        pool=torch.zeros(8, PAGE_ELEMENTS),
        num_multiprocessors=1,
    )
    return GraphLora(decode_work(device, 4, use_pdl=False), None)


def covered(lora: GraphLora, kind: LoraKind) -> list[str]:
    step = lora.begin(kind, 2)
    assert isinstance(step, LoraWork | TailStep)
    cuts = enumerate(lora.lists.tables.sites)
    return [cut.shape.name for site, cut in cuts if step.covers(site)]


def test_a_step_takes_the_tail_where_it_can_and_a_list_where_it_must() -> None:
    lora = make_lora(has_tail=True)
    assert lora.kinds(2) == [kind for kind in LoraKind if kind is not LoraKind.NARROW_TAIL]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([(), ()], [1, 1], 2, words) is LoraKind.NONE
    assert lora.fill([A, ()], [1, 1], 4, words) is LoraKind.TAIL_ATTENTION
    assert lora.fill([MLP, ()], [1, 1], 4, words) is LoraKind.TAIL
    assert lora.fill([BOTH], [1], 2, words) is LoraKind.ATTENTION
    assert lora.fill([BOTH, MLP], [1, 1], 2, words) is LoraKind.LISTS
    assert lora.begin(LoraKind.NONE, 2) is None


def test_one_adapter_of_the_mlp_makes_it_a_step_for_all_tails() -> None:
    """Catches a tail that a graph leaves out, and one that it computes for nothing."""
    lora = make_lora(has_tail=True, num_blocks=4)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) is LoraKind.TAIL
    assert lora.fill([A, BOTH], [1, 2], 4, words) is LoraKind.TAIL_ATTENTION
    assert lora.fill([(("a", 1.0), ("mlp", 0.5)), A], [1, 1], 2, words) is LoraKind.TAIL
    assert set(covered(lora, LoraKind.TAIL_ATTENTION)) == {"qkv", "o"}
    assert set(covered(lora, LoraKind.TAIL)) == {"qkv", "o", "gate_up"}


def make_narrow(num_blocks: int) -> GraphLora:
    lora = make_lora(has_tail=True, num_blocks=num_blocks)
    assert lora.tail is not None
    lora.tail.launch_of = lambda _: TailLaunch(tile_rows=1, narrow_blocks=1)
    return lora


def test_adapters_that_need_few_blocks_compute_no_more_of_them() -> None:
    lora = make_narrow(4)
    assert lora.kinds(2) == list(LoraKind)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) is LoraKind.TAIL, "they have two blocks"
    assert lora.fill([A], [1], 2, words) is LoraKind.TAIL_ATTENTION
    assert lora.fill([MLP], [1], 2, words) is LoraKind.NARROW_TAIL
    assert lora.tail is not None and (0,) in lora.tail._tail.held.values()
    widths = {LoraKind.TAIL: 4, LoraKind.NARROW_TAIL: 1, LoraKind.TAIL_ATTENTION: 4}
    for kind, num_blocks in widths.items():
        step = lora.begin(kind, 2)
        assert isinstance(step, TailStep) and step.launch.max_blocks == num_blocks


def test_an_adapter_that_has_to_move_to_the_first_blocks_is_served_where_it_is() -> None:
    """Catches a step by lists while the tail has all that it needs."""
    lora = make_narrow(2)
    assert lora.tail is not None
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A, MLP], [1, 1], 2, words) is LoraKind.TAIL
    lora.tail._tail._patience = 2
    found = [lora.fill([MLP], [1], 2, words) for _ in range(3)]
    assert found == [LoraKind.TAIL, LoraKind.NARROW_TAIL, LoraKind.NARROW_TAIL]


def test_a_tail_that_is_narrow_anyway_has_one_width() -> None:
    lora = make_narrow(1)
    assert LoraKind.NARROW_TAIL not in lora.kinds(2)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([MLP], [1], 2, words) is LoraKind.TAIL


def test_without_a_tail_there_are_lists_until_they_are_full() -> None:
    lora = make_lora(has_tail=False)
    assert lora.kinds(2) == [LoraKind.LISTS, LoraKind.ATTENTION, LoraKind.NONE]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([MLP], [1], 1, words) is LoraKind.LISTS
    assert lora.fill([A], [1], 1, words) is LoraKind.ATTENTION, "nothing is left of the last list"
    tables = lora.lists.tables
    lora.lists.tables = replace(tables, limits=replace(tables.limits, max_units=0))
    assert lora.fill([A], [1], 1, words) is None


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ([(0, "q_proj")], LoraKind.ATTENTION),
        ([(1, "v_proj"), (0, "o_proj")], LoraKind.ATTENTION),
        ([(1, "up_proj")], LoraKind.LISTS),
        ([(0, "q_proj"), (1, "gate_proj")], LoraKind.LISTS),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_one_weight_outside_attention_makes_it_a_step_for_all_sites(
    places: Places, kind: LoraKind, is_reversed: bool
) -> None:
    """Catches an MLP that a graph leaves out: alone, beside others, composed, in a prompt."""
    sites = SITES[::-1] if is_reversed else SITES
    some = resident("some", *places, sites=sites)
    lora = make_lists(sites, resident("a", (0, "q_proj"), sites=sites), some)
    words = np.zeros(lora.num_words, dtype=np.int32)
    one: Selection = (("some", 1.0),)
    for selections, lengths in (
        ([one], [1]),
        ([(), A, one], [1, 1, 1]),
        ([(("a", 1.0), ("some", 0.25)), A], [1, 1]),
        ([A, one], [1, 3]),
    ):
        assert lora.fill(selections, lengths, 4, words) is kind
    assert lora.fill([A, ()], [1, 1], 4, words) is LoraKind.ATTENTION
    assert set(covered(lora, LoraKind.ATTENTION)) == {"qkv", "o"}
    assert set(covered(lora, LoraKind.LISTS)) == {"qkv", "o", "gate_up"}


def test_a_step_reads_its_list_where_the_graphs_were_told_to() -> None:
    lora = make_lora(has_tail=False)
    words = torch.zeros(lora.num_words, dtype=torch.int32)
    lora.lists.read_from(words)
    step = lora.begin(LoraKind.ATTENTION, 2)
    assert isinstance(step, LoraWork) and step.tables.work is words


def test_where_all_sites_are_those_of_attention_there_is_nothing_to_leave_out() -> None:
    lora = make_lists(SITES[:2], resident("a", (0, "q_proj"), sites=SITES[:2]))
    assert lora.kinds(2) == [LoraKind.LISTS, LoraKind.NONE]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A], [1], 1, words) is LoraKind.LISTS


def test_the_sites_of_attention_are_sites() -> None:
    """Catches a site with another name, for which no step would ever be of attention alone."""
    assert set(ATTENTION_SITES) < set(FUSED_PROJECTIONS)
