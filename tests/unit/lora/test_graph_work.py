from __future__ import annotations

from dataclasses import replace

import numpy as np

from loramux.lora.device_work import decode_work
from loramux.lora.graph_work import GraphLora, LoraKind
from loramux.lora.tail_work import TailWork
from loramux.types import Selection
from tests.unit.lora.test_device_work import World
from tests.unit.lora.test_tail import make_tail

A: Selection = (("a", 1.0),)
BOTH: Selection = (("a", 0.5), ("b", 1.0))


def make_lora(*, has_tail: bool) -> GraphLora:
    """b needs two blocks of ranks, and the tail has one."""
    world = World()
    for cid in ("a", "b"):
        world.directory.add(world.residents[cid])
    lists = decode_work(world.device(), 4, use_pdl=False)
    return GraphLora(lists, TailWork(lists, make_tail(world, 1)) if has_tail else None)


def test_a_step_takes_the_tail_where_it_can_and_a_list_where_it_must() -> None:
    lora = make_lora(has_tail=True)
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([(), ()], [1, 1], 2, words) is LoraKind.NONE
    assert lora.fill([A, ()], [1, 1], 4, words) is LoraKind.TAIL
    assert lora.fill([BOTH], [1], 2, words) is LoraKind.LISTS
    assert lora.begin(LoraKind.NONE, 2) is None


def test_without_a_tail_there_are_lists_until_they_are_full() -> None:
    lora = make_lora(has_tail=False)
    assert lora.kinds == [LoraKind.LISTS, LoraKind.NONE]
    words = np.zeros(lora.num_words, dtype=np.int32)
    assert lora.fill([A], [1], 1, words) is LoraKind.LISTS
    tables = lora.lists.tables
    lora.lists.tables = replace(tables, limits=replace(tables.limits, max_units=0))
    assert lora.fill([A], [1], 1, words) is None
