from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.kernels.ops import Segment
from loramux.kernels.reference import lora as lora_torch
from loramux.lora.batch import LoraBatch, RowRun, gather_batch
from loramux.lora.stacks import LoraStacks, SiteKey, Stack
from loramux.types.request import Selection
from tests.unit.lora.test_stacks import Shelf

RANKS = {
    "a": {(0, "q"): 2, (0, "o"): 1},
    "b": {(0, "q"): 2, (0, "o"): 1},
    "c": {(0, "o"): 3},
    "d": {(0, "q"): 4},
}
SELECTIONS: list[Selection] = [
    (),
    (("a", 1.0),),
    (("b", 0.5),),
    (("c", 2.0),),
    (("d", 1.0),),
    (("a", 0.25), ("b", 0.75)),
    (("c", 1.5), ("a", 1.0), ("d", 0.5)),
]


def make_batch() -> LoraBatch:
    shelf = Shelf()
    adapters = {
        "a": shelf.adapter("a", {(0, "q"): 2}),
        "b": shelf.adapter("b", {(0, "q"): 2}),
        "c": shelf.adapter("c", {(0, "o"): 1, (1, "q"): 1}),
    }
    selections = [(("a", 1.0),), (), (("b", 0.5), ("c", 2.0))]
    batch = gather_batch(selections, adapters, LoraStacks(shelf.pages, in_place=False))
    assert batch is not None
    return batch


def test_a_step_of_base_rows_has_no_batch() -> None:
    assert gather_batch([(), ()], {}, LoraStacks(Shelf().pages, in_place=False)) is None


def test_rows_of_one_adapter_are_adjacent_and_base_rows_come_last() -> None:
    batch = make_batch()
    both: Selection = (("b", 0.5), ("c", 2.0))
    selections: list[Selection] = [(), both, (("a", 1.0),), (("b", 0.5),), (("c", 2.0),), both, ()]
    ordered = sorted(selections, key=batch.order)
    assert ordered[-2:] == [(), ()]
    at = ordered.index(both)
    assert ordered[at - 1 : at + 2] == [(("b", 0.5),), both, both]


def slot_of(batch: LoraBatch, cid: str) -> int:
    return batch.order(((cid, 1.0),))[1][0][1]


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
    slot_a, slot_b = slot_of(batch, "a"), slot_of(batch, "b")
    assert rows.segments == (Segment(slot_a, 0, 3, 1.0), Segment(slot_b, 3, 7, 0.5))
    assert batch.sites[0, "o"][0][1].segments == (Segment(0, 3, 7, 2.0),)
    assert (1, "o") not in batch.sites


def test_sequences_of_one_sum_are_one_segment_for_each_adapter() -> None:
    batch = make_batch()
    both = (("a", 1.0), ("b", 0.5))
    batch.set_rows(runs_of([(both, 1), (both, 2), (both, 1), ((("a", 1.0),), 1)]), lora_torch)
    ((_, rows),) = batch.sites[0, "qkv"]
    slot_a, slot_b = slot_of(batch, "a"), slot_of(batch, "b")
    assert rows.segments == (
        Segment(slot_a, 0, 4, 1.0),
        Segment(slot_b, 0, 4, 0.5),
        Segment(slot_a, 4, 5, 1.0),
    )


def runs_of(sequences: list[tuple[Selection, int]]) -> list[RowRun]:
    runs: list[RowRun] = []
    for selection, num_rows in sequences:
        start = runs[-1].stop if runs else 0
        runs.append(RowRun(selection, start, start + num_rows))
    return runs


def used(batch: LoraBatch, stacks: list[Stack], site: SiteKey) -> list[tuple[int, str, float]]:
    """(row, adapter, weight) of everything that the site adds."""
    return sorted(
        (row, stack.slots[segment.slot], segment.weight)
        for weights, rows in batch.sites.get(site, [])
        for stack in stacks
        if stack.weights.get(site) is weights
        for segment in rows.segments
        for row in range(segment.start, segment.stop)
    )


def expected(
    selections: list[Selection], stacks: list[Stack], site: SiteKey
) -> list[tuple[int, str, float]]:
    touching = {cid for stack in stacks if site in stack.weights for cid in stack.slots}
    return sorted(
        (row, cid, weight)
        for row, selection in enumerate(selections)
        for cid, weight in selection
        if cid in touching
    )


