from __future__ import annotations

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.cost import CostModel
from loramux.memory.host_tier import HostTier
from loramux.memory.policies import LruPolicy
from loramux.memory.records import Placement
from tests.memory_factory import RANK_BYTES, cid_of, image_of

A, B, C = cid_of(1), cid_of(2), cid_of(3)


def make_tier(num_ranks: int, *, max_adapters: int | None = None) -> tuple[HostTier, LruPolicy]:
    policy, placement = LruPolicy(), Placement()
    tier = HostTier(
        budget_bytes=num_ranks * RANK_BYTES,
        policy=policy,
        placement=placement,
        costs=CostModel(placement),
        max_adapters=max_adapters,
    )
    return tier, policy


def store(tier: HostTier, cid: str) -> None:
    assert tier.reserve(cid, image_of(cid).num_bytes)
    tier.put(image_of(cid))
    tier.check_integrity()


def test_reserved_bytes_count_against_the_budget() -> None:
    tier, _ = make_tier(2)
    assert tier.reserve(A, RANK_BYTES) and tier.reserve(B, RANK_BYTES)
    assert not tier.reserve(C, RANK_BYTES), "all bytes are reserved by reads in flight"
    tier.cancel_reservation(A)
    assert tier.reserve(C, RANK_BYTES)
    tier.check_integrity()


def test_the_least_recently_used_image_is_evicted_unless_it_is_being_copied() -> None:
    tier, policy = make_tier(2)
    for now, cid in enumerate((A, B)):
        policy.used(cid, float(now))
        store(tier, cid)
    tier.begin_copy(A)
    store(tier, C)
    assert A in tier and B not in tier and tier.counters.evictions == 1
    tier.begin_copy(C)
    assert not tier.reserve(B, RANK_BYTES)
    tier.end_copy(A)
    store(tier, B)
    assert A not in tier


def test_the_number_of_adapters_is_limited_as_well_as_their_bytes() -> None:
    tier, _ = make_tier(10, max_adapters=1)
    store(tier, A)
    store(tier, B)
    assert len(tier) == 1 and B in tier


def test_a_dropped_image_frees_its_bytes() -> None:
    tier, _ = make_tier(2)
    store(tier, A)
    assert tier.used_bytes == RANK_BYTES
    tier.drop(A)
    tier.drop(A)
    assert tier.used_bytes == 0 and A not in tier


def test_an_image_larger_than_the_budget_is_an_error_with_the_numbers() -> None:
    tier, _ = make_tier(2)
    with pytest.raises(DoesNotFit, match="takes 192 bytes, and host memory has 128"):
        tier.reserve(cid_of(1, rank=3), 3 * RANK_BYTES)
