"""One base model, many adapters, one batch: add requests, call step() while there is work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from loramux.adapters.catalog import AdapterCatalog, KnownAdapter
from loramux.errors import DoesNotFit, InvalidRequest
from loramux.memory.pages import PageAllocator
from loramux.memory.residency import AdapterResidency
from loramux.runner.penalties import check_logit_bias
from loramux.runner.runner import Runner
from loramux.scheduler.scheduler import Scheduler
from loramux.types import Chunk, Request, Selection, StepPlan, TokenEvent


class Engine:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        pages: PageAllocator,
        residency: AdapterResidency,
        catalog: AdapterCatalog,
        vocab_size: int,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.pages = pages
        self.residency = residency
        self.catalog = catalog
        self.vocab_size = vocab_size

    def step(self) -> list[TokenEvent]:
        plan = self.scheduler.next_plan()
        if plan is None:
            return self.scheduler.take_events()
        result = self.runner.run(plan)
        return self.scheduler.apply(plan, result)

    def register_adapter(self, folder: Path) -> KnownAdapter:
        """Checks an adapter and makes it known by its CID; refuses what must not be served."""
        return self.catalog.register(folder)

    def forget_adapter(self, cid: str) -> bool:
        """Frees all that an adapter holds; False: a sequence needs it, and nothing was done."""
        if cid in self.scheduler.leases() or cid in self.scheduler.waiting_adapters():
            return False
        if cid in self.residency:
            self.residency.evict(cid)
        self.catalog.forget(cid)
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
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def finish(self, request_id: str, index: int) -> None:
        self.scheduler.finish(request_id, index)

    def prompt_logits(self, prompts: Sequence[tuple[Sequence[int], Selection]]) -> list[Tensor]:
        """Logits [tokens, vocab] of each (token ids, selection), all in one step, none kept."""
        owner = ("kv", "probe")
        cids = [cid for _, selection in prompts for cid, _ in selection]
        num_pages = [-(-len(token_ids) // self._block_tokens) for token_ids, _ in prompts]
        if not self.residency.acquire(cids):
            raise DoesNotFit("The pool has no room for these adapters at once.")
        try:
            if not self.residency.make_room(sum(num_pages)):
                raise DoesNotFit("The pool has no room for these prompts.")
            page_ids = self.pages.allocate(owner, sum(num_pages)) or []
            try:
                logits = self.runner.logits(StepPlan(_whole_chunks(prompts, num_pages, page_ids)))
            finally:
                self.pages.release(owner, page_ids)
        finally:
            self.residency.release(cids)
        return [logits[number] for number in range(len(prompts))]

    @property
    def _block_tokens(self) -> int:
        return self.scheduler.config.block_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check_integrity(self) -> None:
        """Every page, lease and sequence is accounted for, exactly."""
        self.scheduler.check_integrity()
        self.residency.check_integrity(self.scheduler.leases())
        self.pages.check_integrity({**self.scheduler.claims(), **self.residency.claims()})


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
