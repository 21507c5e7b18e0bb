from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.adapters.packed.dense import plan_dense
from loramux.lora.stacks import LoraStacks
from loramux.memory.pool import PagePool, PageView
from loramux.memory.records import ResidentAdapter
from loramux.types.kv import KVLayout
from loramux.types.model import LinearSpec

SITES = (
    LinearSpec(name="qkv", in_features=4, projections=("q", "k", "v"), out_features=(4, 2, 2)),
    LinearSpec(name="o", in_features=4, projections=("o",), out_features=(4,)),
)
GEOMETRY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=2)
both_ways = pytest.mark.parametrize("in_place", [False, True])


class Shelf:
    """Adapters in pool pages, each with random weights."""

    def __init__(self) -> None:
        self.pool = PagePool(256, GEOMETRY.page_bytes, torch.device("cpu"))
        self.pages = self.pool.view(torch.float32)
        self._next_page = 255
        self.buffers: dict[str, torch.Tensor] = {}

    def adapter(
        self, cid: str, ranks: dict[tuple[int, str], int], *, is_one_run: bool = False
    ) -> ResidentAdapter:
        """Add an adapter; the same CID again gets the same weights in other pages."""
        layout = plan_dense(SITES, ranks)
        num_pages = self.pages.pages_for(layout.num_elements)
        page_ids = list(range(self._next_page, self._next_page - num_pages, -1))
        if is_one_run:
            page_ids.reverse()
        self._next_page -= num_pages
        buffer = self.buffers.setdefault(cid, torch.randn(layout.num_elements))
        self.pool.write(page_ids, buffer)
        return ResidentAdapter(cid=cid, layout=layout, page_ids=page_ids)


def check(stacks: LoraStacks, shelf: Shelf, adapters: list[ResidentAdapter]) -> None:
    placed = stacks.place(adapters)
    found = [cid for stack in placed for cid in stack.slots]
    assert len(found) == len(set(found))
    assert {adapter.cid for adapter in adapters} <= set(found)
    wanted = {adapter.cid: adapter for adapter in adapters}
    for stack in placed:
        for slot, cid in enumerate(stack.slots):
            if cid in wanted:
                buffer = shelf.buffers[cid]
                assert torch.equal(floats_at(int(stack.addresses[slot]), len(buffer)), buffer)
            if cid not in wanted or cid not in stack.copied:
                continue
            for site, place in stack.layout.places.items():
                weights, buffer = stack.weights[site], shelf.buffers[cid]
                size = place.in_features * place.total_rank
                a = buffer[place.a_offset : place.a_offset + size]
                assert torch.equal(weights.a[slot].flatten(), a)
                for piece, expected in zip(weights.slices, place.slices, strict=True):
                    size = expected.rank * expected.out_features
                    b = buffer[expected.offset : expected.offset + size]
                    assert torch.equal(piece.b[slot].flatten(), b)


def floats_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


@both_ways
def test_adapters_of_one_layout_share_a_stack_and_ranks_are_not_padded(in_place: bool) -> None:
    shelf = Shelf()
    small = [shelf.adapter(f"s{i}", {(0, "q"): 1, (0, "o"): 3}) for i in range(3)]
    large = shelf.adapter("l", {(0, "q"): 8, (0, "v"): 8, (1, "o"): 2})
    stacks = LoraStacks(shelf.pages, in_place=in_place)
    check(stacks, shelf, [*small, large])
    placed = stacks.place([*small, large])
    assert [len(stack.slots) for stack in placed] == [3, 1]
    assert placed[0].weights[0, "qkv"].a.shape[2] == 1
    assert (1, "qkv") not in placed[1].weights


@both_ways
def test_stacks_that_no_row_uses_are_freed(in_place: bool) -> None:
    shelf = Shelf()
    first = shelf.adapter("a", {(0, "q"): 4})
    second = shelf.adapter("b", {(0, "o"): 2})
    stacks = LoraStacks(shelf.pages, in_place=in_place)
    stacks.place([first, second])
    both = stacks.num_bytes
    stacks.place([second])
    assert 0 < stacks.num_bytes < both
    stacks.place([])
    assert stacks.num_bytes == 0


@both_ways
def test_adapters_that_join_one_by_one_find_room_in_the_same_stack(in_place: bool) -> None:
    """A new stack means copying all its adapters into memory that must be zeroed first."""
    shelf = Shelf()
    adapters = [shelf.adapter(str(i), {(0, "q"): 2}) for i in range(8)]
    stacks = LoraStacks(shelf.pages, in_place=in_place)
    made = {stacks.place(adapters[: i + 1])[0].storage.data_ptr() for i in range(8)}
    assert len(made) == 1
    check(stacks, shelf, adapters)


@settings(max_examples=60, deadline=None)
@given(
    in_place=st.booleans(),
    steps=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True), min_size=1, max_size=8
    ),
)
def test_any_sequence_of_batches_leaves_each_slot_with_its_own_weights(
    in_place: bool, steps: list[list[int]]
) -> None:
    shelf = Shelf()
    ranks: list[dict[tuple[int, str], int]] = [{(0, "k"): 3}, {(0, "q"): 2, (1, "o"): 1}]
    adapters = [
        shelf.adapter(str(i), ranks[min(1, i % 3)], is_one_run=i % 2 == 0) for i in range(10)
    ]
    stacks = LoraStacks(shelf.pages, in_place=in_place)
    for step in steps:
        check(stacks, shelf, [adapters[i] for i in step])
        num_slots = sum(len(stack.slots) for stack in stacks.place([adapters[i] for i in step]))
        assert in_place or num_slots == len(step)


def test_in_place_adapters_that_stay_or_return_soon_are_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf()
    adapters = [shelf.adapter(str(i), {(0, "q"): 4}) for i in range(5)]
    stacks, num_copies = LoraStacks(shelf.pages, in_place=True), 0
    read = PageView.read

    def count(pages: PageView, page_ids: list[int], out: torch.Tensor) -> None:
        nonlocal num_copies
        num_copies += 1
        read(pages, page_ids, out)

    monkeypatch.setattr(PageView, "read", count)
    for members, copies in [([0, 1, 2, 3], 4), ([3], 4), ([3, 1], 4), ([4, 3], 5), ([3, 4, 2], 5)]:
        check(stacks, shelf, [adapters[i] for i in members])
        assert num_copies == copies
    assert len(stacks.place(adapters[3:])[0].slots) == 4


def test_in_place_only_scattered_adapters_are_copied_and_an_adapter_may_move() -> None:
    shelf = Shelf()
    ranks: dict[tuple[int, str], int] = {(0, "q"): 4}
    whole = shelf.adapter("a", ranks, is_one_run=True)
    scattered = shelf.adapter("b", ranks)
    assert (whole.is_contiguous, scattered.is_contiguous) == (True, False)
    stacks = LoraStacks(shelf.pages, in_place=True)
    check(stacks, shelf, [whole, scattered])
    (stack,) = stacks.place([whole, scattered])
    assert stack.addresses[stack.slots.index("a")] == shelf.pages.address(whole.page_ids[0])
    assert stack.copied == ["", "b"]
    # Both were evicted and have come back to other pages.
    moved = [shelf.adapter("a", ranks), shelf.adapter("b", ranks, is_one_run=True)]
    for adapter in (whole, scattered):
        shelf.pool.clear(adapter.page_ids)
    check(stacks, shelf, moved)
    assert stack.copied == ["a", "b"]
    assert stack.addresses[1] == shelf.pages.address(moved[1].page_ids[0])
