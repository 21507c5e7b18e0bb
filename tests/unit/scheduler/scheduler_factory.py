"""Builds a scheduler with real pages and prefix cache, and adapters that load by the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from loramux.config.engine import SchedulerConfig
from loramux.errors import AdapterNotFound, AdapterRefused, LoramuxError
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.policies import LruPolicy
from loramux.memory.prefix import PrefixCache, ReuseEstimator
from loramux.memory.reclaim import Reclaimer
from loramux.scheduler.drafts import DraftSource
from loramux.scheduler.scheduler import Scheduler
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request, TokenEvent, TokenLogprob
from loramux.types.sampling import SamplingParams
from loramux.types.step import UNKNOWN_TOKEN, Chunk, NextTokens, SampleRow, StepPlan, StepResult
from tests.memory_factory import tiny_tier

ADAPTER_PAGES = 2
UNKNOWN = "unknown"


@dataclass(eq=False)
class FakeAdapter:
    cid: str
    num_waiters: int = 0
    wait_tick: int = 0
    num_leases: int = 0
    page_ids: list[int] = field(default_factory=list)
    done_s: float | None = None
    """Time at which its load ends; None if it has not started."""
    is_ready: bool = False
    error: LoramuxError | None = None

    @property
    def owner(self) -> Owner:
        return ("adapter", self.cid)


class FakeAdapters:
    """Adapters of two pages that load for load_s once they have pages; loads of "bad..." fail."""

    def __init__(self, pages: PageAllocator, reclaimer: Reclaimer, load_s: float) -> None:
        self._pages = pages
        self._reclaimer = reclaimer
        self._records: dict[str, FakeAdapter] = {}
        self._pending: dict[str, None] = {}
        self._idle: dict[str, FakeAdapter] = {}
        self._ticks = count()
        self.load_s = load_s
        self.is_stuck = False
        """Whether no load can start."""
        reclaimer.add_holder(self)

    def num_pages(self, cid: str) -> int:
        if cid == UNKNOWN:
            raise AdapterNotFound(f"No adapter {cid}.")
        return ADAPTER_PAGES

    def add_waiters(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records.setdefault(cid, FakeAdapter(cid))
            if record.num_waiters == 0:
                record.error = None
                record.wait_tick = next(self._ticks)
            record.num_waiters += 1
            self._update(record)
            if not record.page_ids:
                self._pending[cid] = None

    def remove_waiters(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records[cid]
            record.num_waiters -= 1
            assert record.num_waiters >= 0, f"{cid} was not wanted"
            self._update(record)
            if record.num_waiters == 0:
                record.error = None
                self._pending.pop(cid, None)

    def is_ready(self, cids: Iterable[str]) -> bool:
        records = [self._records[cid] for cid in cids]
        for record in records:
            if record.error is not None:
                raise record.error
        return all(record.is_ready for record in records)

    def acquire(self, cids: Iterable[str]) -> bool:
        records = [self._records[cid] for cid in cids]
        if not all(record.is_ready for record in records):
            return False
        for record in records:
            record.num_leases += 1
            self._update(record)
        return True

    def release(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records[cid]
            record.num_leases -= 1
            assert record.num_leases >= 0, f"{cid} was not leased"
            self._update(record)

    def missing_pages(self, cids: Iterable[str]) -> int:
        return ADAPTER_PAGES * sum(not self._records[cid].page_ids for cid in set(cids))

    def prioritize(self, cids: Iterable[str]) -> None:
        for cid in cids:
            record = self._records[cid]
            record.wait_tick = -next(self._ticks)
            self._update(record)
            if cid in self._pending:
                self._pending = dict.fromkeys([cid, *self._pending])

    def poll(self, now: float) -> None:
        for record in self._records.values():
            if record.done_s is not None and record.done_s <= now:
                self._arrive(record)
        for cid in [] if self.is_stuck else list(self._pending):
            record = self._records[cid]
            # It may evict adapters that were requested after it.
            later = [
                r for r in self._idle.values() if r.num_waiters and r.wait_tick > record.wait_tick
            ]
            if self._reclaimer.num_unprotected + ADAPTER_PAGES * len(later) >= ADAPTER_PAGES:
                self._reclaimer.reclaim(ADAPTER_PAGES)
                record.page_ids = self._pages.allocate(record.owner, ADAPTER_PAGES) or []
                record.done_s = now + self.load_s
                del self._pending[cid]
                if self.load_s == 0:
                    self._arrive(record)

    @property
    def is_loading(self) -> bool:
        return any(record.done_s is not None for record in self._records.values())

    @property
    def num_idle_pages(self) -> int:
        return ADAPTER_PAGES * len(self._idle)

    @property
    def num_protected_pages(self) -> int:
        return ADAPTER_PAGES * sum(record.num_waiters > 0 for record in self._idle.values())

    def evict(self, key: Hashable) -> None:
        assert isinstance(key, tuple)
        record = self._records[key[1]]
        del self._idle[record.cid]
        self._free(record)
        record.is_ready = False
        if record.num_waiters:
            self._pending[record.cid] = None

    def claims(self) -> dict[Owner, list[int]]:
        return {r.owner: r.page_ids for r in self._records.values() if r.page_ids}

    def check_integrity(self, leases: dict[str, int], wants: dict[str, int]) -> None:
        records = self._records.values()
        assert {r.cid: r.num_leases for r in records if r.num_leases} == leases
        assert {r.cid: r.num_waiters for r in records if r.num_waiters} == wants

    def _arrive(self, record: FakeAdapter) -> None:
        record.done_s = None
        if record.cid.startswith("bad"):
            record.error = AdapterRefused("broken", f"{record.cid} is broken.")
            self._free(record)
        else:
            record.is_ready = True
        self._update(record)

    def _free(self, record: FakeAdapter) -> None:
        self._pages.release(record.owner, record.page_ids)
        record.page_ids = []

    def _update(self, record: FakeAdapter) -> None:
        if record.is_ready and record.num_leases == 0:
            self._idle[record.cid] = record
            # Of the awaited adapters, the one that was requested last is evicted first.
            score, is_protected = -float(record.wait_tick), record.num_waiters > 0
            self._reclaimer.add_candidate(
                record.owner, self, score=score, is_protected=is_protected
            )
        else:
            self._idle.pop(record.cid, None)
            self._reclaimer.remove_candidate(record.owner)


Model = Callable[[Iterable[int]], int]
"""The token that follows others."""


class World:
    """An engine without a model: each call of step() is one step of step_s seconds."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        num_pages: int = 64,
        load_s: float = 0.0,
        step_s: float = 0.1,
        has_prefixes: bool = True,
        runs_ahead: bool = False,
        check_every: int = 1,
        drafts: DraftSource | None = None,
        model: Model | None = None,
        **settings: object,
    ) -> None:
        """`model`: the tokens of all steps; without it `end` says them."""
        defaults: dict[str, object] = {
            "max_batch_tokens": 16,
            "max_sequences": 8,
            "block_tokens": 4,
            "max_model_len": 64,
        }
        self.config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.now = 0.0
        self.step_s = step_s
        tier = tiny_tier(num_pages, LruPolicy(), clock=lambda: self.now)
        self.pages = tier.pages
        self.reclaimer = tier.reclaimer
        self.adapters = FakeAdapters(self.pages, self.reclaimer, load_s)
        self.prefixes: PrefixCache | None = None
        if has_prefixes:
            self.prefixes = PrefixCache(
                tier, reuse=ReuseEstimator(num_pages), block_tokens=self.config.block_tokens
            )
        self.scheduler = Scheduler(
            self.config,
            pages=self.pages,
            reclaimer=self.reclaimer,
            adapters=self.adapters,
            prefixes=self.prefixes,
            drafts=drafts,
        )
        self._model = model
        self._early: list[TokenEvent] = []
        self.kv = FakeKV(self.config.block_tokens)
        self.plan: StepPlan | None = None
        self._runs_ahead = runs_ahead
        self._in_flight: StepPlan | None = None
        self._check_every = check_every
        self._num_checks = 0

    def add(self, name: str, num_prompt: int | list[int] = 3, **fields: object) -> None:
        self.scheduler.add(make_request(name, num_prompt, **fields), self.now)
        self.adapters.poll(self.now)

    def begin(self) -> StepPlan | None:
        self.adapters.poll(self.now)
        for page_ids in self.adapters.claims().values():
            self.kv.overwrite(page_ids)
        if self.scheduler.awaits_result:
            self._early += self._land(7)
            self.check()
        self.plan = self.scheduler.next_plan(self.now)
        self.check()
        return self.plan

    def end(self, token: int = 7) -> list[TokenEvent]:
        self.now += self.step_s
        events, self._early = self._early, []
        events += self._land(token)
        if self.plan is not None:
            # The device computes it when it knows the tokens, and who ended with them.
            self._compute(self.plan)
            self.scheduler.launched(self.plan)
            self._in_flight = self.plan
            if not self._runs_ahead:
                events += self._land(token)
        self.check()
        return events

    def _land(self, token: int) -> list[TokenEvent]:
        plan, self._in_flight = self._in_flight, None
        if plan is None:
            return self.scheduler.take_events()
        return self.scheduler.apply(plan, answer(plan, self._model or (lambda _: token)))

    def step(self, token: int = 7) -> list[TokenEvent]:
        self.begin()
        return self.end(token)

    def run(self, limit: int = 400) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for _ in range(limit):
            if not self.scheduler.has_work:
                return events
            events += self.step()
        raise AssertionError("the queue does not drain")

    def running(self) -> list[str]:
        """Return the request ids in the current plan, in its order."""
        assert self.plan is not None
        names = {s.sequence_id: s.request.request_id for s in self.scheduler._sequences.values()}
        return [names[chunk.sequence_id] for chunk in self.plan.chunks]

    def _compute(self, plan: StepPlan) -> None:
        own = self.scheduler.claims()
        for chunk in plan.chunks:
            sequence = self.scheduler._sequences.get(chunk.sequence_id)
            if sequence is None:
                self.kv.scribble(chunk)
                continue
            stop = chunk.start + len(chunk.token_ids)
            tokens = sequence.tokens(0, stop - chunk.num_drafts) + list(chunk.drafts)
            first = chunk.start // self.config.block_tokens
            last = (stop - 1) // self.config.block_tokens
            written = set(chunk.page_ids[first : last + 1])
            assert written <= set(own[("kv", chunk.sequence_id)]), "writes into a shared page"
            self.kv.compute(chunk, tokens, sequence.request)

    def check(self) -> None:
        self._num_checks += 1
        if self._num_checks % self._check_every:
            return
        scheduler = self.scheduler
        scheduler.check_integrity()
        self.adapters.check_integrity(scheduler.leases(), scheduler.waiting_adapters())
        claims = {**scheduler.claims(), **self.adapters.claims()}
        if self.prefixes is not None:
            self.prefixes.check_integrity(scheduler.prefix_leases())
            claims |= self.prefixes.claims()
        self.reclaimer.check_integrity()
        self.pages.check_integrity(claims)


