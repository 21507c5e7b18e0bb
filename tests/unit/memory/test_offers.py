from __future__ import annotations

from collections.abc import Hashable

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.offers import AdapterOffers, ResidencyLimits, gives_way
from loramux.memory.policies import CostAwarePolicy
from loramux.memory.records import AdapterRecord
from tests.memory_factory import cid_of, tiny_memory


class FixedPrefixes:
    """Cached prefixes of adapter 1 save a second a request."""

    def adapter_moved(self, cid: str, *, on_device: bool) -> None: ...

    def worth_of(self, cid: str) -> float:
        return 1.0 if cid == cid_of(1) else 0.0

    def drop(self, cid: str) -> None: ...


def record(memory_number: int, *, tick: int = 0, wants: int = 0) -> AdapterRecord:
    known = tiny_memory(num_pages=1).adapters.get(cid_of(memory_number))
    made = AdapterRecord(known, 1, num_wants=wants, want_tick=tick)
    made.is_protected = wants > 0
    return made


def test_who_asked_first_does_not_give_way_to_who_asked_later() -> None:
    first, second = record(1, tick=1, wants=1), record(2, tick=2, wants=1)
    assert gives_way(second, first) and not gives_way(first, second)
    assert gives_way(record(3), second), "nobody waits for it"
    assert not gives_way(first, record(4)), "a load that nobody waits for evicts nothing wanted"


def test_cached_prefixes_make_their_adapter_worth_more() -> None:
    memory = tiny_memory(num_pages=1)
    policy = CostAwarePolicy()
    for number in (1, 2):
        policy.used(cid_of(number), 1.0)
    offers = AdapterOffers(memory.room, policy, memory.tiers)
    assert offers.worth(record(1)) == offers.worth(record(2))
    offers.prefixes = FixedPrefixes()
    assert offers.worth(record(1)) > offers.worth(record(2))


def test_a_selection_that_the_limits_can_never_take_is_refused_with_the_numbers() -> None:
    limits = ResidencyLimits(max_adapters=1)
    limits.check([record(1), record(1)])
    with pytest.raises(DoesNotFit, match="2 adapters take 2 pages"):
        limits.check([record(1), record(2)])


def test_limits_count_pages_and_adapters() -> None:
    limits = ResidencyLimits(max_pages=4, max_adapters=2)
    assert limits.are_kept(4, 2)
    assert not limits.are_kept(5, 1) and not limits.are_kept(1, 3)
    assert ResidencyLimits().are_kept(10**9, 10**6)


def test_a_load_within_the_limits_weighs_none_of_those_on_the_device() -> None:
    class CountingPolicy(CostAwarePolicy):
        num_asked = 0

        def worth(self, key: Hashable, *, cost_s: float, size: int) -> float:
            self.num_asked += 1
            return super().worth(key, cost_s=cost_s, size=size)

    policy = CountingPolicy()
    memory = tiny_memory(num_pages=32, policy=policy)
    memory.residency.limits = ResidencyLimits(max_adapters=32)
    asked = []
    for number in range(20):
        memory.bring(cid_of(number))
        asked.append(policy.num_asked)
    assert asked[19] - asked[18] == asked[2] - asked[1], "the cost grows with who is there"
