"""What runs in the next step. Pure Python: no torch, no clock; pages and adapters are asked for."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from loramux.config.engine import SchedulerConfig
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.prefix import PrefixLease
from loramux.scheduler.admission import Admission
from loramux.scheduler.batch import AdapterGate, Batch, PageReclaimer, PrefixGate
from loramux.scheduler.events import (
    error_event,
    finish_reason,
    length_event,
    timeout_event,
    token_event,
)
from loramux.scheduler.fairness import OUTPUT_TOKEN_COST, FairShares, check_shares
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request, TokenEvent
from loramux.types.step import UNKNOWN_TOKEN, Chunk, StepPlan, StepResult

# An adapter keeps this part of all places against others of its tenant: among hundreds of adapters
# one has two requests in the batch and another none by chance, and to change that over and over
# costs more than it gives.
_KEPT_PART = 64


@dataclass(slots=True)
class _Step:
    now: float
    budget: int
    order: list[Sequence]
    """All that ran before the step; who comes last gives way first."""
    chunks: list[Chunk] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)


class Scheduler:
    """Continuous batching: every running sequence's next token first, then chunks of prompts.

    A request waits until its adapters are on the device; others go past it meanwhile. Free places
    go to the tenant who has had least, inside it to the adapter that has had least, and there to
    the oldest; `fcfs`: simply to the oldest that is ready. Counters grow by one for each prompt
    token that is really computed and by two for each token of output, divided by the weight; who
    had nothing waiting is lifted to the least of the others. A request whose adapters run already
    goes before the first in this order; if there is none, one of the first one's tenant for whose
    adapters more requests wait. It does so for max_wait_s at most, while its adapter is less than
    MAX_ADAPTER_LEAD ahead of the first one's (another tenant: MAX_TENANT_LEAD), and never before
    one that is owed a place.

    The bound (fair): a request starts no later than

        max_wait_s + the load of its adapters + three steps

    after its arrival if, by then, its tenant has had less than another one who runs (inside a
    tenant: its adapter less than another that runs), and has nothing running, or with this one at
    most half as many sequences as the other keeps. Those who have had still less go first, and who
    has but one request open is not taken from, nor inside a tenant an adapter with no more than a
    64th of all places. The means: sequences of who had most are preempted, the newest first, until
    there are a place, places for its adapters, and pages for these and for its prompt. The steps:
    to see that it is late, that pages were freed for the load, and that the load has ended. Each
    place is kept for max_wait_s, save against those who came first when it was given, so that two
    who are owed by each other in turn do not change places all the time.

    When pages run out, who comes last in the order gives its own back and is computed again later,
    from the prefix cache where that still has them. Who comes first always goes on, and counters
    change with real progress only, so the queue always drains.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pages: PageAllocator,
        reclaimer: PageReclaimer,
        adapters: AdapterGate,
        prefixes: PrefixGate | None = None,
    ) -> None:
        self.config = config
        self._num_pages = pages.num_pages
        self._adapters = adapters
        self._shares = FairShares(num_kept=config.max_sequences // _KEPT_PART)
        self._batch = Batch(
            config, pages=pages, reclaimer=reclaimer, adapters=adapters, prefixes=prefixes
        )
        self._admission = Admission(
            config, batch=self._batch, reclaimer=reclaimer, adapters=adapters, fail=self._fail
        )
        self._waiting = self._admission.waiting
        self._sequences: dict[int, Sequence] = {}
        self._by_request: dict[str, dict[int, Sequence]] = {}
        # (when, sequence id); those that have ended are skipped.
        self._deadlines: list[tuple[float, int]] = []
        self._events: list[TokenEvent] = []
        self._ids = count()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._events)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running_adapters(self) -> int:
        """Distinct ones in the batch."""
        return self._batch.num_adapters

    @property
    def num_loading(self) -> int:
        """Sequences that the last plan went past because an adapter was not there yet."""
        return self._admission.num_loading

    @property
    def num_preemptions(self) -> int:
        return self._admission.num_preemptions

    def open_choices(self, request_id: str) -> list[int]:
        """Which of the request's choices have not ended; none for an unknown id."""
        return list(self._by_request.get(request_id, {}))

    def add(self, request: Request, now: float) -> None:
        """Queues a request, or raises when it could never run here."""
        if request.request_id in self._by_request:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
        check_shares(request)
        max_length = self._max_length(request)
        self._want(request)
        choices = self._by_request[request.request_id] = {}
        for index in range(request.params.n):
            sequence = Sequence(
                next(self._ids),
                request,
                index,
                max_length=max_length,
                standing=self._shares.arrive(request),
                now=now,
            )
            choices[index] = self._sequences[sequence.sequence_id] = sequence
            self._waiting.add(sequence)
            if request.timeout_s is not None:
                deadline = (now + request.timeout_s, sequence.sequence_id)
                heapq.heappush(self._deadlines, deadline)

    def abort(self, request_id: str) -> None:
        """Forgets a request; its pages are free before the next step. Unknown ids are fine."""
        for sequence in list(self._by_request.get(request_id, {}).values()):
            self._drop(sequence)

    def finish(self, request_id: str, index: int) -> None:
        """Ends one choice from outside: its text ran into a stop string."""
        sequence = self._by_request.get(request_id, {}).get(index)
        if sequence is not None:
            self._drop(sequence)

    def next_plan(self, now: float) -> StepPlan | None:
        """None: nothing can be computed now; what remains waits for its adapters."""
        self._expire(now)
        self._admission.begin_step(now)
        step = _Step(now, self.config.max_batch_tokens, self._waiting.in_order(self._batch))
        # Tokens before prompts, each of them in order.
        for sequence in self._plan_decodes(step):
            self._plan(sequence, step)
        if step.budget > 0:
            for sequence in self._admission.admitted(now):
                self._plan(sequence, step)
                if step.budget == 0:
                    break
        if not step.chunks:
            self._admission.hold_for_first(now)
            return None
        return StepPlan(chunks=tuple(step.chunks))

    def launched(self, plan: StepPlan) -> None:
        """The plan is on the device: the next one may build on tokens that nobody knows yet.

        The result of the one before it has been applied by now.
        """
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed += len(chunk.token_ids)
            if chunk.sample is not None:
                sequence.output_token_ids.append(UNKNOWN_TOKEN)

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Of a plan that was launched."""
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            num_prompt = len(sequence.prompt_token_ids)
            if chunk.start < num_prompt:
                sequence.prompt_logprobs += result.prompt_logprobs.get(chunk.sequence_id, [])
                ends_prompt = num_prompt <= chunk.start + len(chunk.token_ids)
                if ends_prompt and sequence in self._batch:
                    self._batch.share(sequence)
            if chunk.sample is not None:
                self._accept(sequence, result)
            elif sequence.num_uncomputed == 0:
                self._end(sequence, length_event(sequence))
        return self.take_events()

    def fail(self, plan: StepPlan, message: str) -> None:
        """Ends all who are in a plan that could not be launched."""
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is not None:
                self._fail(sequence, "memory", message)

    def take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def claims(self) -> dict[Owner, list[int]]:
        """Pages that are a sequence's own; shared ones belong to the prefix cache."""
        return self._batch.claims()

    def leases(self) -> dict[str, int]:
        """CID -> sequences that keep it on the device: those that run, and one that is about to."""
        return dict(self._batch.leases() + self._admission.held_adapters())

    def running_adapters(self) -> dict[str, int]:
        """CID -> sequences in the batch that use it."""
        return dict(self._batch.leases())

    def prefix_leases(self) -> list[PrefixLease]:
        return self._batch.prefix_leases()

    def waiting_adapters(self) -> dict[str, int]:
        """CID -> sequences that wait with it; so often each is wanted."""
        return dict(Counter(cid for sequence in self._waiting for cid in sequence.cids))

    def check_integrity(self) -> None:
        running = {sequence.sequence_id for sequence in self._batch}
        waiting = {sequence.sequence_id for sequence in self._waiting}
        assert not running & waiting, "a sequence is both running and waiting"
        assert running | waiting == self._sequences.keys(), "a sequence is lost"
        by_request = {s.sequence_id for c in self._by_request.values() for s in c.values()}
        assert by_request == self._sequences.keys(), "a request lost a choice"
        assert all(self._by_request.values()), "a finished request is still listed"
        for sequence in self._waiting:
            assert not sequence.page_ids and sequence.num_computed == 0, "waiting with pages"
            assert sequence.lease is None, "waiting with a lease"
        self._waiting.check_integrity()
        self._batch.check_integrity()
        self._shares.check_integrity(
            (sequence.request for sequence in self._waiting),
            (sequence.request for sequence in self._batch),
        )

    def _max_length(self, request: Request) -> int:
        """Tokens that the request may grow to; raises if not even its prompt can ever run."""
        num_prompt = len(request.prompt_token_ids)
        limit = self.config.max_model_len
        if num_prompt == 0:
            raise InvalidRequest("The prompt is empty: give at least one token.", param="prompt")
        num_needed = num_prompt + min(1, request.params.max_tokens)
        if num_needed > limit:
            raise InvalidRequest(
                f"The prompt has {num_prompt} tokens, and this server takes {limit} for prompt and "
                "output together. Shorten the prompt.",
                param="prompt",
            )
        cids = {cid for cid, _ in request.selection}
        if self.config.max_loras is not None and len(cids) > self.config.max_loras:
            raise InvalidRequest(
                f"The request names {len(cids)} adapters, and this server runs "
                f"{self.config.max_loras} at once. Name fewer, or raise max_loras."
            )
        adapter_pages = sum(self._adapters.num_pages(cid) for cid in cids)
        room = (self._num_pages - adapter_pages) * self.config.block_tokens
        if num_needed > room:
            raise DoesNotFit(
                f"The request needs {self._batch.pages_for(num_needed)} pages for {num_needed} "
                f"tokens and {adapter_pages} for its adapters, and the pool has {self._num_pages}. "
                "Shorten the prompt or give the pool more memory."
            )
        return min(limit, room)

    def _want(self, request: Request) -> None:
        """Once for each choice, or not at all."""
        cids = [cid for cid, _ in request.selection]
        num_wanted = 0
        try:
            for _ in range(request.params.n):
                self._adapters.add_waiters(cids)
                num_wanted += 1
        except BaseException:
            for _ in range(num_wanted):
                self._adapters.remove_waiters(cids)
            raise

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self._sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                self._end(sequence, timeout_event(sequence))

    def _plan_decodes(self, step: _Step) -> list[Sequence]:
        """As _plan, for all who are decoding: one token each, no prompt to charge; the others."""
        batch, block_tokens = self._batch, self.config.block_tokens
        others = []
        for sequence in step.order:
            if not sequence.is_decoding:
                others.append(sequence)
                continue
            if sequence.is_full and sequence.has_unknown or sequence not in batch:
                continue
            num_tokens = sequence.num_computed + 1
            has_page = num_tokens <= len(sequence.page_ids) * block_tokens
            if step.budget and (has_page or self._reserve(sequence, num_tokens, step)):
                step.planned.add(sequence.sequence_id)
                step.chunks.append(sequence.decode_chunk())
                step.budget -= 1
        return others

    def _plan(self, sequence: Sequence, step: _Step) -> None:
        """Adds the sequence's chunk, unless there is no budget or it had to give way."""
        num_tokens = min(sequence.num_uncomputed, step.budget)
        if num_tokens == 0 or sequence not in self._batch:
            return
        if sequence.has_unknown and sequence.is_full:
            return
        if not self._reserve(sequence, sequence.num_computed + num_tokens, step):
            return
        sequence.charge_prompt(num_tokens)
        step.planned.add(sequence.sequence_id)
        step.chunks.append(sequence.chunk(num_tokens))
        step.budget -= num_tokens

    def _reserve(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Pages at the cost of those who come later; False: there are none for it now."""
        num_held = self._admission.num_held_against(sequence)
        while not self._batch.grow(sequence, num_tokens, num_held=num_held):
            if len(self._batch) == 1:
                # Somebody's load has the pages, or will have them; else no more will ever come.
                is_last = num_held == 0 and not self._adapters.is_loading
                if is_last and not sequence.has_unknown:
                    self._end(sequence, length_event(sequence))
                return False
            victim = next(
                other
                for other in reversed(step.order)
                if other in self._batch and other.sequence_id not in step.planned
            )
            self._admission.preempt(victim, step.now)
            if victim is sequence:
                return False
        return True

    def _accept(self, sequence: Sequence, result: StepResult) -> None:
        """Append the step's tokens in place of the unknown one, up to one that ends it."""
        token_ids = result.token_ids[sequence.sequence_id]
        logprobs = result.logprobs.get(sequence.sequence_id)
        sequence.output_token_ids.pop()
        for number, token_id in enumerate(token_ids):
            sequence.output_token_ids.append(token_id)
            sequence.standing.charge(OUTPUT_TOKEN_COST)
            reason = finish_reason(sequence, token_id)
            logprob = None if logprobs is None else logprobs[number]
            event = token_event(sequence, token_id, reason, logprob)
            if reason is not None:
                self._end(sequence, event)
                return
            self._events.append(event)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        for choice in list(self._by_request[sequence.request.request_id].values()):
            self._end(choice, error_event(choice, code, message))

    def _end(self, sequence: Sequence, event: TokenEvent) -> None:
        self._events.append(event)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """The one way out of the scheduler: frees everything that the sequence holds."""
        is_running = sequence in self._batch
        if is_running:
            self._batch.remove(sequence)
        else:
            self._admission.leave(sequence)
        self._shares.leave(sequence.request, sequence.standing, is_running=is_running)
        del self._sequences[sequence.sequence_id]
        choices = self._by_request[sequence.request.request_id]
        del choices[sequence.index]
        if not choices:
            del self._by_request[sequence.request.request_id]
