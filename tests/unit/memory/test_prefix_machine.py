"""State machine: the prefix cache against a plain dict, with adapters in the same pool."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loramux.memory.pages import Owner
from loramux.memory.prefix import (
    ABSENT_ADAPTER_FACTOR,
    PrefixCache,
    PrefixKey,
    PrefixLease,
    ReuseEstimator,
)
from loramux.memory.reclaim import PageTier
from loramux.memory.records import ResidentAdapter
from tests.memory_factory import layout_of_rank, tiny_tier

BLOCK = 2
NUM_PAGES = 20
MAX_RUNNING = 4
CIDS = ("a", "b")
ADAPTER_PAGES = 2
KEYS: list[PrefixKey] = [
    ("base", (), ""),
    ("base", (("a", 1.0),), ""),
    ("base", (("a", 0.5),), ""),
    ("base", (("a", 1.0),), "salt"),
    ("base", (("a", 1.0), ("b", 1.0)), ""),
    ("other", (("a", 1.0),), ""),
]
Prefix = tuple[int, ...]
# A key, and the start of an aLoRA or 0.
Place = tuple[PrefixKey, int]
# Prompts that begin alike, so that most find something; a few blocks that only outputs reach.
PROMPTS = [
    [0, 0, 1, 1, 0, 0, 1, 1],
    [0, 0, 1, 1, 0, 0],
    [0, 0, 1, 1, 1, 0, 1, 0],
    [0, 0, 1],
    [1, 1, 0, 0, 1],
]
plain = [(key, 0) for key in [KEYS[1]] * 4 + [KEYS[4]] * 2 + KEYS]
activated = [(key, start) for key in (KEYS[1], KEYS[4]) for start in (1, 2, 3, 4, 5, 6)]
activated += [(key, 3) for key in KEYS[2:]]
places = st.sampled_from([*plain, (KEYS[0], 0), *activated])
prompts = st.sampled_from(PROMPTS)


def cids_of(place: Place) -> set[str]:
    return {cid for cid, _ in place[0][1]}


def score_of(last_use: float, cost_s: float, size: int) -> float:
    """Return a score that differs for different last uses, so that the victim is certain."""
    return last_use * (cost_s / size + 1e-3)


class LastUsePolicy:
    def __init__(self) -> None:
        self.last_uses: dict[Hashable, float] = {}

    def used(self, key: Hashable, now: float) -> None:
        self.last_uses[key] = now

    def score(self, key: Hashable, *, cost_s: float, size: int) -> float:
        return score_of(self.last_uses[key], cost_s, size)

    def reuse_penalty(self, factor: float) -> float:
        return 0.0

    def evicted(self, fraction: float) -> None: ...

    def forget(self, key: Hashable) -> None:
        del self.last_uses[key]


@dataclass(eq=False)
class Running:
    place: Place
    owner: Owner
    lease: PrefixLease
    page_ids: list[int]
    token_ids: list[int]
    """Tokens computed so far."""
    prompt: list[int]
    is_dropped: bool = False

    @property
    def shared(self) -> int:
        return len(self.lease.page_ids)

    @property
    def num_kept(self) -> int:
        """Number of its first blocks that stay when the adapter is unregistered."""
        return self.place[1] // BLOCK if self.is_dropped else NUM_PAGES


def entry_of(place: Place, prefix: Prefix) -> tuple[Place, Prefix]:
    """Return whose prefix it is: up to the start of an aLoRA it is the base's."""
    (base, _, salt), start = place
    return (place if len(prefix) > start else ((base, (), salt), 0)), prefix


@dataclass
class Cached:
    page_id: int
    last_use: float


@dataclass
class FakeAdapters:
    """Idle adapters that call the prefix cache when they arrive and leave."""

    tier: PageTier
    cache: PrefixCache
    held: dict[str, list[int]] = field(default_factory=dict)

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple)
        self.tier.pages.release(("adapter", key[1]), self.held.pop(key[1]))
        del self.tier.placement.device[key[1]]
        self.cache.adapter_moved(key[1])

    @property
    def num_idle_pages(self) -> int:
        return len(self.held) * ADAPTER_PAGES

    @property
    def num_protected_pages(self) -> int:
        return 0


class PrefixMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.policy = LastUsePolicy()
        self.tier = tiny_tier(NUM_PAGES, self.policy, clock=lambda: self.now)
        self.tier.costs.token_s = 1 / BLOCK
        self.pages, self.reclaimer = self.tier.pages, self.tier.reclaimer
        self.cache = PrefixCache(self.tier, reuse=ReuseEstimator(NUM_PAGES), block_tokens=BLOCK)
        self.adapters = FakeAdapters(self.tier, self.cache)
        self.reclaimer.add_holder(self.adapters)
        self.ids = count()
        self.running: list[Running] = []
        self.cached: dict[tuple[Place, Prefix], Cached] = {}
        self.adapter_uses: dict[str, float] = {}
        self.num_evicted = 0

    # What the model says.

    def blocks_of(self, tokens: list[int]) -> list[Prefix]:
        return [tuple(tokens[:stop]) for stop in range(BLOCK, len(tokens) + 1, BLOCK)]

    def expected_match(self, place: Place, tokens: list[int]) -> list[Cached]:
        found = []
        for prefix in self.blocks_of(tokens):
            if entry_of(place, prefix) not in self.cached:
                break
            found.append(self.cached[entry_of(place, prefix)])
        return found

    def locked(self) -> set[tuple[Place, Prefix]]:
        return {
            entry_of(r.place, prefix)
            for r in self.running
            for prefix in self.blocks_of(r.token_ids)[: min(r.shared, r.num_kept)]
        }

    def dropped_pages(self) -> set[int]:
        return {page for r in self.running for page in r.lease.page_ids[r.num_kept :]}

    def num_idle(self) -> int:
        return len(self.cached.keys() - self.locked())

    def candidates(self) -> list[tuple[float, tuple[Place, Prefix] | str]]:
        parents = {entry_of(place, prefix[:-BLOCK]) for place, prefix in self.cached}
        scores: list[tuple[float, tuple[Place, Prefix] | str]] = [
            (score_of(last_use, 1.0, ADAPTER_PAGES), cid)
            for cid, last_use in self.adapter_uses.items()
        ]
        for entry in self.cached.keys() - self.locked() - parents:
            is_present = cids_of(entry[0]) <= self.adapter_uses.keys()
            cost_s = 1.0 if is_present else ABSENT_ADAPTER_FACTOR
            scores.append((score_of(self.cached[entry].last_use, cost_s, 1), entry))
        return scores

    def expect_reclaim(self, num_pages: int) -> bool:
        """Do to the model what reclaim() must do."""
        free = self.pages.num_free
        if free + self.num_idle() + ADAPTER_PAGES * len(self.adapter_uses) < num_pages:
            return False
        while free < num_pages:
            _, victim = min(self.candidates(), key=lambda pair: pair[0])
            if isinstance(victim, str):
                del self.adapter_uses[victim]
                free += ADAPTER_PAGES
            else:
                del self.cached[victim]
                self.num_evicted += 1
                free += 1
        return True

    def reclaim(self, num_pages: int) -> bool:
        expected = self.expect_reclaim(num_pages)
        assert self.reclaimer.reclaim(num_pages) == expected
        return expected

    # What happens.

    @precondition(lambda self: len(self.running) < MAX_RUNNING)
    @rule(place=places, tokens=prompts)
    def start(self, place: Place, tokens: list[int]) -> None:
        self.arrive(place, tokens)

    def arrive(self, place: Place, tokens: list[int]) -> Running:
        self.now += 1
        key, start = place
        match = self.expected_match(place, tokens)
        assert self.cache.peek(key, tokens, start) == len(match) * BLOCK
        lease = self.cache.acquire(key, tokens, start)
        assert lease.page_ids == [cached.page_id for cached in match]
        for cached in match:
            cached.last_use = self.now
        owner: Owner = ("kv", next(self.ids))
        computed = tokens[: lease.num_tokens]
        running = Running(place, owner, lease, list(lease.page_ids), computed, tokens)
        self.running.append(running)
        return running

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), commits=st.booleans())
    def compute(self, data: st.DataObject, num_tokens: int, commits: bool) -> None:
        """Return the next tokens of the prompt, and then an output that is the same for all."""
        running = data.draw(st.sampled_from(self.running))
        self.extend(running, num_tokens)
        if commits:
            self.share(running)

    @rule(place=places, tokens=prompts)
    def serve(self, place: Place, tokens: list[int]) -> None:
        """Run a request from its arrival to its end, with nothing in between."""
        running = self.arrive(place, tokens)
        self.extend(running, len(tokens) - len(running.token_ids))
        self.share(running)
        self.finish(running)

    @precondition(lambda self: len(self.running) < MAX_RUNNING)
    @rule(place=places, tokens=prompts)
    def equal_prompts(self, place: Place, tokens: list[int]) -> None:
        """Two that compute the same, to be shared later."""
        for running in [self.arrive(place, tokens), self.arrive(place, tokens)]:
            self.extend(running, len(tokens) - len(running.token_ids))

    def extend(self, running: Running, num_tokens: int) -> None:
        num_computed = len(running.token_ids)
        more = [*running.prompt, *[1] * 8][num_computed : num_computed + num_tokens]
        missing = -(-(len(running.token_ids) + len(more)) // BLOCK) - len(running.page_ids)
        if self.reclaim(missing):
            page_ids = self.pages.allocate(running.owner, missing)
            assert page_ids is not None
            running.page_ids += page_ids
            running.token_ids += more

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.share(data.draw(st.sampled_from(self.running)))

    def share(self, running: Running) -> None:
        self.now += 1
        expected = list(running.page_ids)
        prefixes = self.blocks_of(running.token_ids)[: running.num_kept]
        num_shared = max(running.shared, len(prefixes))
        for index in range(running.shared, len(prefixes)):
            entry = entry_of(running.place, prefixes[index])
            self.cached.setdefault(entry, Cached(expected[index], 0)).last_use = self.now
            expected[index] = self.cached[entry].page_id
        running.page_ids = self.cache.commit(
            running.lease, running.token_ids, running.page_ids, running.owner
        )
        assert running.page_ids == expected
        assert running.lease.page_ids == expected[:num_shared]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.running)))

    def finish(self, running: Running) -> None:
        self.running.remove(running)
        self.pages.release(running.owner, running.page_ids[running.shared :])
        self.cache.release(running.lease)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def pressure(self, num_pages: int) -> None:
        self.reclaim(num_pages)

    @rule(cid=st.sampled_from(CIDS))
    def load(self, cid: str) -> None:
        if cid in self.adapter_uses or not self.reclaim(ADAPTER_PAGES):
            return
        self.now += 1
        owner: Owner = ("adapter", cid)
        page_ids = self.pages.allocate(owner, ADAPTER_PAGES)
        assert page_ids is not None
        self.adapters.held[cid] = page_ids
        self.adapter_uses[cid] = self.now
        self.tier.placement.device[cid] = ResidentAdapter(cid, layout_of_rank(1), page_ids)
        self.cache.adapter_moved(cid)
        score = score_of(self.now, 1.0, ADAPTER_PAGES)
        self.reclaimer.add_candidate(owner, self.adapters, score=score)

    @rule(cid=st.sampled_from(CIDS))
    def drop(self, cid: str) -> None:
        """Evicts the adapter, if it is on the device, and unregisters it."""
        if self.adapter_uses.pop(cid, None) is not None:
            self.reclaimer.remove_candidate(("adapter", cid))
            self.adapters.evict(("adapter", cid))
        self.cache.drop(cid)
        self.cached = {
            entry: page for entry, page in self.cached.items() if cid not in cids_of(entry[0])
        }
        for running in self.running:
            running.is_dropped |= cid in cids_of(running.place)

    @invariant()
    def nothing_is_lost(self) -> None:
        claims = self.cache.claims()
        adapters: dict[Owner, list[int]] = {
            ("adapter", cid): page_ids for cid, page_ids in self.adapters.held.items()
        }
        own = {r.owner: r.page_ids[r.shared :] for r in self.running}
        self.pages.check_integrity({**claims, **adapters, **own})
        self.cache.check_integrity(r.lease for r in self.running)
        self.reclaimer.check_integrity()
        assert self.policy.last_uses.keys() == claims.keys()

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        pages = {page for page_ids in self.cache.claims().values() for page in page_ids}
        cached = {entry.page_id for entry in self.cached.values()}
        assert len(cached) == len(self.cached), "two prefixes share a page"
        assert not cached & self.dropped_pages()
        assert pages == cached | self.dropped_pages()
        for (key, start), prefix in self.cached:
            assert self.cache.peek(key, prefix, start) == len(prefix)
        assert self.cache.num_idle_pages == self.num_idle()
        assert self.cache.num_evicted_pages == self.num_evicted
        assert self.adapters.held.keys() == self.adapter_uses.keys()
        for cid in CIDS:
            num_pages = sum(cid in cids_of(place) for place, _ in self.cached)
            assert self.cache.cached_tokens(cid) == num_pages * BLOCK


TestPrefixMachine = PrefixMachine.TestCase
