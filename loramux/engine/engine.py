"""One base model, many adapters, one batch: add requests, call step() while there is work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from loramux.adapters.catalog import AdapterCatalog, KnownAdapter
from loramux.engine.facts import FactsKeeper
from loramux.engine.memory import EngineMemory
from loramux.errors import DoesNotFit, InvalidRequest, LoramuxError
from loramux.lora.merge_controller import MergeController
from loramux.memory.pages import PageAllocator
from loramux.memory.residency import AdapterResidency
from loramux.runner.in_flight import Flight
from loramux.runner.penalties import check_logit_bias
from loramux.runner.runner import Runner
from loramux.scheduler.scheduler import Scheduler
from loramux.types.request import Request, Selection, TokenEvent
from loramux.types.step import Chunk, StepPlan

if TYPE_CHECKING:
    from loramux.runner.device_runner import DeviceRunner

# How long a step that has nothing to compute waits for an adapter before it looks at its commands.
_LOAD_WAIT_S = 0.005
# A step with this many rows says what a prompt token costs.
_PROMPT_ROWS = 64
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class _Flying:
    plan: StepPlan
    flight: Flight
    launched_s: float


class Engine:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner | DeviceRunner,
        memory: EngineMemory,
        vocab_size: int,
        merge: MergeController | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.memory = memory
        self.vocab_size = vocab_size
        self.merge = merge
        self._facts = FactsKeeper(memory.residency, memory.tiers)
        self._flying: _Flying | None = None
        self._landed_s = 0.0

    def step(self) -> list[TokenEvent]:
        """Launches a step and tells what the one before it gave.

        So the device computes while the host reads tokens and plans. What cannot be launched
        without those tokens waits for them; where nothing is ever in flight, a step tells its own.
        """
        self.memory.move_adapters()
        plan = self.scheduler.next_plan(self.memory.clock())
        if plan is None:
            if self._flying is None:
                self._wait_for_adapters()
            return self._land()
        events = [] if self.runner.can_run_ahead(plan) else self._land()
        try:
            flying = self._launch(plan)
        except DoesNotFit as error:
            events += self._land()
            self.scheduler.fail(plan, str(error))
            return events + self._land()
        events += self._land()
        self.scheduler.launched(plan)
        self._flying = flying
        return events + self._land() if flying.flight.is_over else events

    @property
    def pages(self) -> PageAllocator:
        return self.memory.pages

    @property
    def residency(self) -> AdapterResidency:
        return self.memory.residency

    @property
    def catalog(self) -> AdapterCatalog:
        return self.memory.catalog

    def register_adapter(self, folder: Path) -> KnownAdapter:
        """Checks an adapter and makes it known by its CID; refuses what must not be served."""
        return self.catalog.register(folder)

    def forget_adapter(self, cid: str) -> bool:
        """Frees all that an adapter holds; False: a sequence needs it, and nothing was done."""
        if not self.memory.forget(cid):
            return False
        if self.merge is not None:
            self.merge.forget(cid)
        return True

    def add(self, request: Request) -> None:
        """Raises for what could not be computed: it would fail everybody's step."""
        check_logit_bias(request.params, self.vocab_size)
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"Token id {token_id} is outside the vocabulary of {self.vocab_size}.",
                    param="prompt",
                )
        now = self.memory.clock()
        self._facts.arrive(request, now=now, queue_depth=self.scheduler.num_waiting)
        try:
            self.scheduler.add(request, now)
        except LoramuxError:
            self._facts.forget(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._facts.forget(request_id)

    def finish(self, request_id: str, index: int) -> None:
        self.scheduler.finish(request_id, index)

    def prompt_logits(self, prompts: Sequence[tuple[Sequence[int], Selection]]) -> list[Tensor]:
        """Logits [tokens, vocab] of each (token ids, selection), all in one step, none kept."""
        owner = ("kv", "probe")
        cids = [cid for _, selection in prompts for cid, _ in selection]
        num_pages = [-(-len(token_ids) // self._block_tokens) for token_ids, _ in prompts]
        if not self.residency.load_now(cids):
            raise DoesNotFit("The pool has no room for these adapters at once.")
        try:
            if not self.memory.room.make_room(sum(num_pages)):
                raise DoesNotFit("The pool has no room for these prompts.")
            page_ids = self.pages.allocate(owner, sum(num_pages)) or []
            try:
                logits = self.runner.logits(StepPlan(_whole_chunks(prompts, num_pages, page_ids)))
            finally:
                self.pages.release(owner, page_ids)
        finally:
            self.residency.release(cids)
        return [logits[number] for number in range(len(prompts))]

    def close(self) -> None:
        """Ends the loader's threads; the engine is of no use afterwards."""
        self.memory.close()

    def _launch(self, plan: StepPlan) -> _Flying:
        """Raises DoesNotFit when there is no memory for it, whatever is done."""
        with nullcontext() if self.merge is None else self.merge.step(plan):
            began = time.perf_counter()
            flight = self.runner.launch(plan)
        self.pages.num_launched += 1
        return _Flying(plan, flight, began)

    def _land(self) -> list[TokenEvent]:
        """What has happened, the tokens of the step in flight included, if there is one."""
        flying, self._flying = self._flying, None
        if flying is None:
            return self._facts.tell(self.scheduler.take_events(), None)
        plan, result = flying.plan, flying.flight.land()
        self.pages.num_landed += 1
        now = time.perf_counter()
        self._note_time(plan, now - max(flying.launched_s, self._landed_s))
        self._landed_s = now
        return self._facts.tell(self.scheduler.apply(plan, result), plan)

    def _note_time(self, plan: StepPlan, seconds: float) -> None:
        tiers = self.memory.tiers
        tiers.step_s += _SMOOTHING * (seconds - tiers.step_s)
        prefixes = self.memory.prefixes
        if prefixes is not None and plan.num_tokens >= _PROMPT_ROWS:
            prefixes.token_s += _SMOOTHING * (seconds / plan.num_tokens - prefixes.token_s)

    def _wait_for_adapters(self) -> None:
        if self.residency.is_loading:
            self.residency.poll(timeout_s=_LOAD_WAIT_S)

    @property
    def _block_tokens(self) -> int:
        return self.scheduler.config.block_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.residency.is_loading or self._flying is not None

    def check_integrity(self) -> None:
        """Every page, lease and sequence is accounted for, exactly."""
        self.scheduler.check_integrity()
        self.residency.check_integrity(self.scheduler.leases())
        claims = {**self.scheduler.claims(), **self.residency.claims()}
        if self.memory.prefixes is not None:
            self.memory.prefixes.check_integrity(self.scheduler.prefix_leases())
            claims |= self.memory.prefixes.claims()
        self.memory.room.check_integrity()
        self.pages.check_integrity(claims)
        if self.merge is not None:
            self.merge.check_integrity()


def _whole_chunks(
    prompts: Sequence[tuple[Sequence[int], Selection]],
    num_pages: Sequence[int],
    page_ids: Sequence[int],
) -> tuple[Chunk, ...]:
    chunks = []
    start = 0
    for number, (token_ids, selection) in enumerate(prompts):
        mine = page_ids[start : start + num_pages[number]]
        start += num_pages[number]
        chunks.append(Chunk(number, token_ids, 0, mine, selection, sample=None))
    return tuple(chunks)
