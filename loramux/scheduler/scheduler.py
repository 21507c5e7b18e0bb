"""What runs in the next step. Pure Python: no torch, no clock; pages and adapters are asked for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import count
from typing import Protocol

from loramux.config import SchedulerConfig
from loramux.errors import DoesNotFit, InvalidRequest, LoramuxError
from loramux.memory.pages import Owner, PageAllocator
from loramux.scheduler.sequence import Sequence
from loramux.types import Chunk, FinishReason, Request, StepPlan, StepResult, TokenEvent


class AdapterGate(Protocol):
    """What the scheduler needs to know of adapters; it never sees where their bytes are."""

    def num_pages(self, cid: str) -> int: ...

    def acquire(self, cids: Iterable[str]) -> bool: ...

    def release(self, cids: Iterable[str]) -> None: ...

    def make_room(self, num_pages: int) -> bool: ...

    @property
    def num_available(self) -> int: ...


class Scheduler:
    """Continuous batching: every running sequence's next token first, then chunks of prompts.

    First come, first served. When pages run out, the newest running sequence gives its pages back
    and is computed again later; the oldest always goes on, so the queue always drains.
    """

    def __init__(
        self, config: SchedulerConfig, *, pages: PageAllocator, adapters: AdapterGate
    ) -> None:
        self.config = config
        self._pages = pages
        self._adapters = adapters
        self._waiting: deque[Sequence] = deque()
        # Oldest first.
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._by_request: dict[str, dict[int, Sequence]] = {}
        self._events: list[TokenEvent] = []
        self._ids = count()
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._events)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def open_choices(self, request_id: str) -> list[int]:
        """Which of the request's choices have not ended; none for an unknown id."""
        return list(self._by_request.get(request_id, {}))

    def add(self, request: Request) -> None:
        """Queues a request, or raises when it could never run here."""
        if request.request_id in self._by_request:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
        max_length = self._max_length(request)
        choices = {}
        for index in range(request.params.n):
            sequence = Sequence(next(self._ids), request, index, max_length=max_length)
            self._sequences[sequence.sequence_id] = sequence
            self._waiting.append(sequence)
            choices[index] = sequence
        self._by_request[request.request_id] = choices

    def abort(self, request_id: str) -> None:
        """Forgets a request; its pages are free before the next step. Unknown ids are fine."""
        for sequence in list(self._by_request.get(request_id, {}).values()):
            self._drop(sequence)

    def finish(self, request_id: str, index: int) -> None:
        """Ends one choice from outside: its text ran into a stop string."""
        sequence = self._by_request.get(request_id, {}).get(index)
        if sequence is not None:
            self._drop(sequence)

    def next_plan(self) -> StepPlan | None:
        chunks: list[Chunk] = []
        budget = self.config.max_batch_tokens
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        prefilling = [sequence for sequence in self._running if not sequence.is_decoding]
        planned: set[int] = set()
        for sequence in decoding + prefilling:
            budget -= self._plan_running(sequence, budget, chunks, planned)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget -= self._plan_running(admitted, budget, chunks, planned)
        return StepPlan(chunks=tuple(chunks)) if chunks else None

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        for chunk in plan.chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed += len(chunk.token_ids)
            sequence.prompt_logprobs += result.prompt_logprobs.get(chunk.sequence_id, [])
            if chunk.sample is not None:
                self._accept(sequence, result)
            elif sequence.num_uncomputed == 0:
                self._end(sequence, None, FinishReason.LENGTH)
        return self.take_events()

    def take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def claims(self) -> dict[Owner, list[int]]:
        return {_owner(s): s.page_ids for s in self._running if s.page_ids}

    def check_integrity(self) -> None:
        running = {s.sequence_id for s in self._running}
        waiting = {s.sequence_id for s in self._waiting}
        assert not running & waiting, "a sequence is both running and waiting"
        assert running | waiting == self._sequences.keys(), "a sequence is lost"
        by_request = {s.sequence_id for c in self._by_request.values() for s in c.values()}
        assert by_request == self._sequences.keys(), "a request lost a choice"
        assert all(self._by_request.values()), "a finished request is still listed"
        for sequence in self._waiting:
            assert not sequence.page_ids and sequence.num_computed == 0, "waiting with pages"
        for sequence in self._running:
            held = len(sequence.page_ids) * self.config.block_tokens
            assert sequence.num_computed <= held, "computed tokens without a page"

    def leases(self) -> dict[str, int]:
        """CID -> running sequences that use it."""
        return dict(Counter(cid for s in self._running for cid in s.cids))

    def waiting_adapters(self) -> dict[str, int]:
        return dict(Counter(cid for s in self._waiting for cid in s.cids))

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
        adapter_pages = sum(self._adapters.num_pages(cid) for cid, _ in request.selection)
        room = (self._pages.num_pages - adapter_pages) * self.config.block_tokens
        if num_needed > room:
            raise DoesNotFit(
                f"The request needs {self._pages_for(num_needed)} pages for {num_needed} tokens "
                f"and {adapter_pages} for its adapters, and the pool has {self._pages.num_pages}. "
                "Shorten the prompt or give the pool more memory."
            )
        return min(limit, room)

    def _admit(self) -> Sequence | None:
        """Moves the head of the queue into the batch if its adapters and prompt have room."""
        while self._waiting and len(self._running) < self.config.max_sequences:
            sequence = self._waiting[0]
            try:
                acquired = self._adapters.acquire(sequence.cids)
            except LoramuxError as error:
                self._fail(sequence, error)
                continue
            if not acquired:
                return None
            if self._adapters.num_available < self._pages_for(sequence.num_tokens):
                self._adapters.release(sequence.cids)
                return None
            self._running.append(self._waiting.popleft())
            return sequence
        return None

    def _plan_running(
        self, sequence: Sequence, budget: int, chunks: list[Chunk], planned: set[int]
    ) -> int:
        """Adds the sequence's chunk; returns the tokens it takes (0: no budget, or preempted)."""
        num_tokens = min(sequence.num_uncomputed, budget)
        # An earlier sequence of this step may have taken this one's pages.
        if num_tokens == 0 or sequence not in self._running:
            return 0
        if not self._reserve(sequence, sequence.num_computed + num_tokens, planned):
            return 0
        planned.add(sequence.sequence_id)
        chunks.append(sequence.chunk(num_tokens))
        return num_tokens

    def _reserve(self, sequence: Sequence, num_tokens: int, planned: set[int]) -> bool:
        """Pages for num_tokens, at the cost of newer sequences; False: it gave up its own."""
        missing = self._pages_for(num_tokens) - len(sequence.page_ids)
        if missing <= 0:
            return True
        while not self._adapters.make_room(missing):
            victim = next(
                (s for s in reversed(self._running) if s.sequence_id not in planned), sequence
            )
            self._preempt(victim)
            if victim is sequence:
                return False
        page_ids = self._pages.allocate(_owner(sequence), missing)
        assert page_ids is not None
        sequence.page_ids += page_ids
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.restart()
        # Victims are taken newest first, so the queue stays in order of arrival.
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _accept(self, sequence: Sequence, result: StepResult) -> None:
        token_id = result.token_ids[sequence.sequence_id]
        sequence.output_token_ids.append(token_id)
        params = sequence.request.params
        is_eos = token_id in sequence.request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            reason = FinishReason.STOP
        elif (
            len(sequence.output_token_ids) >= params.max_tokens
            or sequence.num_tokens >= sequence.max_length
        ):
            reason = FinishReason.LENGTH
        else:
            reason = None
        self._emit(sequence, token_id, reason, result)
        if reason is not None:
            self._drop(sequence)

    def _emit(
        self, sequence: Sequence, token_id: int, reason: FinishReason | None, result: StepResult
    ) -> None:
        is_first = len(sequence.output_token_ids) == 1
        stopped = reason is FinishReason.STOP
        self._events.append(
            TokenEvent(
                request_id=sequence.request.request_id,
                index=sequence.index,
                token_id=token_id,
                finish_reason=reason,
                stop_token_id=token_id if stopped else None,
                logprob=result.logprobs.get(sequence.sequence_id),
                prompt_logprobs=(sequence.prompt_logprobs or None) if is_first else None,
            )
        )

    def _end(self, sequence: Sequence, error: LoramuxError | None, reason: FinishReason) -> None:
        self._events.append(
            TokenEvent(
                request_id=sequence.request.request_id,
                index=sequence.index,
                token_id=None,
                finish_reason=reason,
                prompt_logprobs=sequence.prompt_logprobs or None,
                error=None if error is None else str(error),
            )
        )
        self._drop(sequence)

    def _fail(self, sequence: Sequence, error: LoramuxError) -> None:
        for choice in list(self._by_request[sequence.request.request_id].values()):
            self._end(choice, error, FinishReason.ERROR)

    def _drop(self, sequence: Sequence) -> None:
        """The one way out of the scheduler: frees everything that the sequence holds."""
        if sequence in self._running:
            self._free(sequence)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence.sequence_id]
        choices = self._by_request[sequence.request.request_id]
        del choices[sequence.index]
        if not choices:
            del self._by_request[sequence.request.request_id]

    def _free(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pages.release(_owner(sequence), sequence.page_ids)
        sequence.page_ids = []
        self._adapters.release(sequence.cids)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_tokens)


def _owner(sequence: Sequence) -> Owner:
    return ("kv", sequence.sequence_id)
