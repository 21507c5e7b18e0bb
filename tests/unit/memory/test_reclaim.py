from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.reclaim import Reclaimer


@dataclass(eq=False)
class Thing:
    name: str
    page_ids: list[int]
    worth: float
    is_protected: bool = False
    is_idle: bool = False
    parent: Thing | None = None
    """Offered only after this one has left."""


class Shelf:
    """A holder of things; evicting one offers its parent, as a prefix tree does."""

    def __init__(self, pages: PageAllocator, reclaimer: Reclaimer) -> None:
        self.pages = pages
        self.reclaimer = reclaimer
        self.things: dict[str, Thing] = {}
        self.evicted: list[str] = []
        reclaimer.add_holder(self)

    def put(self, name: str, num_pages: int, *, worth: float = 0.0) -> Thing:
        page_ids = self.pages.allocate(("adapter", name), num_pages)
        assert page_ids is not None
        self.things[name] = Thing(name, page_ids, worth)
        return self.things[name]

    def offer(
        self, name: str, *, worth: float, is_protected: bool = False, is_doubted: bool = False
    ) -> None:
        thing = self.things[name]
        thing.worth, thing.is_protected, thing.is_idle = worth, is_protected, True
        self.reclaimer.offer(
            ("adapter", name),
            self,
            worth=worth,
            is_protected=is_protected,
            is_doubted=is_doubted,
        )

    def withdraw(self, name: str) -> None:
        self.things[name].is_idle = False
        self.reclaimer.withdraw(("adapter", name))

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple) and not self.reclaimer.is_offered(key)
        thing = self.things.pop(key[1])
        assert thing.is_idle, "something in use was evicted"
        self.pages.release(("adapter", thing.name), thing.page_ids)
        self.evicted.append(thing.name)
        if thing.parent is not None:
            self.offer(thing.parent.name, worth=thing.parent.worth)

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


def make_shelf(num_pages: int) -> tuple[Shelf, Reclaimer]:
    pages = PageAllocator(num_pages)
    reclaimer = Reclaimer(pages)
    return Shelf(pages, reclaimer), reclaimer


def test_what_is_worth_least_leaves_first_and_no_more_than_must() -> None:
    shelf, reclaimer = make_shelf(4)
    for name, worth in (("best", 3.0), ("worst", -1.0), ("middle", 2.0)):
        shelf.put(name, 1)
        shelf.offer(name, worth=worth)
    assert reclaimer.make_room(1) and shelf.evicted == []
    assert reclaimer.make_room(3) and shelf.evicted == ["worst", "middle"]
    assert reclaimer.num_available == 4
    reclaimer.check_integrity()


def test_two_holders_share_one_order() -> None:
    shelf, reclaimer = make_shelf(4)
    other = Shelf(shelf.pages, reclaimer)
    for place, name, worth in ((shelf, "a", 1.0), (other, "b", 2.0), (shelf, "c", 3.0)):
        place.put(name, 1)
        place.offer(name, worth=worth)
    assert reclaimer.num_available == 4
    assert reclaimer.make_room(3)
    assert (shelf.evicted, other.evicted) == (["a"], ["b"])


def test_without_enough_to_evict_nothing_is_evicted() -> None:
    shelf, reclaimer = make_shelf(4)
    shelf.put("used", 2)
    shelf.put("idle", 1)
    shelf.offer("idle", worth=0.0)
    assert not reclaimer.make_room(3) and shelf.evicted == []
    assert reclaimer.make_room(2) and shelf.evicted == ["idle"]


def test_protected_ones_leave_last_and_may_be_spared() -> None:
    shelf, reclaimer = make_shelf(3)
    shelf.put("waited for", 1)
    shelf.offer("waited for", worth=-9.0, is_protected=True)
    shelf.put("idle", 2)
    shelf.offer("idle", worth=9.0)
    assert (reclaimer.num_available, reclaimer.num_unprotected) == (3, 2)
    assert not reclaimer.make_room(3, spare_protected=True) and shelf.evicted == []
    assert reclaimer.make_room(2, spare_protected=True) and shelf.evicted == ["idle"]
    assert reclaimer.make_room(3) and shelf.evicted == ["idle", "waited for"]


def test_a_new_offer_replaces_the_old_one() -> None:
    shelf, reclaimer = make_shelf(3)
    for name in ("risen", "fallen", "kept"):
        shelf.put(name, 1)
    shelf.offer("risen", worth=0.0)
    shelf.offer("fallen", worth=9.0)
    shelf.offer("kept", worth=5.0)
    shelf.offer("risen", worth=8.0)
    shelf.offer("fallen", worth=1.0)
    assert reclaimer.make_room(2) and shelf.evicted == ["fallen", "kept"]
    reclaimer.check_integrity()


def test_a_withdrawn_offer_is_void_and_can_be_made_again() -> None:
    shelf, reclaimer = make_shelf(2)
    shelf.put("a", 1)
    shelf.put("b", 1)
    shelf.offer("a", worth=0.0)
    shelf.offer("b", worth=5.0)
    shelf.withdraw("a")
    reclaimer.withdraw("never offered")
    assert not reclaimer.is_offered(("adapter", "a")) and reclaimer.is_offered(("adapter", "b"))
    assert reclaimer.make_room(1) and shelf.evicted == ["b"]
    shelf.offer("a", worth=7.0)
    assert reclaimer.make_room(2) and shelf.evicted == ["b", "a"]


