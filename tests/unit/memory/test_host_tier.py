from __future__ import annotations

import pytest

from loramux.errors import DoesNotFit
from loramux.memory.host_tier import HostTier
from loramux.memory.policies import LruPolicy
from tests.memory_factory import RANK_BYTES, cid_of, image_of

A, B, C = cid_of(1), cid_of(2), cid_of(3)


def make_tier(num_ranks: int, *, max_adapters: int | None = None) -> tuple[HostTier, LruPolicy]:
    policy = LruPolicy()
    tier = HostTier(
        budget_bytes=num_ranks * RANK_BYTES,
        policy=policy,
        cost_s=lambda cid, num_bytes: 1.0,
        max_adapters=max_adapters,
    )
    return tier, policy


def keep(tier: HostTier, cid: str) -> None:
    assert tier.reserve(cid, image_of(cid).num_bytes)
    tier.put(image_of(cid))
    tier.check_integrity()


def test_bytes_on_their_way_count_against_the_budget() -> None:
    tier, _ = make_tier(2)
    assert tier.reserve(A, RANK_BYTES) and tier.reserve(B, RANK_BYTES)
    assert not tier.reserve(C, RANK_BYTES), "both places are taken by reads in flight"
    tier.unreserve(A)
    assert tier.reserve(C, RANK_BYTES)
    tier.check_integrity()


def test_the_least_recently_used_gives_way_and_one_that_is_copied_does_not() -> None:
    tier, policy = make_tier(2)
    for now, cid in enumerate((A, B)):
        policy.used(cid, float(now))
        keep(tier, cid)
    tier.hold(A)
    keep(tier, C)
    assert A in tier and B not in tier and tier.counters.evictions == 1
    tier.hold(C)
    assert not tier.reserve(B, RANK_BYTES)
    tier.unhold(A)
    keep(tier, B)
    assert A not in tier


def test_a_cap_on_the_number_of_adapters_holds_beside_the_bytes() -> None:
    tier, _ = make_tier(10, max_adapters=1)
    keep(tier, A)
    keep(tier, B)
    assert len(tier) == 1 and B in tier
    tier.offer(image_of(C))
    assert C not in tier


def test_an_offer_costs_nobody_his_place() -> None:
    tier, _ = make_tier(2)
    tier.offer(image_of(A))
    tier.offer(image_of(cid_of(2, rank=2)))
    assert A in tier and cid_of(2, rank=2) not in tier
    assert tier.used_bytes == RANK_BYTES
    tier.drop(A)
    assert tier.used_bytes == 0 and tier.get(A) is None


def test_what_can_never_fit_is_an_error_with_the_numbers() -> None:
    tier, _ = make_tier(2)
    with pytest.raises(DoesNotFit, match="takes 192 bytes, and host memory has 128"):
        tier.reserve(cid_of(1, rank=3), 3 * RANK_BYTES)
