from __future__ import annotations

import pytest

from loramux.errors import AdapterNotFound, AdapterRefused, DoesNotFit
from loramux.memory.adapter_eviction import ResidencyLimits
from loramux.memory.tiers import AdapterState
from loramux.types.residency import Tier
from tests.memory_factory import RANK_BYTES, cid_of, tiny_memory

A, B, C = cid_of(1), cid_of(2), cid_of(3)


def test_an_adapter_takes_pages_for_its_true_rank_only() -> None:
    memory = tiny_memory(num_pages=32)
    memory.bring(A, cid_of(2, rank=4))
    assert 32 - memory.pages.num_free == 1 + 4
    assert memory.value(A) == 1.0 and memory.value(cid_of(2, rank=4)) == 2.0
    memory.check()


def test_a_request_is_ready_only_when_the_bytes_are_there() -> None:
    memory = tiny_memory(num_pages=4)
    memory.residency.add_waiters([A])
    assert memory.residency.poll() == 1
    assert not memory.residency.is_ready([A]) and not memory.residency.acquire([A])
    memory.executor.run_all()
    assert not memory.residency.is_ready([A]), "nothing changes between two polls"
    memory.residency.poll()
    assert memory.residency.is_ready([A]) and memory.residency.acquire([A])
    memory.check({A: 1})


def test_an_adapter_is_loaded_once_however_many_wait_for_it() -> None:
    memory = tiny_memory(num_pages=4)
    for _ in range(5):
        memory.residency.add_waiters([A])
        memory.residency.poll()
    memory.finish_loads()
    assert memory.adapters.num_reads == 1 and memory.costs.device.loads == 1


def test_a_failed_load_fails_its_waiters_and_can_be_tried_again() -> None:
    memory = tiny_memory(num_pages=4)
    memory.adapters.broken.add(A)
    memory.residency.add_waiters([A])
    memory.residency.add_waiters([B])
    memory.finish_loads()
    with pytest.raises(AdapterRefused, match="is broken"):
        memory.residency.is_ready([A])
    assert memory.residency.is_ready([B])
    memory.check()
    assert memory.pages.num_free == 3, "a failed load keeps pages"
    memory.residency.remove_waiters([A])
    memory.adapters.broken.clear()
    memory.bring(A)
    assert memory.value(A) == 1.0


def test_an_unknown_adapter_is_refused_and_nothing_is_counted() -> None:
    memory = tiny_memory(num_pages=4)
    memory.adapters.unknown.add(B)
    with pytest.raises(AdapterNotFound):
        memory.residency.add_waiters([A, B])
    assert memory.residency.records[A].num_waiters == 0
    memory.check()


def test_the_least_recently_used_idle_adapter_leaves_first_and_a_leased_one_never() -> None:
    memory = tiny_memory(num_pages=3)
    memory.bring(A)
    memory.bring(B)
    memory.bring(C)
    assert memory.residency.acquire([A])
    memory.bring(cid_of(4))
    assert B not in memory.residency and A in memory.residency and C in memory.residency
    memory.residency.add_waiters([cid_of(5, rank=3)])
    memory.finish_loads()
    assert not memory.residency.is_ready([cid_of(5, rank=3)]), "it evicted a leased adapter"
    assert C in memory.residency, "a load that cannot succeed must not evict anything"
    memory.check({A: 1})
    memory.residency.release([A])
    memory.finish_loads()
    assert memory.residency.is_ready([cid_of(5, rank=3)])


def test_weights_survive_eviction_and_reload_from_host_memory() -> None:
    memory = tiny_memory(num_pages=3)
    for cid, value in ((cid_of(7, rank=3), 7.0), (cid_of(8, rank=2), 8.0), (cid_of(7, 3), 7.0)):
        memory.bring(cid)
        assert memory.value(cid) == value
    assert memory.adapters.num_reads == 2, "the host tier had the third"
    assert memory.costs.device.evictions == 2
    assert memory.residency.records[cid_of(8, rank=2)].state is AdapterState.HOST


def test_an_awaited_adapter_is_evicted_only_for_one_that_was_requested_before() -> None:
    memory = tiny_memory(num_pages=2)
    for cid in (A, B, C):
        memory.residency.add_waiters([cid])
        memory.finish_loads()
    assert not memory.residency.is_ready([C]), "C was requested last and evicted A or B"
    memory.check()
    memory.residency.prioritize([C])
    memory.finish_loads()
    assert C in memory.residency and A in memory.residency and B not in memory.residency
    memory.check()
    memory.residency.remove_waiters([A])
    memory.finish_loads()
    assert B in memory.residency and C in memory.residency and A not in memory.residency


def test_an_abort_while_loading_leaves_the_adapter_idle() -> None:
    memory = tiny_memory(num_pages=2)
    memory.residency.add_waiters([A])
    memory.residency.poll()
    memory.residency.remove_waiters([A])
    memory.finish_loads()
    assert A in memory.residency and memory.residency.num_idle_pages == 1
    memory.check()


def test_an_image_without_pages_waits_in_host_memory() -> None:
    memory = tiny_memory(num_pages=1)
    memory.bring(A)
    assert memory.residency.acquire([A])
    memory.residency.add_waiters([B])
    memory.finish_loads()
    assert memory.residency.records[B].state is AdapterState.HOST
    memory.residency.release([A])
    memory.finish_loads()
    assert memory.residency.records[B].state is AdapterState.DEVICE


