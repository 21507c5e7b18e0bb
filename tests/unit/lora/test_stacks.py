from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.layout import Site, plan_layout
from loramux.lora.stacks import LoraStacks
from loramux.memory.pool import KVGeometry, PagePool
from loramux.memory.records import ResidentAdapter

SITES = (
    Site(name="qkv", in_features=4, projections=("q", "k", "v"), out_features=(4, 2, 2)),
    Site(name="o", in_features=4, projections=("o",), out_features=(4,)),
)
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
both_ways = pytest.mark.parametrize("has_gaps", [False, True])


class Shelf:
    """Adapters that already stand in pool pages, each filled with numbers of its own."""

    def __init__(self) -> None:
        self.pool = PagePool(
            num_pages=256, geometry=GEOMETRY, dtype=torch.float32, device=torch.device("cpu")
        )
        self._next_page = 255
        self.buffers: dict[str, torch.Tensor] = {}

    def adapter(self, cid: str, ranks: dict[tuple[int, str], int]) -> ResidentAdapter:
        layout = plan_layout(SITES, ranks)
        num_pages = self.pool.pages_for_elements(layout.num_elements)
        page_ids = list(range(self._next_page, self._next_page - num_pages, -1))
        self._next_page -= num_pages
        self.buffers[cid] = torch.randn(layout.num_elements)
        self.pool.write(page_ids, self.buffers[cid])
        return ResidentAdapter(cid=cid, layout=layout, page_ids=page_ids)


def check(stacks: LoraStacks, shelf: Shelf, adapters: list[ResidentAdapter]) -> None:
    placed = stacks.place(adapters)
    found = [cid for stack in placed for cid in stack.slots]
    assert len(found) == len(set(found))
    assert {adapter.cid for adapter in adapters} <= set(found)
    for stack in placed:
        for slot, cid in enumerate(stack.slots):
            for site, place in stack.layout.places.items():
                weights, buffer = stack.weights[site], shelf.buffers[cid]
                size = place.in_features * place.total_rank
                a = buffer[place.a_offset : place.a_offset + size]
                assert torch.equal(weights.a[slot].flatten(), a)
                check_rows(weights.a, weights.a_rows, slot)
                for piece, expected in zip(weights.slices, place.slices, strict=True):
                    size = expected.rank * expected.out_features
                    b = buffer[expected.offset : expected.offset + size]
                    assert torch.equal(piece.b[slot].flatten(), b)
                    check_rows(piece.b, piece.b_rows, slot)


def check_rows(matrices: torch.Tensor, rows: torch.Tensor | None, slot: int) -> None:
    """Seen as rows of one matrix, a slot has the same weights."""
    distance, rest = divmod(matrices.stride(0), matrices.shape[2])
    assert (rows is None) == (rest != 0)
    if rows is not None:
        first = slot * distance
        assert torch.equal(rows[first : first + matrices.shape[1]], matrices[slot])


@both_ways
def test_adapters_of_one_layout_share_a_stack_and_ranks_are_not_padded(has_gaps: bool) -> None:
    shelf = Shelf()
    small = [shelf.adapter(f"s{i}", {(0, "q"): 1, (0, "o"): 3}) for i in range(3)]
    large = shelf.adapter("l", {(0, "q"): 8, (0, "v"): 8, (1, "o"): 2})
    stacks = LoraStacks(shelf.pool, has_gaps=has_gaps)
    check(stacks, shelf, [*small, large])
    placed = stacks.place([*small, large])
    assert [len(stack.slots) for stack in placed] == [3, 1]
    assert placed[0].weights[0, "qkv"].a.shape[2] == 1
    assert (1, "qkv") not in placed[1].weights


@both_ways
def test_what_no_row_uses_gives_its_memory_back(has_gaps: bool) -> None:
    shelf = Shelf()
    first = shelf.adapter("a", {(0, "q"): 4})
    second = shelf.adapter("b", {(0, "o"): 2})
    stacks = LoraStacks(shelf.pool, has_gaps=has_gaps)
    stacks.place([first, second])
    both = stacks.num_bytes
    stacks.place([second])
    assert 0 < stacks.num_bytes < both
    stacks.place([])
    assert stacks.num_bytes == 0


@both_ways
def test_adapters_that_join_one_by_one_find_room_in_the_same_stack(has_gaps: bool) -> None:
    """To make a stack again is to copy all its adapters into memory that must be cleared first."""
    shelf = Shelf()
    adapters = [shelf.adapter(str(i), {(0, "q"): 2}) for i in range(8)]
    stacks = LoraStacks(shelf.pool, has_gaps=has_gaps)
    made = {stacks.place(adapters[: i + 1])[0].storage.data_ptr() for i in range(8)}
    assert len(made) == 1
    check(stacks, shelf, adapters)


@settings(max_examples=60, deadline=None)
@given(
    has_gaps=st.booleans(),
    steps=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True), min_size=1, max_size=8
    ),
)
def test_any_coming_and_going_leaves_each_slot_with_its_own_weights(
    has_gaps: bool, steps: list[list[int]]
) -> None:
    shelf = Shelf()
    adapters = [
        shelf.adapter(str(i), {(0, "q"): 2, (1, "o"): 1} if i % 3 else {(0, "k"): 3})
        for i in range(10)
    ]
    stacks = LoraStacks(shelf.pool, has_gaps=has_gaps)
    for step in steps:
        check(stacks, shelf, [adapters[i] for i in step])
        num_slots = sum(len(stack.slots) for stack in stacks.place([adapters[i] for i in step]))
        assert has_gaps or num_slots == len(step)


def test_with_gaps_who_stays_is_never_copied_again_and_who_comes_back_soon_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf()
    adapters = [shelf.adapter(str(i), {(0, "q"): 2}) for i in range(5)]
    stacks, num_copies = LoraStacks(shelf.pool, has_gaps=True), 0
    read = PagePool.read

    def count(pool: PagePool, page_ids: list[int], out: torch.Tensor) -> None:
        nonlocal num_copies
        num_copies += 1
        read(pool, page_ids, out)

    monkeypatch.setattr(PagePool, "read", count)
    for members, copies in [([0, 1, 2, 3], 4), ([3], 4), ([3, 1], 4), ([4, 3], 5), ([3, 4, 2], 5)]:
        check(stacks, shelf, [adapters[i] for i in members])
        assert num_copies == copies
    assert len(stacks.place(adapters[3:])[0].slots) == 4