@settings(max_examples=80)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from(SELECTIONS), st.integers(1, 4)), min_size=1, max_size=6
    ),
    draw=st.data(),
)
def test_every_kept_row_has_its_adapters_and_other_sites_have_all_rows(
    sequences: list[tuple[Selection, int]], draw: st.DataObject
) -> None:
    shelf, runs = Shelf(), runs_of(sequences)
    selections = [selection for selection, count in sequences for _ in range(count)]
    rows = draw.draw(st.lists(st.integers(0, len(selections) - 1), unique=True))
    cids = sorted({cid for selection in selections for cid, _ in selection})
    stacks = LoraStacks(shelf.pages, in_place=False).place(
        [shelf.adapter(cid, RANKS[cid]) for cid in cids]
    )
    batch = LoraBatch(stacks)
    batch.set_rows(runs, lora_torch)
    batch.keep_rows(rows, [(0, "o")], lora_torch)
    kept = [selections[row] for row in rows]
    assert used(batch, stacks, (0, "o")) == expected(kept, stacks, (0, "o"))
    assert used(batch, stacks, (0, "qkv")) == expected(selections, stacks, (0, "qkv"))


def test_kept_rows_that_become_adjacent_are_one_segment() -> None:
    """Each segment reads its adapter again."""
    batch = make_batch()
    both = (("b", 0.5), ("c", 2.0))
    sequences: list[tuple[Selection, int]] = [((("a", 1.0),), 5), ((("a", 1.0),), 4), (both, 6)]
    batch.set_rows(runs_of(sequences), lora_torch)
    batch.keep_rows([4, 8, 11, 14], [(0, "qkv"), (0, "o"), (1, "o")], lora_torch)
    slot_a, slot_b = slot_of(batch, "a"), slot_of(batch, "b")
    ((_, rows),) = batch.sites[0, "qkv"]
    assert rows.segments == (Segment(slot_a, 0, 2, 1.0), Segment(slot_b, 2, 4, 0.5))
    ((_, rows),) = batch.sites[0, "o"]
    assert rows.segments == (Segment(0, 2, 4, 2.0),)
    assert not batch.sites[1, "o"]


def test_a_stack_of_which_no_row_is_kept_adds_nothing() -> None:
    batch = make_batch()
    batch.set_rows(runs_of([((("a", 1.0),), 2), ((("c", 1.0),), 2)]), lora_torch)
    batch.keep_rows([3], [(0, "qkv"), (0, "o")], lora_torch)
    assert not batch.sites[0, "qkv"] and len(batch.sites[0, "o"]) == 1
    batch.keep_rows([], [(0, "qkv"), (0, "o")], lora_torch)
    assert not batch.sites[0, "qkv"] and not batch.sites[0, "o"]


@settings(max_examples=40)
@given(
    batches=st.tuples(
        *(st.lists(st.sampled_from(SELECTIONS), min_size=1, max_size=6) for _ in range(3))
    )
)
def test_the_adapters_of_a_row_are_added_in_one_order_in_every_batch(
    batches: tuple[list[Selection], ...],
) -> None:
    """The rounding of a sum depends on its order."""
    shelf = Shelf()
    adapters = {cid: shelf.adapter(cid, ranks) for cid, ranks in RANKS.items()}
    stacks = LoraStacks(shelf.pages, in_place=False)
    orders: dict[tuple[Selection, SiteKey], list[str]] = {}
    for selections in batches:
        batch = gather_batch(selections, adapters, stacks)
        if batch is None:
            continue
        ordered = sorted(selections, key=batch.order)
        batch.set_rows(runs_of([(selection, 1) for selection in ordered]), lora_torch)
        placed = stacks.place([adapters[cid] for cid in dict(s for x in selections for s in x)])
        for site, entries in batch.sites.items():
            for row, selection in enumerate(ordered):
                added = [
                    stack.slots[segment.slot]
                    for weights, rows in entries
                    for stack in placed
                    if stack.weights.get(site) is weights
                    for segment in rows.segments
                    if segment.start <= row < segment.stop
                ]
                assert orders.setdefault((selection, site), added) == added
