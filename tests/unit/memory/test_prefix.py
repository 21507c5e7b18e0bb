from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

import pytest

from loramux.memory.pages import Owner
from loramux.memory.policies import CostAwarePolicy
from loramux.memory.prefix import PrefixCache, PrefixKey, PrefixLease, ReuseEstimator
from loramux.memory.records import ResidentAdapter
from tests.memory_factory import layout_of_rank, tiny_tier

BLOCK = 4
KEY: PrefixKey = ("base", (("cid-a", 1.0),), "")
BASE: PrefixKey = ("base", (), "")


class Bench:
    """A cache over a small pool, and sequences that run through it."""

    def __init__(self, num_pages: int = 16) -> None:
        reuse = ReuseEstimator(num_pages)
        self.tier = tiny_tier(num_pages, CostAwarePolicy(half_life_s=8.0), reuse=reuse)
        self.pages = self.tier.pages
        self.reclaimer = self.tier.reclaimer
        self.cache = PrefixCache(self.tier, reuse=reuse, block_tokens=BLOCK)
        self.ids = count()
        self.running: list[Running] = []

    def move_adapter(self, cid: str, *, on_device: bool) -> None:
        self.tier.placement.device.pop(cid, None)
        if on_device:
            self.tier.placement.device[cid] = ResidentAdapter(cid, layout_of_rank(1), [])
        self.cache.adapter_moved(cid)

    def start(self, token_ids: Sequence[int], key: PrefixKey = KEY) -> Running:
        return Running(self, key, token_ids)

    def serve(self, token_ids: Sequence[int], key: PrefixKey = KEY) -> None:
        """Run a request from its arrival to its end."""
        running = self.start(token_ids, key)
        running.compute(len(token_ids))
        running.end()

    def cached(self, token_ids: Sequence[int], key: PrefixKey = KEY) -> int:
        return self.cache.peek(key, token_ids)

    def check(self) -> None:
        claims: dict[Owner, Sequence[int]] = dict(self.cache.claims())
        claims |= {running.owner: running.own_pages for running in self.running}
        self.pages.check_integrity(claims)
        self.cache.check_integrity(running.lease for running in self.running)
        self.reclaimer.check_integrity()


