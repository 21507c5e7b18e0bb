"""The step loop: one base model, many adapters, one batch per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from loramux.adapters.catalog import AdapterCatalog
from loramux.engine.executor import Executor
from loramux.engine.grammar.constraint import Constraint
from loramux.engine.grammar.constraints import CompiledGrammar, Constraints, HeldRequests
from loramux.engine.memory import EngineMemory
from loramux.engine.request_tracker import RequestTracker
from loramux.errors import DoesNotFit, InvalidRequest, LoramuxError
from loramux.lora.merge_controller import MergeController
from loramux.memory.pages import PageAllocator
from loramux.memory.residency import AdapterResidency
from loramux.runner.penalties import check_logit_bias
from loramux.scheduler.events import refusal_events
from loramux.scheduler.scheduler import Scheduler
from loramux.types.adapter import AdapterCard, vocab_size_of
from loramux.types.composition import SumPart, check_alone
from loramux.types.pooling import ModelPooling
from loramux.types.request import (
    BASE_SELECTION,
    Request,
    Selection,
    TokenEvent,
    check_pooling,
    find_last,
)
from loramux.types.step import Chunk, InFlightStep, StepPlan

# A step without work waits this long for a loading adapter before the loop reads its commands.
_LOAD_WAIT_S = 0.005
# Steps go on for this long between two preparations, each of which takes about 60 ms on a GPU.
_PREPARE_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    step: InFlightStep
    launched_s: float


class Engine:
    """Plans steps, launches them on an executor and returns the tokens as events."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        memory: EngineMemory,
        vocab_size: int,
        pooling: ModelPooling | None = None,
        merge: MergeController | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.memory = memory
        self.vocab_size = vocab_size
        self.pooling = pooling or ModelPooling()
        self.merge = merge
        self.constraints = Constraints(vocab_size)
        self._held = HeldRequests()
        self._tracker = RequestTracker(memory.residency)
        self._in_flight: _Launched | None = None
        self._last_result_s = 0.0
        self._prepared_s = 0.0

    def step(self) -> list[TokenEvent]:
        """Launch the next step and return the events of the previous one.

        The device computes while the host plans. A plan that needs the tokens of the in-flight
        step waits for them. An executor whose steps are done at launch returns their own events.
        """
        self.memory.move_adapters()
        events = self._release_held() if self._held else []
        events += self._prepare_wanted() if self.executor.is_lacking else []
        if self.scheduler.awaits_result:
            events += self._apply_result()
        plan = self.scheduler.next_plan(self.memory.clock())
        if plan is None:
            if self._in_flight is None:
                self._wait_for_loads()
            return events + self._apply_result()
        if not self.executor.can_run_ahead(plan):
            events += self._apply_result()
        try:
            launched = self._launch(plan, events)
        except DoesNotFit as error:
            events += self._apply_result()
            self.pages.step_finished()
            self.scheduler.fail(plan, str(error))
            return events + self._apply_result()
        events += self._apply_result()
        self.scheduler.launched(plan)
        self._in_flight = launched
        return events + self._apply_result() if launched.step.is_done else events

    def prepare_next(self) -> bool:
        """Prepare the executor further while there is no work; return False if nothing is left."""
        assert self._in_flight is None, "a step is in flight"
        return self.executor.prepare_next(only_wanted=False)

    def prepare_all(self) -> None:
        """Prepare the executor completely, so that the first steps are as fast as later ones."""
        while self.prepare_next():
            pass

    def _prepare_wanted(self) -> list[TokenEvent]:
        """Prepare what recent steps have lacked, at intervals; return the events up to now."""
        now = time.perf_counter()
        if now - self._prepared_s < _PREPARE_INTERVAL_S:
            return []
        events = self._apply_result()
        self.executor.prepare_next(only_wanted=True)
        self._prepared_s = time.perf_counter()
        return events

    @property
    def pages(self) -> PageAllocator:
        return self.memory.pages

    @property
    def residency(self) -> AdapterResidency:
        return self.memory.residency

    @property
    def catalog(self) -> AdapterCatalog:
        return self.memory.catalog

    def register_adapter(self, folder: Path) -> AdapterCard:
        """Check an adapter and register its CID; raise AdapterRefused for an invalid one."""
        found = self.memory.identify(folder)
        self.memory.admit(found)
        self.memory.tiers.loader.run(partial(self.memory.write_disk, found))
        return found.card

    def forget_adapter(self, cid: str) -> bool:
        """Free everything the adapter holds; return False if a sequence still uses it."""
        if not self.memory.forget(cid):
            return False
        if self.merge is not None:
            self.merge.forget(cid)
        return True

    def add(self, request: Request) -> None:
        """Queue a request; raise InvalidRequest for one that would fail the whole batch."""
        check_pooling(request, self.pooling)
        request = self._place_adapters(request)
        self._check_vocabulary(request)
        now = self.memory.clock()
        grammar = request.params.grammar
        compiled = None if grammar is None else self.constraints.start(grammar)
        if compiled is None or compiled.done():
            self._schedule(request, now, compiled)
            return
        if request.request_id in self._held:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
        self.scheduler.check(request)
        self._held.add(request, now, compiled)

    def _schedule(self, request: Request, now: float, compiled: CompiledGrammar | None) -> None:
        """Queue a request whose grammar is compiled; raise what makes it impossible."""
        made: list[Constraint] = []
        if request.params.is_constrained:
            found = None if compiled is None else compiled.result()
            made = self.constraints.make(request, found, self._vocab_size_of(request))
        self._tracker.arrive(request, now=now, queue_depth=self.scheduler.num_waiting)
        try:
            self.scheduler.add(request, now, made)
        except LoramuxError:
            self._tracker.discard(request.request_id)
            raise

    def _release_held(self) -> list[TokenEvent]:
        """Queue the requests whose grammar is compiled; return the ends of those refused."""
        events: list[TokenEvent] = []
        for request, arrived_s, compiled in self._held.take_ready():
            try:
                self._schedule(request, arrived_s, compiled)
            except LoramuxError as error:
                events += refusal_events(request, error)
        return events

    def _place_adapters(self, request: Request) -> Request:
        """Set where an aLoRA begins to act; without its invocation tokens the base answers."""
        if not request.selection:
            return request
        cards = [self.catalog.get(cid) for cid in request.cids]
        check_alone(
            SumPart(card.cid, weight, card.only_alone)
            for card, (_, weight) in zip(cards, request.selection, strict=True)
        )
        if not cards[0].invocation_tokens:
            return request
        start = find_last(request.prompt_token_ids, cards[0].invocation_tokens)
        if start is None:
            return replace(request, selection=BASE_SELECTION, adapter_share=1.0)
        return replace(request, adapter_start=start)

    def _vocab_size_of(self, request: Request) -> int:
        """Return the number of token ids that the request's adapters can read and write."""
        return vocab_size_of([self.catalog.get(cid) for cid in request.cids], self.vocab_size)

    def _check_vocabulary(self, request: Request) -> None:
        """Raise InvalidRequest for ids that the base or the adapter that reads them lacks."""
        vocab_size = self._vocab_size_of(request)
        if request.params.is_constrained:
            self.constraints.check(request, vocab_size)
        check_logit_bias(request.params, vocab_size)
        token_ids = request.prompt_token_ids
        _check_token_ids(token_ids, vocab_size)
        _check_token_ids(token_ids[: request.adapter_start], self.vocab_size)

    def abort(self, request_id: str) -> None:
        self._held.discard(request_id)
        self.scheduler.abort(request_id)
        self._tracker.discard(request_id)

    def finish(self, request_id: str, index: int) -> None:
        self.scheduler.finish(request_id, index)

    def prompt_logits(self, prompts: Sequence[tuple[Sequence[int], Selection]]) -> list[Tensor]:
        """Compute the logits [tokens, vocab] of each (token ids, selection) in one step."""
        owner = ("kv", "probe")
        cids = [cid for _, selection in prompts for cid, _ in selection]
        num_pages = [-(-len(token_ids) // self._block_tokens) for token_ids, _ in prompts]
        if not self.residency.load_now(cids):
            raise DoesNotFit("The pool has no room for these adapters at once.")
        try:
            if not self.memory.reclaimer.reclaim(sum(num_pages)):
                raise DoesNotFit("The pool has no room for these prompts.")
            page_ids = self.pages.allocate(owner, sum(num_pages)) or []
            try:
                logits = self.executor.logits(StepPlan(_whole_chunks(prompts, num_pages, page_ids)))
            finally:
                self.pages.release(owner, page_ids)
        finally:
            self.residency.release(cids)
        return [logits[number] for number in range(len(prompts))]

    def close(self) -> None:
        """Stop all threads; the engine cannot be used afterwards."""
        self.constraints.close()
        self.memory.close()

    def _launch(self, plan: StepPlan, events: list[TokenEvent]) -> _Launched:
        """Launch the plan; raise DoesNotFit when the device has no memory for it.

        The masks of its constrained rows need the tokens of the step in flight, whose events are
        appended to `events` then.
        """
        constrained = self.constraints.rows_of(plan)

        def fill_masks() -> None:
            events.extend(self._apply_result())
            self.constraints.fill(constrained)

        # Before the launch: pages that `fill_masks` frees are still written by this step.
        self.pages.step_launched()
        with nullcontext() if self.merge is None else self.merge.step(plan):
            began = time.perf_counter()
            step = self.executor.launch(plan, fill_masks if constrained else None)
        return _Launched(plan, step, began)

    def _apply_result(self) -> list[TokenEvent]:
        """Apply the result of the in-flight step, if any, and return all new events."""
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return self._tracker.attach_facts(self.scheduler.take_events(), None)
        plan, result = launched.plan, launched.step.result()
        self.pages.step_finished()
        now = time.perf_counter()
        began = max(launched.launched_s, self._last_result_s)
        self.memory.costs.record_step(now - began, plan.num_tokens)
        self._last_result_s = now
        return self._tracker.attach_facts(self.scheduler.apply(plan, result), plan)

    def _wait_for_loads(self) -> None:
        """Wait a moment for the adapter or the grammar that all requests wait for."""
        if self.residency.is_loading:
            self.residency.poll(timeout_s=_LOAD_WAIT_S)
        elif self._held:
            self._held.wait(timeout_s=_LOAD_WAIT_S)

    @property
    def _block_tokens(self) -> int:
        return self.scheduler.config.block_tokens

    @property
    def has_work(self) -> bool:
        is_computing = self.scheduler.has_work or self._in_flight is not None
        return is_computing or self.residency.is_loading or bool(self._held)

    def check_integrity(self) -> None:
        """Assert that every page, lease and sequence has exactly one owner."""
        self.scheduler.check_integrity()
        self.residency.check_integrity(self.scheduler.leases())
        claims = {**self.scheduler.claims(), **self.residency.claims()}
        if self.memory.prefixes is not None:
            self.memory.prefixes.check_integrity(self.scheduler.prefix_leases())
            claims |= self.memory.prefixes.claims()
        self.memory.reclaimer.check_integrity()
        self.pages.check_integrity(claims)
        if self.merge is not None:
            self.merge.check_integrity()


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is outside the vocabulary of {vocab_size}.", param="prompt"
            )


def _whole_chunks(
    prompts: Sequence[tuple[Sequence[int], Selection]],
    num_pages: Sequence[int],
    page_ids: Sequence[int],
) -> tuple[Chunk, ...]:
    """Make one unsampled chunk per prompt over consecutive pages."""
    chunks = []
    start = 0
    for number, (token_ids, selection) in enumerate(prompts):
        mine = page_ids[start : start + num_pages[number]]
        start += num_pages[number]
        chunks.append(Chunk(number, token_ids, 0, mine, selection))
    return tuple(chunks)
