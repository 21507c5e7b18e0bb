"""Plans the next step. Pure Python without torch or a clock; the caller passes the time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence as Constraints
from dataclasses import dataclass, field
from itertools import count

from loramux.config.engine import SchedulerConfig
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.memory.pages import Owner, PageAllocator
from loramux.memory.prefix import PrefixLease
from loramux.scheduler.admission import Admission
from loramux.scheduler.batch import AdapterGate, Batch, PageReclaimer, PrefixGate
from loramux.scheduler.drafts import DraftSource
from loramux.scheduler.events import (
    end_event,
    error_event,
    finish_reason,
    full_event,
    numeric_message,
    timeout_event,
    token_event,
)
from loramux.scheduler.fairness import OUTPUT_TOKEN_COST, FairShares, check_shares
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request, TokenEvent
from loramux.types.step import (
    UNKNOWN_TOKEN,
    Chunk,
    StepPlan,
    StepResult,
    TokenConstraint,
)

# R10: the slots of an adapter that are protected from others of its tenant are max_sequences
# divided by this. Among hundreds of adapters one runs two sequences and another none by chance, and
# preemptions for such differences cost more than they give.
_PROTECTED_DIVISOR = 64


@dataclass(slots=True)
class _Step:
    now: float
    budget: int
    order: list[Sequence]
    """The running sequences in order (R4); the last one is preempted first (R13)."""
    chunks: list[Chunk] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)


class Scheduler:
    """Plans the steps by continuous batching: decodes first, then chunks of prefills.

    docs/scheduling.md describes the rules of admission, fairness and preemption (R1 to R15).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pages: PageAllocator,
        reclaimer: PageReclaimer,
        adapters: AdapterGate,
        prefixes: PrefixGate | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        self.config = config
        self.drafts = drafts
        # Sequences whose chunk in flight has drafts.
        self._drafted: set[int] = set()
        self._num_pages = pages.num_pages
        self._adapters = adapters
        self._shares = FairShares(num_protected_slots=config.max_sequences // _PROTECTED_DIVISOR)
        self._batch = Batch(
            config, pages=pages, reclaimer=reclaimer, adapters=adapters, prefixes=prefixes
        )
        self._admission = Admission(
            config, batch=self._batch, reclaimer=reclaimer, adapters=adapters, fail=self._fail
        )
        self._waiting = self._admission.waiting
        self._sequences: dict[int, Sequence] = {}
        self._by_request: dict[str, dict[int, Sequence]] = {}
        # (time, sequence id); ended sequences are skipped.
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
        """Returns the number of distinct adapters in the batch."""
        return self._batch.num_adapters

    @property
    def num_loading(self) -> int:
        """Returns how many sequences the last plan skipped as an adapter was not loaded."""
        return self._admission.num_loading

    @property
    def awaits_result(self) -> bool:
        """Returns whether the result in flight must be applied before the next plan.

        The number of its tokens decides where the next chunk starts, or drafts may follow them.
        """
        if self.drafts is None:
            return False
        if self._drafted or len(self._batch) >= self.drafts.max_rows:
            return bool(self._drafted)
        return any(
            sequence.has_unknown and sequence.num_draftable > 0 and self.drafts.awaits(sequence)
            for sequence in self._batch
        )

    @property
    def num_preemptions(self) -> int:
        return self._admission.num_preemptions

    def add(
        self, request: Request, now: float, constraints: Constraints[TokenConstraint] = ()
    ) -> None:
        """Queues a request; raises if it could never run here.

        `constraints`: one for each choice, or none.
        """
        max_length = self.check(request)
        self._add_waiters(request)
        choices = self._by_request[request.request_id] = {}
        for index in range(request.params.n):
            sequence = Sequence(
                next(self._ids),
                request,
                index,
                max_length=max_length,
                clients=self._shares.arrive(request),
                now=now,
                constraint=constraints[index] if constraints else None,
            )
            choices[index] = self._sequences[sequence.sequence_id] = sequence
            self._waiting.add(sequence)
            if request.timeout_s is not None:
                deadline = (now + request.timeout_s, sequence.sequence_id)
                heapq.heappush(self._deadlines, deadline)

    def check(self, request: Request) -> int:
        """Return the maximum length of a request; raise if it could never run here."""
        if request.request_id in self._by_request:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
        check_shares(request)
        return self._max_length(request)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages at once; ignore an unknown id."""
        for sequence in list(self._by_request.get(request_id, {}).values()):
            self._drop(sequence)

    def finish(self, request_id: str, index: int) -> None:
        """End one choice whose text contains a stop string."""
        sequence = self._by_request.get(request_id, {}).get(index)
        if sequence is not None:
            self._drop(sequence)

    def next_plan(self, now: float) -> StepPlan | None:
        """Return the plan of the next step; None if all sequences wait for their adapters."""
        assert not self._drafted, "the result of drafts was not applied"
        self._expire(now)
        self._admission.begin_step(now)
        step = _Step(now, self.config.max_batch_tokens, self._waiting.in_order(self._batch))
        # Decodes before prefills, each in order.
        for sequence in self._plan_decodes(step):
            self._plan(sequence, step)
        if step.budget > 0:
            for sequence in self._admission.admitted(now):
                self._plan(sequence, step)
                if step.budget == 0:
                    break
        if not step.chunks:
            self._admission.reserve_for_first(now)
            return None
        return StepPlan(tuple(step.chunks))

    def launched(self, plan: StepPlan) -> None:
        """Record that a plan was launched; the next plan may build on its unknown tokens.

        The result of the plan before it must have been applied.
        """
        sequences = self._sequences
        for chunk in plan.chunks:
            sequence = sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed += len(chunk.token_ids)
            num_sampled = chunk.num_sampled
            if num_sampled == 1:
                sequence.output_token_ids.append(UNKNOWN_TOKEN)
            elif num_sampled:
                # Drafts count once they are accepted.
                sequence.output_token_ids.append(UNKNOWN_TOKEN)
                sequence.num_computed -= chunk.num_drafts
                self._drafted.add(chunk.sequence_id)

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Apply the result of a launched plan and return its events."""
        self._drafted.clear()
        sequences, failed = self._sequences, result.failed
        for chunk in plan.chunks:
            sequence = sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            if failed and (reason := failed.get(chunk.sequence_id)) is not None:
                self._fail(sequence, "numeric", numeric_message(sequence, reason))
                continue
            num_prompt = len(sequence.prompt_token_ids)
            if chunk.start < num_prompt:
                sequence.read(chunk, result)
                stop = chunk.start + len(chunk.token_ids)
                # What precedes the start of an aLoRA is of use to others at once.
                is_shared = stop >= num_prompt or stop == sequence.adapter_start
                if is_shared and sequence in self._batch:
                    self._batch.share(sequence)
            if chunk.num_sampled:
                self._accept(sequence, chunk, result)
            elif sequence.num_uncomputed == 0:
                self._end(sequence, end_event(sequence))
        return self.take_events()

    def fail(self, plan: StepPlan, message: str) -> None:
        """End the sequences of a plan that could not be launched."""
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is not None:
                self._fail(sequence, "memory", message)

    def take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def claims(self) -> dict[Owner, list[int]]:
        """Return the unshared pages of each sequence; shared ones belong to the prefix cache."""
        return self._batch.claims()

    def leases(self) -> dict[str, int]:
        """Return the adapter leases by CID: of running sequences and of a reservation (R12)."""
        return dict(self._batch.leases() + self._admission.retained_adapters())

    def running_adapters(self) -> dict[str, int]:
        """Return the number of running sequences by CID."""
        return dict(self._batch.leases())

    def prefix_leases(self) -> list[PrefixLease]:
        return self._batch.prefix_leases()

    def waiting_tokens(self) -> int:
        """Return the number of tokens that waiting sequences have to compute first."""
        return sum(sequence.num_uncomputed for sequence in self._waiting)

    def waiting_adapters(self) -> dict[str, int]:
        """Return the number of waiting sequences by CID."""
        return dict(Counter(cid for sequence in self._waiting for cid in sequence.cids))

    def waiting_tenants(self) -> dict[str, int]:
        """Return the number of waiting sequences by tenant."""
        return dict(Counter(sequence.request.tenant for sequence in self._waiting))

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
        """Return the maximum length of the request; raise if its prompt can never run."""
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
        cids = set(request.cids)
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

    def _add_waiters(self, request: Request) -> None:
        """Add a waiter for each choice, or none if one of them fails."""
        cids = request.cids
        num_added = 0
        try:
            for _ in range(request.params.n):
                self._adapters.add_waiters(cids)
                num_added += 1
        except BaseException:
            for _ in range(num_added):
                self._adapters.remove_waiters(cids)
            raise

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self._sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                self._end(sequence, timeout_event(sequence))

    def _plan_decodes(self, step: _Step) -> list[Sequence]:
        """Plans one token of each decoding sequence; returns the sequences in prefill."""
        running, block_tokens = self._batch.sequences, self.config.block_tokens
        num_spare = 0 if self.drafts is None else self._num_spare(step, self.drafts.max_rows)
        others = []
        for sequence in step.order:
            outputs, num_tokens = sequence.output_token_ids, sequence.num_computed + 1
            # Without properties: every step asks for every sequence.
            if not outputs or len(sequence.prompt_token_ids) + len(outputs) != num_tokens:
                others.append(sequence)
                continue
            if sequence.sequence_id not in running or (sequence.is_full and sequence.has_unknown):
                continue
            has_page = num_tokens <= len(sequence.page_ids) * block_tokens
            if step.budget and (has_page or self._reserve(sequence, num_tokens, step)):
                step.planned.add(sequence.sequence_id)
                step.budget -= 1
                if num_spare > 0 and (drafts := self._propose(sequence, num_spare)):
                    step.chunks.append(sequence.draft_chunk(drafts))
                    step.budget -= len(drafts)
                    num_spare -= len(drafts)
                else:
                    step.chunks.append(sequence.decode_chunk())
        return others

    def _num_spare(self, step: _Step, max_rows: int) -> int:
        """Return how many drafts the step may have: a token of each sequence goes before them.

        An executor samples max_sequences rows at once.
        """
        num_rows = min(len(step.order) + len(self._waiting), self._batch.num_slots)
        return min(step.budget, self.config.max_sequences, max_rows) - num_rows

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return drafts for a decoding sequence, as many as it may have and as fit in pages."""
        limit = min(limit, sequence.num_draftable)
        if self.drafts is None or limit <= 0 or sequence.has_unknown:
            return []
        drafts = self.drafts.propose(sequence, limit)
        assert len(drafts) <= limit, f"{len(drafts)} drafts, not {limit}"
        num_tokens = sequence.num_computed + 1
        num_reserved = self._admission.num_reserved_against(sequence)
        if drafts and not self._batch.grow(
            sequence, num_tokens + len(drafts), num_reserved=num_reserved
        ):
            # No sequence is preempted for drafts.
            drafts = drafts[: len(sequence.page_ids) * self.config.block_tokens - num_tokens]
        return drafts

    def _plan(self, sequence: Sequence, step: _Step) -> None:
        """Plans a chunk of the sequence, unless the budget is used up or it is preempted."""
        num_tokens = min(sequence.num_in_chunk, step.budget)
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
        """R13: allocates pages, preempting later sequences; returns False if there are none."""
        num_reserved = self._admission.num_reserved_against(sequence)
        while not self._batch.grow(sequence, num_tokens, num_reserved=num_reserved):
            if len(self._batch) == 1:
                # Pages of a load in flight or of a reservation may become free later.
                is_last = num_reserved == 0 and not self._adapters.is_loading
                if is_last and not sequence.has_unknown:
                    self._end(sequence, full_event(sequence))
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

    def _accept(self, sequence: Sequence, chunk: Chunk, result: StepResult) -> None:
        """Replace the unknown token by the step's tokens, up to one that ends the sequence."""
        token_ids = result.accepted[sequence.sequence_id]
        logprobs = None
        if result.logprobs and sequence.request.params.logprobs is not None:
            logprobs = result.logprobs[sequence.sequence_id][-len(token_ids) :]
        sequence.output_token_ids.pop()
        if chunk.num_sampled > 1:
            self._verify(sequence, chunk, token_ids)
        for number, token_id in enumerate(token_ids):
            sequence.output_token_ids.append(token_id)
            sequence.clients.charge(OUTPUT_TOKEN_COST)
            if sequence.constraint is not None:
                sequence.constraint.accept(token_id)
                if (error := sequence.constraint.error) is not None:
                    self._fail(sequence, "grammar", error)
                    return
            reason = finish_reason(sequence, token_id)
            logprob = None if logprobs is None else logprobs[number]
            event = token_event(sequence, token_id, reason, logprob)
            if reason is not None:
                self._end(sequence, event)
                return
            self._events.append(event)

    def _verify(self, sequence: Sequence, chunk: Chunk, token_ids: list[int]) -> None:
        """Count the accepted drafts as computed and free the pages of the others.

        Where one of them ends the sequence, those after it are no tokens and are not shared.
        """
        num_drafts, num_accepted = chunk.num_drafts, len(token_ids) - 1
        sequence.commit(num_accepted)
        self._batch.trim(sequence, sequence.num_computed + 1)
        if self.drafts is not None:
            self.drafts.verified(sequence, num_drafts=num_drafts, num_accepted=num_accepted)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        for choice in list(self._by_request[sequence.request.request_id].values()):
            self._end(choice, error_event(choice, code, message))

    def _end(self, sequence: Sequence, event: TokenEvent) -> None:
        self._events.append(event)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Remove a sequence from the scheduler and free everything that it holds."""
        is_running = sequence in self._batch
        if is_running:
            self._batch.remove(sequence)
        else:
            self._admission.leave(sequence)
        self._shares.leave(sequence.request, sequence.clients, is_running=is_running)
        del self._sequences[sequence.sequence_id]
        choices = self._by_request[sequence.request.request_id]
        del choices[sequence.index]
        if not choices:
            del self._by_request[sequence.request.request_id]
