from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.reclaim import Reclaimer


@dataclass(eq=False)
class Thing:
    name: str
    page_ids: list[int]
    score: float
    is_protected: bool = False
    is_idle: bool = False
    parent: Thing | None = None
    """Becomes a candidate when this one is evicted."""


class Shelf:
    """A page holder; evicting a thing makes its parent a candidate, as in a prefix tree."""

    def __init__(self, pages: PageAllocator, reclaimer: Reclaimer) -> None:
        self.pages = pages
        self.reclaimer = reclaimer
        self.things: dict[str, Thing] = {}
        self.evicted: list[str] = []
        reclaimer.add_holder(self)

    def put(self, name: str, num_pages: int, *, score: float = 0.0) -> Thing:
        page_ids = self.pages.allocate(("adapter", name), num_pages)
        assert page_ids is not None
        self.things[name] = Thing(name, page_ids, score)
        return self.things[name]

    def add(
        self, name: str, *, score: float, is_protected: bool = False, is_single_use: bool = False
    ) -> None:
        thing = self.things[name]
        thing.score, thing.is_protected, thing.is_idle = score, is_protected, True
        self.reclaimer.add_candidate(
            ("adapter", name),
            self,
            score=score,
            is_protected=is_protected,
            is_single_use=is_single_use,
        )

    def remove(self, name: str) -> None:
        self.things[name].is_idle = False
        self.reclaimer.remove_candidate(("adapter", name))

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple) and not self.reclaimer.is_candidate(key)
        thing = self.things.pop(key[1])
        assert thing.is_idle, "something in use was evicted"
        self.pages.release(("adapter", thing.name), thing.page_ids)
        self.evicted.append(thing.name)
        if thing.parent is not None:
            self.add(thing.parent.name, score=thing.parent.score)

    @property
    def num_idle_pages(self) -> int:
        return sum(len(thing.page_ids) for thing in self.things.values() if thing.is_idle)

    @property
    def num_protected_pages(self) -> int:
        return sum(
            len(thing.page_ids)
            for thing in self.things.values()
            if thing.is_idle and thing.is_protected
        )


def make_shelf(
    num_pages: int, penalty: Callable[[], float] = lambda: 0.0
) -> tuple[Shelf, Reclaimer]:
    pages = PageAllocator(num_pages)
    reclaimer = Reclaimer(pages, single_use_penalty=penalty)
    return Shelf(pages, reclaimer), reclaimer


def test_the_lowest_score_is_evicted_first_and_no_more_than_necessary() -> None:
    shelf, reclaimer = make_shelf(4)
    for name, score in (("best", 3.0), ("worst", -1.0), ("middle", 2.0)):
        shelf.put(name, 1)
        shelf.add(name, score=score)
    assert reclaimer.reclaim(1) and shelf.evicted == []
    assert reclaimer.reclaim(3) and shelf.evicted == ["worst", "middle"]
    assert reclaimer.num_available == 4
    reclaimer.check_integrity()


def test_two_holders_share_one_order() -> None:
    shelf, reclaimer = make_shelf(4)
    other = Shelf(shelf.pages, reclaimer)
    for place, name, score in ((shelf, "a", 1.0), (other, "b", 2.0), (shelf, "c", 3.0)):
        place.put(name, 1)
        place.add(name, score=score)
    assert reclaimer.num_available == 4
    assert reclaimer.reclaim(3)
    assert (shelf.evicted, other.evicted) == (["a"], ["b"])


def test_without_enough_to_evict_nothing_is_evicted() -> None:
    shelf, reclaimer = make_shelf(4)
    shelf.put("used", 2)
    shelf.put("idle", 1)
    shelf.add("idle", score=0.0)
    assert not reclaimer.reclaim(3) and shelf.evicted == []
    assert reclaimer.reclaim(2) and shelf.evicted == ["idle"]


def test_protected_candidates_are_evicted_last() -> None:
    shelf, reclaimer = make_shelf(3)
    shelf.put("awaited", 1)
    shelf.add("awaited", score=-9.0, is_protected=True)
    shelf.put("idle", 2)
    shelf.add("idle", score=9.0)
    assert (reclaimer.num_available, reclaimer.num_unprotected) == (3, 2)
    assert reclaimer.reclaim(2) and shelf.evicted == ["idle"]
    assert reclaimer.reclaim(3) and shelf.evicted == ["idle", "awaited"]


def test_a_new_score_replaces_the_old_one() -> None:
    shelf, reclaimer = make_shelf(3)
    for name in ("risen", "fallen", "kept"):
        shelf.put(name, 1)
    shelf.add("risen", score=0.0)
    shelf.add("fallen", score=9.0)
    shelf.add("kept", score=5.0)
    shelf.add("risen", score=8.0)
    shelf.add("fallen", score=1.0)
    assert reclaimer.reclaim(2) and shelf.evicted == ["fallen", "kept"]
    reclaimer.check_integrity()


def test_a_removed_candidate_is_not_evicted_and_can_be_added_again() -> None:
    shelf, reclaimer = make_shelf(2)
    shelf.put("a", 1)
    shelf.put("b", 1)
    shelf.add("a", score=0.0)
    shelf.add("b", score=5.0)
    shelf.remove("a")
    reclaimer.remove_candidate("never added")
    assert not reclaimer.is_candidate(("adapter", "a")) and reclaimer.is_candidate(("adapter", "b"))
    assert reclaimer.reclaim(1) and shelf.evicted == ["b"]
    shelf.add("a", score=7.0)
    assert reclaimer.reclaim(2) and shelf.evicted == ["b", "a"]