def make_request(name: str, num_prompt: int | list[int] = 3, **fields: object) -> Request:
    """Take fields of Request and SamplingParams, and `cid` for a selection of one adapter."""
    own = {key: fields.pop(key) for key in Request.__struct_fields__ if key in fields}
    cid = fields.pop("cid", None)
    if cid is not None:
        own["selection"] = ((str(cid), 1.0),)
    tokens = range(1, num_prompt + 1) if isinstance(num_prompt, int) else num_prompt
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(**{"max_tokens": 4, **fields}),  # type: ignore[arg-type]
        eos_token_ids=(99,),
        **own,  # type: ignore[arg-type]
    )


def answer(plan: StepPlan, model: Model) -> StepResult:
    """Sample and score the rows of a plan, as a runner does."""
    result = StepResult({})
    for chunk in plan.chunks:
        found: list[int] = []
        for use in (rows.use for rows in chunk.rows):
            if isinstance(use, SampleRow):
                before = [*use.prompt_token_ids, *use.output_token_ids]
                found.append(model(before[:-1] if before[-1] == UNKNOWN_TOKEN else before))
            elif isinstance(use, NextTokens):
                scored = [TokenLogprob(token_id, 0.0, 1) for token_id in use.token_ids]
                result.logprobs[chunk.sequence_id] = scored
        if found:
            wrong = (i for i, draft in enumerate(chunk.drafts) if draft != found[i])
            result.accepted[chunk.sequence_id] = found[: next(wrong, chunk.num_drafts) + 1]
    return result


