from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loramux.memory.pages import PageAllocator


def test_too_large_an_allocation_takes_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(("kv", 1), 5) is None
    assert pages.num_free == 4


def test_pages_that_were_given_back_come_in_order_again() -> None:
    """Catches an adapter that is copied page by page because its pages run backwards."""
    pages = PageAllocator(4)
    held = pages.allocate(("adapter", "a"), 4)
    assert held == [0, 1, 2, 3]
    pages.release(("adapter", "a"), held)
    assert pages.allocate(("adapter", "b"), 4) == [0, 1, 2, 3]


def test_a_page_cannot_be_released_by_a_stranger_or_twice() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(("kv", 1), 2)
    assert held is not None
    with pytest.raises(AssertionError, match="belongs to"):
        pages.release(("kv", 2), held)
    pages.release(("kv", 1), held)
    with pytest.raises(AssertionError, match="belongs to"):
        pages.release(("kv", 1), held)


def test_a_page_passes_from_its_owner_to_another_and_stays_in_use() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(("kv", 1), 3)
    assert held is not None
    pages.transfer(held[:2], ("kv", 1), ("prefix", 5))
    assert pages.num_free == 1
    pages.check_integrity({("kv", 1): held[2:], ("prefix", 5): held[:2]})
    with pytest.raises(AssertionError, match="belongs to"):
        pages.release(("kv", 1), held[:1])
    pages.release(("prefix", 5), held[:2])
    assert pages.num_free == 3


def test_pages_that_an_in_flight_step_may_read_are_allocated_last() -> None:
    pages = PageAllocator(4)
    held = pages.allocate_for_load(("adapter", "x"), 2)
    assert held == [0, 1]
    pages.step_launched()
    pages.release(("adapter", "x"), held)
    assert not pages.is_quiescent([0]) and pages.is_quiescent([2, 3])
    assert pages.allocate_for_load(("adapter", "a"), 1) == [2]
    taken = pages.allocate_for_load(("adapter", "b"), 2)
    assert taken is not None and 3 in taken and not pages.is_quiescent(taken)
    pages.step_finished()
    assert pages.is_quiescent(range(4))
    assert pages.allocate_for_load(("adapter", "c"), 2) is None
    pages.check_integrity({("adapter", "a"): [2], ("adapter", "b"): taken})


def test_adapters_get_neighbouring_pages_while_blocks_come_and_go() -> None:
    pages = PageAllocator(40)
    blocks: list[int] = []
    for number in range(4):
        blocks += pages.allocate(("kv", 1), 1) or []
        held = pages.allocate_for_load(("adapter", str(number)), 5)
        assert held == list(range(5 * number, 5 * number + 5))
        pages.release(("kv", 1), [blocks.pop(0)])
        blocks += pages.allocate(("kv", 1), 2) or []
    pages.release(("adapter", "1"), range(5, 10))
    assert pages.allocate_for_load(("adapter", "4"), 5) == [5, 6, 7, 8, 9]


def test_a_page_that_is_free_or_a_strangers_cannot_be_passed_on() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(("kv", 1), 1)
    assert held is not None
    with pytest.raises(AssertionError, match="belongs to"):
        pages.transfer(held, ("kv", 2), ("prefix", 5))
    pages.release(("kv", 1), held)
    with pytest.raises(AssertionError, match="belongs to None"):
        pages.transfer(held, ("kv", 1), ("prefix", 5))
    pages.check_integrity({})


def test_kinds_follow_the_owners_of_pages() -> None:
    pages = PageAllocator(6)
    assert pages.kinds() == b"......"
    held = pages.allocate(("kv", 1), 3)
    assert held == [3, 4, 5] and pages.allocate_for_load(("adapter", "a"), 1) == [0]
    pages.transfer(held[:1], ("kv", 1), ("prefix", 5))
    assert pages.kinds() == b"a..pkk"
    pages.release(("kv", 1), held[1:])
    pages.release(("adapter", "a"), [0])
    assert pages.kinds() == b"...p.."
    pages.check_integrity({("prefix", 5): [3]})


def test_integrity_check_sees_a_forgotten_claim_and_a_double_claim() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(("adapter", "x"), 2)
    assert held is not None
    pages.check_integrity({("adapter", "x"): held})
    with pytest.raises(AssertionError, match="claims differ"):
        pages.check_integrity({("adapter", "x"): held[:1]})
    with pytest.raises(AssertionError, match="page"):
        pages.check_integrity({("adapter", "x"): held, ("kv", 1): held[:1]})


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(16)
        self.held: dict[tuple[str, int | str], list[int]] = {}

    @rule(owner=st.integers(0, 5), count=st.integers(0, 9))
    def allocate(self, owner: int, count: int) -> None:
        free = self.pages.num_free
        page_ids = self.pages.allocate(("kv", owner), count)
        assert (page_ids is None) == (count > free)
        self.held.setdefault(("kv", owner), []).extend(page_ids or [])

    @rule(owner=st.integers(0, 5), keep=st.integers(0, 3))
    def release(self, owner: int, keep: int) -> None:
        held = self.held.get(("kv", owner), [])
        self.pages.release(("kv", owner), held[keep:])
        del held[keep:]

    @rule(owner=st.integers(0, 5), heir=st.integers(0, 5), keep=st.integers(0, 3))
    def transfer(self, owner: int, heir: int, keep: int) -> None:
        held = self.held.get(("kv", owner), [])
        given = held[keep:]
        self.pages.transfer(given, ("kv", owner), ("kv", heir))
        del held[keep:]
        self.held.setdefault(("kv", heir), []).extend(given)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pages.check_integrity(self.held)


TestAllocatorMachine = AllocatorMachine.TestCase