def test_an_adapter_larger_than_host_memory_is_an_error_with_the_fix() -> None:
    memory = tiny_memory(num_pages=8, host_ranks=2)
    memory.residency.add_waiters([cid_of(1, rank=3)])
    memory.finish_loads()
    with pytest.raises(DoesNotFit, match="--host-memory"):
        memory.residency.is_ready([cid_of(1, rank=3)])
    assert memory.pages.num_free == 8
    memory.check()


def test_forget_frees_every_tier_and_waits_for_users() -> None:
    memory = tiny_memory(num_pages=4)
    memory.bring(A)
    assert memory.residency.acquire([A])
    assert not memory.residency.forget(A)
    memory.residency.release([A])
    memory.residency.add_waiters([A])
    assert not memory.residency.forget(A)
    memory.residency.remove_waiters([A])
    assert memory.residency.forget(A)
    assert memory.pages.num_free == 4 and memory.host.used_bytes == 0
    assert memory.residency.forget(A), "forgetting twice is fine"
    memory.check()


def test_a_pinned_adapter_is_brought_up_and_stays() -> None:
    memory = tiny_memory(num_pages=4)
    memory.residency.pin(A, is_pinned=True)
    memory.finish_loads()
    memory.bring(cid_of(2, rank=3))
    memory.bring(cid_of(3, rank=3))
    assert A in memory.residency
    with pytest.raises(DoesNotFit, match="half of the pool"):
        memory.residency.pin(cid_of(4, rank=2), is_pinned=True)
    memory.residency.pin(A, is_pinned=False)
    memory.bring(cid_of(9, rank=4))
    assert A not in memory.residency
    memory.check()


def test_prewarm_fills_free_pages_and_evicts_nothing() -> None:
    memory = tiny_memory(num_pages=3)
    memory.bring(cid_of(9, rank=2))
    memory.residency.prewarm([A, B])
    memory.finish_loads()
    assert A in memory.residency and cid_of(9, rank=2) in memory.residency
    assert B not in memory.residency
    memory.check()


@pytest.mark.parametrize("limits", [ResidencyLimits(max_adapters=2), ResidencyLimits(max_pages=2)])
def test_caps_on_adapters_leave_the_rest_of_the_pool_alone(limits: ResidencyLimits) -> None:
    memory = tiny_memory(num_pages=8, limits=limits)
    for number in range(5):
        memory.bring(cid_of(number))
        assert len(memory.residency) <= 2
    assert memory.residency.acquire([cid_of(3), cid_of(4)])
    memory.residency.add_waiters([A])
    memory.finish_loads()
    assert not memory.residency.is_ready([A]), "both adapters are leased"
    memory.check({cid_of(3): 1, cid_of(4): 1})


def test_load_now_gives_up_when_the_pool_cannot_hold_all_at_once() -> None:
    memory = tiny_memory(num_pages=2)
    memory.executor.submit = lambda fn, *args: fn(*args)  # type: ignore[method-assign]
    assert memory.residency.load_now([A, B])
    memory.residency.release([A, B])
    assert not memory.residency.load_now([A, B, C])
    memory.check()


def test_hits_and_misses_are_counted_in_the_tier_where_it_was_found() -> None:
    memory = tiny_memory(num_pages=1)
    memory.bring(A)
    memory.bring(A)
    memory.bring(B)
    memory.bring(A)
    device, host = memory.costs.device, memory.host.counters
    assert (device.hits, device.misses) == (1, 3)
    assert (host.hits, host.misses) == (1, 2)
    assert memory.costs.source.hits == 2
    assert host.load_bytes == 2 * RANK_BYTES and device.loads == 3


def test_changes_since_reports_the_tier_of_each_adapter_that_moved() -> None:
    memory = tiny_memory(num_pages=2)
    placement = memory.placement
    start = placement.moves.version
    memory.bring(A)
    memory.bring(B)
    middle = placement.moves.version
    memory.bring(C)
    delta = placement.changes_since(middle)
    assert dict(delta.tiers) == {A: Tier.HOST, C: Tier.DEVICE} and not delta.is_full
    whole = placement.changes_since(start)
    assert dict(whole.tiers) == {A: Tier.HOST, B: Tier.DEVICE, C: Tier.DEVICE}
    nothing = placement.changes_since(delta.version)
    assert not nothing.tiers and nothing.version == delta.version == placement.moves.version


def test_changes_since_a_version_older_than_the_log_reports_all_adapters() -> None:
    memory = tiny_memory(num_pages=2)
    for _ in range(1000):
        for cid in (A, B, C):
            memory.bring(cid)
    placement = memory.placement
    delta = placement.changes_since(0)
    assert delta.is_full
    assert {
        cid for cid, tier in delta.tiers if tier is Tier.DEVICE
    } == memory.residency.resident.keys()
    assert {cid for cid, _ in delta.tiers} == {A, B, C}
    assert placement.changes_since(placement.moves.version + 1).is_full


def test_a_record_says_from_which_tier_the_last_load_started() -> None:
    memory = tiny_memory(num_pages=1)
    memory.bring(A)
    assert memory.residency.records[A].load_origin is AdapterState.SOURCE
    memory.bring(B)
    memory.bring(A)
    assert memory.residency.records[A].load_origin is AdapterState.HOST
