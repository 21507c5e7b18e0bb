"""The reuse estimator alone, and its effect on adapters and prefixes in one pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from loramux.memory.pages import Owner
from loramux.memory.policies import CostAwarePolicy
from loramux.memory.prefix import GHOST_POOLS, PrefixCache, PrefixKey, ReuseEstimator
from loramux.memory.tiers import TierCounters
from tests.memory_factory import cid_of, tiny_memory

BLOCK = 2
RANK = 8
NUM_PAGES = 1000
NUM_ADAPTERS = 40
PROMPT_TOKENS = 20


def test_the_factor_starts_at_one_and_falls_if_no_page_is_reused() -> None:
    estimator = ReuseEstimator(1000)
    assert estimator.single_use_factor == 1.0
    factors = []
    for path in range(5000):
        assert not estimator.added(path)
        factors.append(estimator.single_use_factor)
    assert factors == sorted(factors, reverse=True)
    assert factors[30] > 0.5, "a few new prompts say little"
    assert 0 < factors[-1] < 0.05


@pytest.mark.parametrize(("fraction", "factor"), [(0.25, 0.5), (0.5, 1.0), (0.9, 1.0)])
def test_the_factor_follows_the_reused_fraction_and_is_one_from_a_half_on(
    fraction: float, factor: float
) -> None:
    estimator = ReuseEstimator(1000)
    for path in range(8000):
        estimator.added(path)
        if path % 100 < 100 * fraction:
            estimator.reused()
    assert estimator.single_use_factor == pytest.approx(factor, abs=0.05)
    for path in range(8000, 16000):
        estimator.added(path)
    assert estimator.single_use_factor < 0.05, "the past counts for ever"


def test_a_page_that_returns_after_its_eviction_counts_as_reused_once() -> None:
    estimator = ReuseEstimator(100)
    for path in range(1000):
        estimator.added(path)
    low = estimator.single_use_factor
    for path in range(900, 1000):
        estimator.evicted(path, was_reused=False)
    assert all(estimator.added(path) for path in range(900, 1000))
    risen = estimator.single_use_factor
    assert risen > low + 0.3, "a cache that evicts early never learns that it should not"
    estimator.evicted(900, was_reused=True)
    assert estimator.added(900) and estimator.single_use_factor == risen, (
        "its second use was counted before"
    )


def test_evicted_pages_are_not_remembered_without_end() -> None:
    estimator = ReuseEstimator(10)
    for path in range(10 * GHOST_POOLS + 1):
        estimator.evicted(path, was_reused=False)
    assert not estimator.added(0) and estimator.added(1)


class SteadyCounters(TierCounters):
    """Counters of a device where every copy takes no time, so that runs are equal."""

    def seconds_for(self, num_bytes: int, latency_s: float, bytes_per_s: float) -> float:
        return 0.0


class Traffic:
    """Requests through residency, prefix cache and pages, without a model."""

    def __init__(self, *, has_penalty: bool) -> None:
        self.memory = tiny_memory(
            num_pages=NUM_PAGES,
            host_ranks=1000,
            policy=CostAwarePolicy(drift_half_life_turnovers=3.0),
            prefix_block_tokens=BLOCK,
            has_single_use_penalty=has_penalty,
        )
        # The score per page of an adapter that was used once is a little below a prompt's.
        self.memory.costs.step_s = 20e-3
        self.memory.costs.token_s = 2e-3
        self.memory.costs.device = SteadyCounters()
        assert self.memory.prefixes is not None
        self.prefixes: PrefixCache = self.memory.prefixes
        self._ids = count()
        self._new_tokens = count(1)

    @property
    def num_adapter_evictions(self) -> int:
        return self.memory.costs.device.evictions

    def fresh(self, num_tokens: int) -> list[int]:
        """Return tokens that were not sent before."""
        return [next(self._new_tokens) for _ in range(num_tokens)]

    def serve(self, adapter: int, token_ids: list[int]) -> None:
        memory, cid = self.memory, cid_of(adapter, RANK)
        memory.residency.add_waiters([cid])
        memory.finish_loads()
        assert memory.residency.acquire([cid])
        memory.residency.remove_waiters([cid])
        key: PrefixKey = ("base", ((cid, 1.0),), "")
        owner: Owner = ("kv", next(self._ids))
        lease = self.prefixes.acquire(key, token_ids)
        missing = len(token_ids) // BLOCK - len(lease.page_ids)
        assert memory.reclaimer.reclaim(missing)
        page_ids = memory.pages.allocate(owner, missing)
        assert page_ids is not None
        self.prefixes.commit(lease, token_ids, lease.page_ids + page_ids, owner)
        self.prefixes.release(lease)
        memory.residency.release([cid])

    def check(self) -> None:
        self.memory.residency.check_integrity({})
        self.prefixes.check_integrity([])
        self.memory.reclaimer.check_integrity()
        claims: dict[Owner, list[int]] = {**self.memory.residency.claims()}
        self.memory.pages.check_integrity(claims | self.prefixes.claims())

    def random_prompts(self, num_requests: int) -> None:
        for number in range(num_requests):
            self.serve(number % NUM_ADAPTERS, self.fresh(PROMPT_TOKENS))

    def chats(self, num_rounds: int, num_turns: int = 5) -> None:
        """Run eight chats at a time, each with an adapter; turn alternate."""
        for chat_round in range(num_rounds):
            chatters = [(chat_round * 8 + chatter) % NUM_ADAPTERS for chatter in range(8)]
            histories: dict[int, list[int]] = {chatter: [] for chatter in chatters}
            for _ in range(num_turns):
                for chatter, history in histories.items():
                    history += self.fresh(PROMPT_TOKENS)
                    self.serve(chatter, history)

    def shared_instructions(self, num_requests: int) -> None:
        """Send each adapter's own instructions followed by a question that is never repeated."""
        instructions = [self.fresh(PROMPT_TOKENS) for _ in range(NUM_ADAPTERS)]
        for number in range(num_requests):
            adapter = number % NUM_ADAPTERS
            self.serve(adapter, instructions[adapter] + self.fresh(PROMPT_TOKENS))