def hashed(token_ids: Iterable[int]) -> int:
    """Return a model whose token depends on all tokens before it; 99 ends one answer of 17."""
    state = 0
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % 65521
    return 99 if state % 17 == 3 else 1 + state % 3


class Counts:
    """A source of drafts without a limit of rows, which counts nothing."""

    max_rows = 1000
    num_drafts: Counter[str] = Counter()
    num_accepted: Counter[str] = Counter()


class Always(Counts):
    """Proposes the same drafts again and again."""

    def __init__(self, drafts: list[int]) -> None:
        self._drafts = drafts

    def awaits(self, sequence: Sequence) -> bool:
        return True

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        return self._drafts[:limit]

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts


class Guesses(Counts):
    """Knows what a model says, and is wrong at times."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._chance = Random(seed)

    def awaits(self, sequence: Sequence) -> bool:
        return self._chance.random() < 0.7

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        known = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        for _ in range(self._chance.randint(0, min(limit, 6))):
            is_wrong = self._chance.random() < 0.2
            known.append(5 if is_wrong else self._model(known))
        return known[sequence.num_tokens :]

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts


class FakeKV:
    """A KV cache in which each position records the tokens and adapters that it depends on."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: dict[tuple[int, int], int] = {}

    def overwrite(self, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            for offset in range(self._block_tokens):
                self._slots.pop((page_id, offset), None)

    def scribble(self, chunk: Chunk) -> None:
        """Drop the positions of a sequence that ended while they were planned."""
        for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
            page_id = chunk.page_ids[position // self._block_tokens]
            self._slots[page_id, position % self._block_tokens] = -1

    def compute(self, chunk: Chunk, token_ids: list[int], request: Request) -> None:
        """`token_ids` are all tokens of the sequence up to the end of the chunk."""
        state = 0
        for position, token_id in enumerate(token_ids):
            selection = request.selection if position >= request.adapter_start else ()
            if position >= chunk.start:
                assert chunk.selection == selection, f"the wrong adapter at {position}"
            state = hash((state, token_id, selection))
            page_id = chunk.page_ids[position // self._block_tokens]
            slot = (page_id, position % self._block_tokens)
            if position < chunk.start:
                assert self._slots.get(slot) == state, "attention would read somebody else's keys"
            else:
                self._slots[slot] = state


def wide(max_sequences: int = 2, **settings: object) -> World:
    """Return a world in which everything fits and only affinity decides."""
    settings = {"num_pages": 5000, "max_wait_s": 1e9, "max_model_len": 20_000, **settings}
    settings |= {"max_batch_tokens": 2 * max_sequences + 6, "check_every": 50}
    return World(max_sequences=max_sequences, has_prefixes=False, **settings)  # type: ignore[arg-type]


def occupied(**settings: object) -> World:
    """Return a world in which x runs for long and the other slot is free at the next step."""
    world = wide(**settings)
    world.add("x1", 3, cid="x", max_tokens=10_000)
    world.add("base", 3, max_tokens=2)
    world.step()
    return world


def sequence_of(world: World, name: str) -> Sequence:
    return next(s for s in world.scheduler._sequences.values() if s.request.request_id == name)
