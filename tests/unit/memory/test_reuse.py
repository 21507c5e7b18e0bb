"""The meter alone, and what it does for adapters and prefixes that share one pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from loramux.memory.pages import Owner
from loramux.memory.policies import CostAwarePolicy
from loramux.memory.prefix import PrefixCache, PrefixKey
from loramux.memory.reuse import GHOST_POOLS, ReuseMeter
from loramux.memory.tiers import TierCounters
from tests.memory_factory import Clock, cid_of, tiny_memory

BLOCK = 2
RANK = 8
NUM_PAGES = 1000
NUM_ADAPTERS = 40
PROMPT_TOKENS = 20


def test_a_fresh_meter_trusts_every_page_and_soon_none_if_nothing_comes_back() -> None:
    meter = ReuseMeter(1000)
    assert meter.trust == 1.0
    trusts = []
    for path in range(5000):
        assert not meter.added(path)
        trusts.append(meter.trust)
    assert trusts == sorted(trusts, reverse=True)
    assert trusts[30] > 0.5, "a few new prompts say little"
    assert 0 < trusts[-1] < 0.05


@pytest.mark.parametrize(("share", "trust"), [(0.25, 0.5), (0.5, 1.0), (0.9, 1.0)])
def test_trust_follows_the_share_that_came_back_and_is_full_from_a_half_on(
    share: float, trust: float
) -> None:
    meter = ReuseMeter(1000)
    for path in range(8000):
        meter.added(path)
        if path % 100 < 100 * share:
            meter.reused()
    assert meter.trust == pytest.approx(trust, abs=0.05)
    for path in range(8000, 16000):
        meter.added(path)
    assert meter.trust < 0.05, "the past counts for ever"


def test_what_comes_back_after_its_eviction_counts_as_reused_once() -> None:
    meter = ReuseMeter(100)
    for path in range(1000):
        meter.added(path)
    low = meter.trust
    for path in range(900, 1000):
        meter.evicted(path, was_reused=False)
    assert all(meter.added(path) for path in range(900, 1000))
    risen = meter.trust
    assert risen > low + 0.3, "a cache that evicts early never learns that it should not"
    meter.evicted(900, was_reused=True)
    assert meter.added(900) and meter.trust == risen, "its second use was counted before"


def test_evicted_pages_are_not_remembered_without_end() -> None:
    meter = ReuseMeter(10)
    for path in range(10 * GHOST_POOLS + 1):
        meter.evicted(path, was_reused=False)
    assert not meter.added(0) and meter.added(1)


class SteadyCounters(TierCounters):
    """Of a device where every copy takes no time, so that runs do not differ."""

    def seconds_for(self, num_bytes: int, guess_s: float, guess_bytes_per_s: float) -> float:
        return 0.0


class Traffic:
    """Requests through real residency, prefix cache and pages; no forward is needed for that."""

    def __init__(self, *, with_doubt: bool) -> None:
        policy = CostAwarePolicy(drift_half_life_turnovers=3.0)
        self.memory = tiny_memory(num_pages=NUM_PAGES, host_ranks=1000, policy=policy)
        # An adapter that was used once is worth a little less a page than a page of a prompt.
        self.memory.tiers.step_s = 20e-3
        self.memory.tiers.device_counters = SteadyCounters()
        self.prefixes = PrefixCache(
            pages=self.memory.pages,
            reclaimer=self.memory.room,
            policy=policy,
            block_tokens=BLOCK,
            clock=Clock(),
            token_s=2e-3,
        )
        self.memory.residency.prefixes = self.prefixes
        if not with_doubt:
            self.memory.room.doubt = lambda: 0.0
        self._ids = count()
        self._new_tokens = count(1)

    @property
    def num_adapter_evictions(self) -> int:
        return self.memory.tiers.device_counters.evictions

    def fresh(self, num_tokens: int) -> list[int]:
        """Tokens that nobody has sent before."""
        return [next(self._new_tokens) for _ in range(num_tokens)]

    def serve(self, adapter: int, token_ids: list[int]) -> None:
        memory, cid = self.memory, cid_of(adapter, RANK)
        memory.residency.want([cid])
        memory.finish_loads()
        assert memory.residency.acquire([cid])
        memory.residency.unwant([cid])
        key: PrefixKey = ("base", ((cid, 1.0),), "")
        owner: Owner = ("kv", next(self._ids))
        lease = self.prefixes.acquire(key, token_ids)
        missing = len(token_ids) // BLOCK - len(lease.page_ids)
        assert memory.room.make_room(missing)
        page_ids = memory.pages.allocate(owner, missing)
        assert page_ids is not None
        self.prefixes.commit(lease, token_ids, lease.page_ids + page_ids, owner)
        self.prefixes.release(lease)
        memory.residency.release([cid])

    def check(self) -> None:
        self.memory.residency.check_integrity({})
        self.prefixes.check_integrity([])
        self.memory.room.check_integrity()
        claims: dict[Owner, list[int]] = {**self.memory.residency.claims()}
        self.memory.pages.check_integrity(claims | self.prefixes.claims())

    def random_prompts(self, num_requests: int) -> None:
        for number in range(num_requests):
            self.serve(number % NUM_ADAPTERS, self.fresh(PROMPT_TOKENS))

    def chats(self, num_rounds: int, num_turns: int = 5) -> None:
        """Some people at a time, each with an adapter; turns alternate."""
        for chat_round in range(num_rounds):
            people = [(chat_round * 8 + person) % NUM_ADAPTERS for person in range(8)]
            histories: dict[int, list[int]] = {person: [] for person in people}
            for _ in range(num_turns):
                for person, history in histories.items():
                    history += self.fresh(PROMPT_TOKENS)
                    self.serve(person, history)

    def shared_instructions(self, num_requests: int) -> None:
        """Each adapter has its own, with a question behind that comes but once."""
        instructions = [self.fresh(PROMPT_TOKENS) for _ in range(NUM_ADAPTERS)]
        for number in range(num_requests):
            adapter = number % NUM_ADAPTERS
            self.serve(adapter, instructions[adapter] + self.fresh(PROMPT_TOKENS))


def both() -> Iterator[Traffic]:
    """As it is, and as it would be if every new page were worth as much as one that came back."""
    yield Traffic(with_doubt=True)
    yield Traffic(with_doubt=False)


def test_prompts_that_never_come_back_push_no_adapter_out() -> None:
    ours, trusting = both()
    for traffic in (ours, trusting):
        traffic.random_prompts(400)
        traffic.check()
    assert trusting.num_adapter_evictions > 0, "there was no pressure"
    assert ours.num_adapter_evictions == 0
    assert len(ours.memory.residency) == NUM_ADAPTERS


def test_chats_find_as_much_as_if_nothing_was_in_doubt() -> None:
    ours, trusting = both()
    for traffic in (ours, trusting):
        traffic.chats(num_rounds=20)
        traffic.check()
    assert trusting.num_adapter_evictions > 0, "there was no pressure"
    assert ours.prefixes.num_hit_tokens == trusting.prefixes.num_hit_tokens > 0


def test_shared_instructions_stay_and_the_questions_behind_them_leave() -> None:
    ours, trusting = both()
    for traffic in (ours, trusting):
        traffic.shared_instructions(600)
        traffic.check()
    most = (600 - NUM_ADAPTERS) * PROMPT_TOKENS
    assert ours.prefixes.num_hit_tokens > 0.9 * most
    assert trusting.prefixes.num_hit_tokens < 0.7 * most, "there was no pressure"
    assert ours.num_adapter_evictions < trusting.num_adapter_evictions


def test_chats_after_prompts_that_never_came_back_are_kept_again() -> None:
    ours, trusting = both()
    hits = []
    for traffic in (ours, trusting):
        traffic.random_prompts(200)
        traffic.chats(num_rounds=10)
        before = traffic.prefixes.num_hit_tokens
        traffic.chats(num_rounds=20)
        hits.append(traffic.prefixes.num_hit_tokens - before)
    assert hits[0] >= hits[1] > 0