def both() -> Iterator[Traffic]:
    """Yield traffic with and without the penalty on pages that were used once."""
    yield Traffic(has_penalty=True)
    yield Traffic(has_penalty=False)


def test_prompts_that_are_never_repeated_evict_no_adapter() -> None:
    ours, plain = both()
    for traffic in (ours, plain):
        traffic.random_prompts(400)
        traffic.check()
    assert plain.num_adapter_evictions > 0, "there was no pressure"
    assert ours.num_adapter_evictions == 0
    assert len(ours.memory.residency) == NUM_ADAPTERS


def test_chats_hit_as_often_as_without_the_penalty() -> None:
    ours, plain = both()
    for traffic in (ours, plain):
        traffic.chats(num_rounds=20)
        traffic.check()
    assert plain.num_adapter_evictions > 0, "there was no pressure"
    assert ours.prefixes.num_hit_tokens == plain.prefixes.num_hit_tokens > 0


def test_shared_instructions_stay_and_single_questions_are_evicted() -> None:
    ours, plain = both()
    for traffic in (ours, plain):
        traffic.shared_instructions(600)
        traffic.check()
    most = (600 - NUM_ADAPTERS) * PROMPT_TOKENS
    assert ours.prefixes.num_hit_tokens > 0.9 * most
    assert plain.prefixes.num_hit_tokens < 0.7 * most, "there was no pressure"
    assert ours.num_adapter_evictions < plain.num_adapter_evictions


def test_chats_are_cached_again_after_prompts_that_were_never_repeated() -> None:
    ours, plain = both()
    hits = []
    for traffic in (ours, plain):
        traffic.random_prompts(200)
        traffic.chats(num_rounds=10)
        before = traffic.prefixes.num_hit_tokens
        traffic.chats(num_rounds=20)
        hits.append(traffic.prefixes.num_hit_tokens - before)
    assert hits[0] >= hits[1] > 0
