from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.adapter_eviction import AdapterEviction, ResidencyLimits, yields_to
from loramux.memory.policies import CostAwarePolicy
from loramux.memory.records import AdapterRecord
from tests.memory_factory import cid_of, tiny_memory, tiny_tier


class FixedPrefixes:
    """A prefix cache whose prefixes of adapter 1 save a second per request."""

    def adapter_moved(self, cid: str) -> None: ...

    def cost_of_eviction(self, cid: str) -> float:
        return 1.0 if cid == cid_of(1) else 0.0

    def drop(self, cid: str) -> None: ...


def record(number: int, *, tick: int = 0, num_waiters: int = 0) -> AdapterRecord:
    known = tiny_memory(num_pages=1).adapters.get(cid_of(number))
    made = AdapterRecord(known, 1, num_waiters=num_waiters, wait_tick=tick)
    made.is_protected = num_waiters > 0
    return made


def test_an_awaited_adapter_yields_only_to_one_that_was_requested_before_it() -> None:
    first, second = record(1, tick=1, num_waiters=1), record(2, tick=2, num_waiters=1)
    assert yields_to(second, first) and not yields_to(first, second)
    assert yields_to(record(3), second), "it has no waiters"
    assert not yields_to(first, record(4)), "a load without waiters evicts an awaited adapter"


def test_cached_prefixes_raise_the_score_of_their_adapter() -> None:
    policy = CostAwarePolicy()
    for number in (1, 2):
        policy.used(cid_of(number), 1.0)
    tier, limits = tiny_tier(1, policy), ResidencyLimits()
    plain = AdapterEviction(tier, limits=limits, prefixes=None)
    assert plain.score(record(1)) == plain.score(record(2))
    eviction = AdapterEviction(tier, limits=limits, prefixes=FixedPrefixes())
    assert eviction.score(record(1)) > eviction.score(record(2))


def test_a_selection_that_the_limits_can_never_take_is_refused_with_the_numbers() -> None:
    limits = ResidencyLimits(max_adapters=1)
    limits.check([record(1), record(1)])
    with pytest.raises(DoesNotFit, match="2 adapters take 2 pages"):
        limits.check([record(1), record(2)])


def test_limits_count_pages_and_adapters() -> None:
    limits = ResidencyLimits(max_pages=4, max_adapters=2)
    assert limits.allow(4, 2)
    assert not limits.allow(5, 1) and not limits.allow(1, 3)
    assert ResidencyLimits().allow(10**9, 10**6)


def test_a_load_within_the_limits_scores_none_of_the_resident_adapters() -> None:
    class CountingPolicy(CostAwarePolicy):
        num_scores = 0

        def score(self, key: Hashable, *, cost_s: float, size: int) -> float:
            self.num_scores += 1
            return super().score(key, cost_s=cost_s, size=size)

    policy = CountingPolicy()
    limits = ResidencyLimits(max_adapters=32)
    memory = tiny_memory(num_pages=32, policy=policy, limits=limits)
    num_scores = []
    for number in range(20):
        memory.bring(cid_of(number))
        num_scores.append(policy.num_scores)
    costs = [after - before for before, after in pairwise(num_scores)]
    assert costs[18] == costs[1], "the cost of a load grows with the number of adapters"
