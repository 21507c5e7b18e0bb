from __future__ import annotations

from loramux.kernels import lora_torch
from loramux.kernels.interface import Segment
from loramux.lora.batch import LoraBatch, RowRun, gather_batch
from loramux.lora.stacks import LoraStacks
from tests.unit.lora.test_stacks import Shelf


def make_batch() -> LoraBatch:
    shelf = Shelf()
    adapters = {
        "a": shelf.adapter("a", {(0, "q"): 2}),
        "b": shelf.adapter("b", {(0, "q"): 2}),
        "c": shelf.adapter("c", {(0, "o"): 1, (1, "q"): 1}),
    }
    selections = [(("a", 1.0),), (), (("b", 0.5), ("c", 2.0))]
    batch = gather_batch(selections, adapters, LoraStacks(shelf.pool, has_gaps=False))
    assert batch is not None
    return batch


def test_a_step_of_base_rows_has_no_batch() -> None:
    assert gather_batch([(), ()], {}, LoraStacks(Shelf().pool, has_gaps=False)) is None


def test_rows_of_one_adapter_stand_together_and_base_rows_last() -> None:
    batch = make_batch()
    keys = [batch.order(s) for s in ((("a", 1.0),), (("b", 0.5), ("c", 2.0)), (("c", 2.0),), ())]
    assert len(set(keys)) == 4 and max(keys) == keys[3]
    assert keys[0][0] == keys[1][0] != keys[2][0]


def test_every_adapter_of_a_selection_gets_the_rows_with_its_weight() -> None:
    batch = make_batch()
    runs = [
        RowRun((("a", 1.0),), 0, 2),
        RowRun((("a", 1.0),), 2, 3),
        RowRun((("b", 0.5), ("c", 2.0)), 3, 7),
        RowRun((), 7, 9),
    ]
    batch.set_rows(runs, lora_torch)
    (_, rows), *others = batch.sites[0, "qkv"]
    assert not others
    slot_a, slot_b = batch.order((("a", 1.0),))[1], batch.order((("b", 1.0),))[1]
    assert rows.segments == (Segment(slot_a, 0, 3, 1.0), Segment(slot_b, 3, 7, 0.5))
    assert batch.sites[0, "o"][0][1].segments == (Segment(0, 3, 7, 2.0),)
    assert (1, "o") not in batch.sites