def test_what_an_eviction_offers_can_be_the_next_to_leave() -> None:
    shelf, reclaimer = make_shelf(3)
    root = shelf.put("root", 1, worth=1.0)
    leaf = shelf.put("leaf", 1)
    leaf.parent = root
    shelf.put("other", 1)
    shelf.offer("other", worth=2.0)
    shelf.offer("leaf", worth=0.0)
    root.is_idle = True
    assert reclaimer.make_room(2) and shelf.evicted == ["leaf", "root"]


def test_equal_worth_leaves_in_order_of_the_offers_and_keys_are_never_compared() -> None:
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
    reclaimer.offer(("prefix", 1), recorder, worth=1.0)
    reclaimer.offer("text", recorder, worth=1.0)
    assert reclaimer.make_room(2) and pages == [("prefix", 1), "text"]


def test_offers_that_come_and_go_leave_no_garbage() -> None:
    shelf, reclaimer = make_shelf(2)
    shelf.put("a", 1)
    for round_number in range(1000):
        shelf.offer("a", worth=float(round_number))
        shelf.withdraw("a")
    assert len(reclaimer._heap) < 100


def test_doubt_counts_as_it_is_when_room_is_made_and_not_as_it_was_when_offered() -> None:
    shelf, reclaimer = make_shelf(4)
    for name, worth, is_doubted in (("a", 1.0, True), ("b", 2.0, True), ("c", 0.5, False)):
        shelf.put(name, 1)
        shelf.offer(name, worth=worth, is_doubted=is_doubted)
    reclaimer.doubt = lambda: -1.0
    assert reclaimer.make_room(2) and shelf.evicted == ["a"]
    reclaimer.doubt = lambda: -0.1
    assert reclaimer.make_room(3) and shelf.evicted == ["a", "c"]
    assert reclaimer.make_room(4) and shelf.evicted == ["a", "c", "b"]


def test_integrity_check_sees_an_offer_that_can_never_be_reached() -> None:
    shelf, reclaimer = make_shelf(1)
    shelf.put("a", 1)
    shelf.offer("a", worth=0.0)
    reclaimer._heap.clear()
    with pytest.raises(AssertionError, match="in no heap"):
        reclaimer.check_integrity()


names = st.sampled_from("abcdefgh")
worths = st.integers(0, 3).map(float)


class ReclaimMachine(RuleBasedStateMachine):
    """Against a list that is sorted each time."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf, self.reclaimer = make_shelf(12)
        # name -> (is protected, worth, when offered), and those whose worth is in doubt
        self.order: dict[str, tuple[bool, float, int]] = {}
        self.doubted: set[str] = set()
        self.num_offers = 0

    def rank(self, name: str) -> tuple[bool, float, int]:
        is_protected, worth, tick = self.order[name]
        return is_protected, worth + (name in self.doubted) * self.reclaimer.doubt(), tick

    @rule(doubt=st.integers(-2, 0).map(float))
    def change_doubt(self, doubt: float) -> None:
        self.reclaimer.doubt = lambda: doubt

    @rule(name=names, num_pages=st.integers(1, 3))
    def put(self, name: str, num_pages: int) -> None:
        if name not in self.shelf.things and self.shelf.pages.num_free >= num_pages:
            self.shelf.put(name, num_pages)

    @rule(name=names, worth=worths, is_protected=st.booleans(), is_doubted=st.booleans())
    def offer(self, name: str, worth: float, is_protected: bool, is_doubted: bool) -> None:
        if name in self.shelf.things:
            self.shelf.offer(name, worth=worth, is_protected=is_protected, is_doubted=is_doubted)
            (self.doubted.add if is_doubted else self.doubted.discard)(name)
            self.num_offers += 1
            self.order[name] = (is_protected, worth, self.num_offers)

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        if name in self.shelf.things:
            self.shelf.withdraw(name)
            self.order.pop(name, None)

    @rule(num_pages=st.integers(0, 13), spare_protected=st.booleans())
    def make_room(self, num_pages: int, spare_protected: bool) -> None:
        free = self.shelf.pages.num_free
        expected = []
        for name in sorted(self.order, key=self.rank):
            if free >= num_pages or (spare_protected and self.order[name][0]):
                break
            expected.append(name)
            free += len(self.shelf.things[name].page_ids)
        self.shelf.evicted.clear()
        possible = free >= num_pages
        made = self.reclaimer.make_room(num_pages, spare_protected=spare_protected)
        assert made == possible
        assert self.shelf.evicted == (expected if possible else [])
        for name in self.shelf.evicted:
            del self.order[name]

    @invariant()
    def offers_and_pages_are_accounted_for(self) -> None:
        self.reclaimer.check_integrity()
        claims: dict[Owner, list[int]] = {
            ("adapter", name): thing.page_ids for name, thing in self.shelf.things.items()
        }
        self.shelf.pages.check_integrity(claims)
        for name in "abcdefgh":
            assert self.reclaimer.is_offered(("adapter", name)) == (name in self.order)


TestReclaimMachine = ReclaimMachine.TestCase
TestReclaimMachine.settings = settings(max_examples=60, deadline=None)