def test_a_candidate_that_an_eviction_adds_can_be_evicted_next() -> None:
    shelf, reclaimer = make_shelf(3)
    root = shelf.put("root", 1, score=1.0)
    leaf = shelf.put("leaf", 1)
    leaf.parent = root
    shelf.put("other", 1)
    shelf.add("other", score=2.0)
    shelf.add("leaf", score=0.0)
    root.is_idle = True
    assert reclaimer.reclaim(2) and shelf.evicted == ["leaf", "root"]


def test_equal_scores_are_evicted_in_order_of_addition_and_keys_are_never_compared() -> None:
    shelf, reclaimer = make_shelf(2)
    pages: list[Hashable] = []

    class Recorder:
        num_idle_pages = 2
        num_protected_pages = 0

        def evict(self, key: Hashable) -> None:
            pages.append(key)
            shelf.pages.release(("kv", 0), [held.pop()])

    held = shelf.pages.allocate(("kv", 0), 2)
    assert held is not None
    recorder = Recorder()
    reclaimer.add_holder(recorder)
    reclaimer.add_candidate(("prefix", 1), recorder, score=1.0)
    reclaimer.add_candidate("text", recorder, score=1.0)
    assert reclaimer.reclaim(2) and pages == [("prefix", 1), "text"]


def test_stale_heap_entries_are_removed() -> None:
    shelf, reclaimer = make_shelf(2)
    shelf.put("a", 1)
    for round_number in range(1000):
        shelf.add("a", score=float(round_number))
        shelf.remove("a")
    assert len(reclaimer._heap) < 100


def test_the_single_use_penalty_is_the_one_at_the_time_of_the_eviction() -> None:
    penalty = 0.0
    shelf, reclaimer = make_shelf(4, lambda: penalty)
    for name, score, is_single_use in (("a", 1.0, True), ("b", 2.0, True), ("c", 0.5, False)):
        shelf.put(name, 1)
        shelf.add(name, score=score, is_single_use=is_single_use)
    penalty = -1.0
    assert reclaimer.reclaim(2) and shelf.evicted == ["a"]
    penalty = -0.1
    assert reclaimer.reclaim(3) and shelf.evicted == ["a", "c"]
    assert reclaimer.reclaim(4) and shelf.evicted == ["a", "c", "b"]


def test_the_integrity_check_finds_a_candidate_that_is_in_no_heap() -> None:
    shelf, reclaimer = make_shelf(1)
    shelf.put("a", 1)
    shelf.add("a", score=0.0)
    reclaimer._heap.clear()
    with pytest.raises(AssertionError, match="in no heap"):
        reclaimer.check_integrity()


names = st.sampled_from("abcdefgh")
scores = st.integers(0, 3).map(float)


class ReclaimMachine(RuleBasedStateMachine):
    """Compares the reclaimer with a list that is sorted each time."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = 0.0
        self.shelf, self.reclaimer = make_shelf(12, lambda: self.penalty)
        # name -> (is protected, score, order of addition), and the names with the penalty
        self.order: dict[str, tuple[bool, float, int]] = {}
        self.single_use: set[str] = set()
        self.num_additions = 0

    def rank(self, name: str) -> tuple[bool, float, int]:
        is_protected, score, tick = self.order[name]
        return is_protected, score + (name in self.single_use) * self.penalty, tick

    @rule(penalty=st.integers(-2, 0).map(float))
    def change_penalty(self, penalty: float) -> None:
        self.penalty = penalty

    @rule(name=names, num_pages=st.integers(1, 3))
    def put(self, name: str, num_pages: int) -> None:
        if name not in self.shelf.things and self.shelf.pages.num_free >= num_pages:
            self.shelf.put(name, num_pages)

    @rule(name=names, score=scores, is_protected=st.booleans(), is_single_use=st.booleans())
    def add(self, name: str, score: float, is_protected: bool, is_single_use: bool) -> None:
        if name in self.shelf.things:
            self.shelf.add(
                name, score=score, is_protected=is_protected, is_single_use=is_single_use
            )
            (self.single_use.add if is_single_use else self.single_use.discard)(name)
            self.num_additions += 1
            self.order[name] = (is_protected, score, self.num_additions)

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.shelf.things:
            self.shelf.remove(name)
            self.order.pop(name, None)

    @rule(num_pages=st.integers(0, 13))
    def reclaim(self, num_pages: int) -> None:
        free = self.shelf.pages.num_free
        expected = []
        for name in sorted(self.order, key=self.rank):
            if free >= num_pages:
                break
            expected.append(name)
            free += len(self.shelf.things[name].page_ids)
        self.shelf.evicted.clear()
        possible = free >= num_pages
        made = self.reclaimer.reclaim(num_pages)
        assert made == possible
        assert self.shelf.evicted == (expected if possible else [])
        for name in self.shelf.evicted:
            del self.order[name]

    @invariant()
    def candidates_and_pages_are_accounted_for(self) -> None:
        self.reclaimer.check_integrity()
        claims: dict[Owner, list[int]] = {
            ("adapter", name): thing.page_ids for name, thing in self.shelf.things.items()
        }
        self.shelf.pages.check_integrity(claims)
        for name in "abcdefgh":
            assert self.reclaimer.is_candidate(("adapter", name)) == (name in self.order)


TestReclaimMachine = ReclaimMachine.TestCase