class Running:
    def __init__(self, bench: Bench, key: PrefixKey, token_ids: Sequence[int]) -> None:
        self.bench = bench
        self.token_ids = list(token_ids)
        self.owner: Owner = ("kv", next(bench.ids))
        self.lease = bench.cache.acquire(key, token_ids)
        self.page_ids = list(self.lease.page_ids)
        bench.running.append(self)

    @property
    def own_pages(self) -> list[int]:
        return self.page_ids[len(self.lease.page_ids) :]

    def compute(self, num_tokens: int, *, commit: bool = True) -> None:
        missing = -(-num_tokens // BLOCK) - len(self.page_ids)
        assert self.bench.reclaimer.reclaim(missing)
        page_ids = self.bench.pages.allocate(self.owner, missing)
        assert page_ids is not None
        self.page_ids += page_ids
        if commit:
            self.commit(num_tokens)

    def commit(self, num_tokens: int) -> None:
        self.page_ids = self.bench.cache.commit(
            self.lease, self.token_ids[:num_tokens], self.page_ids, self.owner
        )
        self.bench.check()

    def end(self) -> None:
        self.bench.running.remove(self)
        self.bench.pages.release(self.owner, self.own_pages)
        self.bench.cache.release(self.lease)
        self.bench.check()


def test_a_second_request_finds_the_whole_blocks_of_the_first_and_not_its_partial_block() -> None:
    bench = Bench()
    bench.serve(range(10))
    assert bench.pages.num_free == 16 - 2, "the half-filled page went back"
    again = bench.start([*range(10), 11, 12])
    assert again.lease.num_tokens == 8 and len(again.page_ids) == 2
    assert (bench.cache.num_query_tokens, bench.cache.num_hit_tokens) == (10 + 12, 8)
    again.compute(12)
    assert again.lease.num_tokens == 12
    again.end()
    assert bench.cached([*range(10), 11, 12, 13]) == 12


def test_a_prompt_may_be_cached_to_its_last_token() -> None:
    bench = Bench()
    bench.serve(range(8))
    lease = bench.cache.acquire(KEY, tuple(range(8)))
    assert lease.num_tokens == 8
    bench.cache.release(lease)


def test_looking_neither_locks_nor_counts_nor_plants_a_tree() -> None:
    bench = Bench()
    assert bench.cached(range(8)) == 0
    bench.serve(range(8))
    assert bench.cached(range(8)) == 8 and bench.cached(range(7)) == 4
    assert bench.cached([9, *range(1, 8)]) == 0, "a block counts from the start only"
    assert bench.cache.num_idle_pages == 2 and bench.cache.num_query_tokens == 8
    bench.check()


@pytest.mark.parametrize(
    "other",
    [
        ("base", (("cid-b", 1.0),), ""),
        ("base", (("cid-a", 0.5),), ""),
        ("base", (("cid-a", 1.0), ("cid-b", 1.0)), ""),
        ("base", (), ""),
        ("base", (("cid-a", 1.0),), "tenant"),
        ("other base", (("cid-a", 1.0),), ""),
    ],
    ids=["adapter", "weight", "one more adapter", "no adapter", "salt", "base"],
)
def test_prefixes_of_another_base_selection_or_salt_are_never_served(other: PrefixKey) -> None:
    bench = Bench()
    bench.serve(range(8))
    running = bench.start(range(8), other)
    assert running.lease.num_tokens == 0
    running.compute(8)
    mine = bench.start(range(8))
    assert not set(mine.page_ids) & set(running.page_ids)


def test_of_two_that_compute_the_same_the_second_takes_the_pages_of_the_first() -> None:
    bench = Bench()
    first, second = bench.start(range(9)), bench.start(range(9))
    first.compute(9, commit=False)
    second.compute(9, commit=False)
    second.commit(9)
    first.commit(9)
    assert first.page_ids[:2] == second.page_ids[:2], "one copy of the shared blocks"
    assert first.page_ids[2] != second.page_ids[2], "each has its own last page"
    assert bench.pages.num_free == 16 - 2 - 2
    second.end()
    assert bench.cache.num_idle_pages == 0, "the first still reads them"
    first.end()
    assert bench.cache.num_idle_pages == 2


def test_a_block_that_turned_idle_is_taken_up_again_by_a_commit() -> None:
    bench = Bench()
    slow = bench.start(range(8))
    bench.serve(range(8))
    assert bench.cache.num_idle_pages == 2
    slow.compute(8)
    assert bench.cache.num_idle_pages == 0 and bench.pages.num_free == 16 - 2
    assert not bench.reclaimer.reclaim(15), "an offer of a locked page is still open"


def test_a_lease_grows_while_another_leaves_and_room_is_made() -> None:
    bench = Bench(num_pages=6)
    bench.serve([*range(4), 20, 21, 22, 23])
    reader, writer = bench.start([*range(4), 20, 21, 22, 23]), bench.start(range(12))
    writer.compute(8)
    reader.end()
    assert bench.cache.num_idle_pages == 1, "the writer locks the block that both begin with"
    writer.compute(12)
    writer.token_ids += range(12, 24)
    writer.compute(24)
    assert bench.cached([*range(4), 20, 21, 22, 23]) == 4 and bench.cache.num_evicted_pages == 1
    assert not bench.reclaimer.reclaim(1), "locked pages were counted as idle"
    writer.end()
    assert bench.cached(range(24)) == 24


def test_prefixes_leave_from_their_end() -> None:
    bench = Bench(num_pages=4)
    bench.serve(range(16))
    for num_free, left in ((1, 12), (2, 8), (4, 0)):
        assert bench.reclaimer.reclaim(num_free)
        assert bench.cached(range(16)) == left
        bench.check()
    assert bench.cache.num_evicted_pages == 4 and bench.cache.num_idle_pages == 0


def test_what_is_asked_for_often_outlives_what_came_last() -> None:
    bench = Bench(num_pages=4)
    for _ in range(3):
        bench.serve(range(8))
    bench.serve(range(100, 108))
    assert bench.reclaimer.reclaim(2)
    assert bench.cached(range(8)) == 8 and bench.cached(range(100, 108)) == 0


def test_an_open_lease_keeps_an_evicted_prefix_from_nothing_but_its_own_blocks() -> None:
    bench = Bench(num_pages=4)
    bench.serve(range(16))
    reader = bench.start(range(8))
    assert bench.reclaimer.reclaim(2) and not bench.reclaimer.reclaim(3)
    assert bench.cached(range(16)) == 8 and bench.cache.num_idle_pages == 0
    reader.end()
    assert bench.reclaimer.reclaim(4)


def test_a_lease_that_ends_inside_a_prefix_does_not_offer_it_before_its_end() -> None:
    bench = Bench(num_pages=4)
    bench.serve(range(16))
    bench.start(range(8)).end()
    assert bench.cache.num_idle_pages == 4
    assert bench.reclaimer.reclaim(1) and bench.cached(range(16)) == 12


def test_an_empty_lease_keeps_its_tree_while_all_else_in_it_is_evicted() -> None:
    bench = Bench(num_pages=4)
    waiting = bench.start(range(8))
    bench.serve(range(8))
    assert bench.reclaimer.reclaim(4)
    bench.check()
    waiting.compute(8)
    assert bench.cached(range(8)) == 8
    waiting.end()


def test_prefixes_of_an_absent_adapter_leave_first_and_those_of_the_base_lose_nothing() -> None:
    bench = Bench(num_pages=4)
    for on_device in (False, False, True, True):
        bench.move_adapter("cid-a", on_device=on_device)
    bench.serve(range(8), BASE)
    bench.serve(range(8), KEY)
    bench.move_adapter("cid-a", on_device=False)
    assert bench.reclaimer.reclaim(1)
    assert bench.cached(range(8), KEY) == 4 and bench.cached(range(8), BASE) == 8
    bench.move_adapter("cid-a", on_device=True)
    bench.check()
    assert bench.reclaimer.reclaim(2)
    assert bench.cached(range(8), KEY) == 4 and bench.cached(range(8), BASE) == 4


def test_a_selection_is_present_only_with_all_its_adapters() -> None:
    bench = Bench(num_pages=4)
    both: PrefixKey = ("base", (("cid-a", 1.0), ("cid-b", 1.0)), "")
    for cid in ("cid-a", "cid-b"):
        bench.move_adapter(cid, on_device=True)
    bench.serve(range(8), KEY)
    bench.serve(range(8), both)
    bench.move_adapter("cid-b", on_device=False)
    assert bench.reclaimer.reclaim(2)
    assert bench.cached(range(8), KEY) == 8 and bench.cached(range(8), both) == 0


def test_prefixes_survive_eviction_and_reload_of_their_adapter() -> None:
    bench = Bench()
    bench.serve(range(8))
    for on_device in (True, False, False, True):
        bench.move_adapter("cid-a", on_device=on_device)
        assert bench.cached(range(8)) == 8
        bench.check()


def test_dropping_an_adapter_frees_its_idle_prefixes_and_no_others() -> None:
    bench = Bench()
    both: PrefixKey = ("base", (("cid-b", 1.0), ("cid-a", 0.5)), "")
    alone: PrefixKey = ("base", (("cid-b", 1.0),), "")
    for key in (KEY, both, alone, BASE):
        bench.serve(range(8), key)
    bench.cache.drop("cid-a")
    bench.check()
    assert [bench.cached(range(8), key) for key in (KEY, both, alone, BASE)] == [0, 0, 8, 8]
    assert bench.pages.num_free == 16 - 4 and bench.cache.num_evicted_pages == 0
    assert bench.cache.cached_tokens("cid-a") == 0 and bench.cache.cached_tokens("cid-b") == 8
    bench.cache.drop("cid-a")
    bench.check()


def test_dropped_prefixes_in_use_serve_their_readers_only_and_go_with_the_last() -> None:
    bench = Bench()
    bench.serve(range(12))
    first, second = bench.start([*range(12), 99]), bench.start(range(8))
    second.token_ids += [50, 51, 52, 53]
    first.compute(13)
    bench.cache.drop("cid-a")
    bench.check()
    assert first.page_ids[:2] == second.page_ids[:2] and bench.cached(range(12)) == 0
    second.compute(12)
    assert len(second.own_pages) == 1, "a block computed after the drop is shared"
    stranger = bench.start(range(12))
    assert stranger.lease.num_tokens == 0
    first.end()
    assert bench.pages.num_free == 16 - 3 and bench.cache.num_idle_pages == 0
    second.end()
    assert bench.pages.num_free == 16
    stranger.compute(12)
    assert bench.cached(range(12)) == 12, "the same CID may come back and be cached anew"


def test_the_cost_of_an_eviction_is_the_time_that_requests_save_by_reuse() -> None:
    bench = Bench()
    bench.tier.costs.token_s = 0.5
    assert bench.cache.cost_of_eviction("cid-a") == 0
    bench.serve(range(8))
    assert bench.cache.cost_of_eviction("cid-a") == 0, "there was no reuse yet"
    costs = []
    for _ in range(50):
        bench.serve(range(8))
        costs.append(bench.cache.cost_of_eviction("cid-a"))
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(0.75 * 8 * 0.5, rel=0.01)
    assert bench.cache.cached_tokens("cid-a") == 8
    assert bench.reclaimer.reclaim(15)
    assert bench.cache.cost_of_eviction("cid-a") == pytest.approx(0.75 * 4 * 0.5)
    assert bench.reclaimer.reclaim(16)
    assert bench.cache.cost_of_eviction("cid-a") == 0 and bench.cache.cached_tokens("cid-a") == 0


def test_a_lease_ends_once() -> None:
    bench = Bench()
    lease = bench.cache.acquire(KEY, range(8))
    bench.cache.release(lease)
    with pytest.raises(AssertionError, match="released already"):
        bench.cache.release(lease)
    with pytest.raises(AssertionError, match="was released"):
        bench.cache.commit(lease, range(4), [0], ("kv", 0))


def test_only_the_owner_of_a_page_can_share_it() -> None:
    bench = Bench()
    lease = bench.cache.acquire(KEY, range(4))
    page_ids = bench.pages.allocate(("kv", 7), 1)
    assert page_ids is not None
    with pytest.raises(AssertionError, match="belongs to"):
        bench.cache.commit(lease, range(4), page_ids, ("kv", 8))


def test_integrity_check_sees_a_lease_that_nobody_holds_and_one_that_was_let_go() -> None:
    bench = Bench()
    bench.serve(range(4))
    lease = bench.cache.acquire(KEY, range(4))
    with pytest.raises(AssertionError, match="users"):
        bench.cache.check_integrity([])
    bench.cache.release(lease)
    with pytest.raises(AssertionError, match="released"):
        bench.cache.check_integrity([lease])


def test_a_very_long_prefix_is_evicted_and_dropped_without_recursion() -> None:
    bench = Bench(num_pages=3000)
    bench.serve(range(3000 * BLOCK))
    assert bench.reclaimer.reclaim(1500)
    bench.cache.drop("cid-a")
    bench.check()
    assert bench.pages.num_free == 3000


def test_the_policy_is_told_to_forget_pages_that_are_gone() -> None:
    class Remembering(CostAwarePolicy):
        def keys(self) -> set[Hashable]:
            return set(self._uses)

    policy = Remembering()
    bench = Bench()
    bench.cache._policy = policy
    bench.serve(range(12))
    assert bench.reclaimer.reclaim(15)
    assert policy.keys() == bench.cache.claims().keys() and len(policy.keys()) == 1
    bench.cache.drop("cid-a")
    assert not policy.keys()


def test_a_lease_says_how_many_tokens_it_holds() -> None:
    bench = Bench()
    bench.serve(range(8))
    lease: PrefixLease = bench.cache.acquire(KEY, range(8))
    assert (lease.key, lease.num_tokens, len(lease.page_ids)) == (KEY, 8, 2)
