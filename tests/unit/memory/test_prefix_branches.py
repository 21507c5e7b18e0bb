"""Prefixes of aLoRA adapters: the base's up to the start, their own from there on."""

from __future__ import annotations

import pytest

from loramux.memory.prefix import ABSENT_ADAPTER_FACTOR, PrefixCache, PrefixKey, ReuseEstimator
from loramux.memory.records import ResidentAdapter
from tests.memory_factory import layout_of_rank, tiny_tier
from tests.unit.memory.test_prefix_machine import LastUsePolicy

BLOCK = 4
BASE: PrefixKey = ("base", (), "")
FIRST: PrefixKey = ("base", (("first", 1.0),), "")
SECOND: PrefixKey = ("base", (("second", 1.0),), "")
TOKENS = list(range(16))


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.tier = tiny_tier(16, LastUsePolicy(), clock=lambda: self.now)
        self.cache = PrefixCache(self.tier, reuse=ReuseEstimator(16), block_tokens=BLOCK)

    def serve(self, key: PrefixKey, start: int = 0, tokens: list[int] = TOKENS) -> int:
        """Serve a request; return the number of tokens that it found."""
        self.now += 1
        lease = self.cache.acquire(key, tokens, start)
        num_found = lease.num_tokens
        page_ids = self.tier.pages.allocate(("kv", 0), (len(tokens) - num_found) // BLOCK) or []
        self.cache.commit(lease, tokens, [*lease.page_ids, *page_ids], ("kv", 0))
        self.cache.check_integrity([lease])
        self.cache.release(lease)
        self.cache.check_integrity([])
        return num_found


@pytest.mark.parametrize(("start", "num_shared"), [(3, 0), (4, 4), (8, 8), (11, 8), (15, 12)])
def test_whole_blocks_before_the_start_are_shared_with_the_base_and_other_aloras(
    start: int, num_shared: int
) -> None:
    bench = Bench()
    assert bench.serve(FIRST, start) == 0
    assert bench.serve(SECOND, start) == num_shared
    assert bench.serve(BASE) == num_shared
    assert bench.serve(FIRST, start) == bench.serve(SECOND, start) == bench.serve(BASE) == 16
    assert bench.cache.cached_tokens("first") == bench.cache.cached_tokens("second")
    assert bench.cache.cached_tokens("first") == 16 - num_shared


def test_a_block_with_another_start_or_an_adapter_without_one_is_not_shared() -> None:
    bench = Bench()
    bench.serve(FIRST, 9)
    assert bench.serve(FIRST, 10) == bench.serve(FIRST, 8) == 8
    assert bench.serve(FIRST, 12) == 8, "the third block is the base's"
    assert bench.serve(FIRST) == 0, "the adapter acts from the first token on"
    assert bench.serve(FIRST, 9, TOKENS[:12]) == 12


def test_an_unregistered_adapter_takes_only_its_own_blocks_along() -> None:
    bench = Bench()
    bench.serve(FIRST, 9)
    bench.serve(SECOND, 9)
    bench.cache.drop("first")
    bench.cache.check_integrity([])
    assert bench.cache.num_pages == 2 + 2
    assert bench.cache.peek(FIRST, TOKENS, 9) == 8 and bench.cache.peek(SECOND, TOKENS, 9) == 16


def test_the_blocks_of_an_adapter_that_is_away_leave_before_those_of_the_base() -> None:
    bench = Bench()
    bench.serve(BASE, tokens=[50, *TOKENS[1:4]])
    bench.serve(FIRST, 8)
    bench.tier.reclaimer.reclaim(16 - 3)
    assert bench.cache.peek(BASE, [50, *TOKENS[1:4]]) == 4, "it is older, and its cost is higher"
    assert bench.cache.peek(FIRST, TOKENS, 8) == 8
    bench.tier.placement.device["first"] = ResidentAdapter("first", layout_of_rank(1), [])
    bench.serve(FIRST, 8)
    bench.tier.reclaimer.reclaim(16 - 4)
    assert ABSENT_ADAPTER_FACTOR < 1 and bench.cache.peek(FIRST, TOKENS, 8) == 16


def test_only_reuse_that_needs_the_adapter_keeps_it_on_the_device() -> None:
    bench = Bench()
    bench.tier.costs.token_s = 1.0
    bench.serve(FIRST, 12)
    for _ in range(40):
        bench.serve(FIRST, 12)
    whole = bench.cache.cost_of_eviction("first")
    assert 0 < whole < 4 * (1 - ABSENT_ADAPTER_FACTOR) + 0.1
    assert bench.cache.cost_of_eviction("second") == 0
