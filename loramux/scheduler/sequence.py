"""A sequence: one choice of one request, waiting or running."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loramux.memory.pages import Owner
from loramux.memory.prefix import PrefixLease
from loramux.scheduler.fairness import PROMPT_TOKEN_COST, Clients, PreemptionLimit
from loramux.types.pooling import Pooling
from loramux.types.request import BASE_SELECTION, Request, TokenLogprob
from loramux.types.step import (
    UNKNOWN_TOKEN,
    Chunk,
    NextTokens,
    Rows,
    SampleRow,
    StepResult,
    TokenConstraint,
)

_CHOICE_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Sequence:
    """The tokens of a choice, its pages, and how many tokens have their KV in these pages."""

    draft_state: object = None
    """What the source of drafts remembers of it."""

    def __init__(  # noqa: PLR0913  (what the scheduler knows of a choice)
        self,
        sequence_id: int,
        request: Request,
        index: int,
        *,
        max_length: int,
        clients: Clients,
        now: float,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self._max_outputs = min(
            request.params.max_tokens, max_length - len(request.prompt_token_ids)
        )
        self.clients = clients
        self.constraint = constraint
        self.cids = request.cids
        self.adapter_start = request.adapter_start if request.selection else 0
        """R16: the tokens before this position are computed by the base alone."""
        self.owner: Owner = ("kv", sequence_id)
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.num_drafts = 0
        """Drafts of its chunk that is planned or in flight; they are not among its tokens."""
        self.page_ids: list[int] = []
        self.lease: PrefixLease | None = None
        """The lease of the shared pages, which are the first of page_ids."""
        self.num_reused_tokens = 0
        """Prompt tokens that came from the prefix cache at the first start."""
        self.prompt_logprobs: list[TokenLogprob] = []
        self.pooled: NDArray[np.float64] | None = None
        """Sum of what the chunks have pooled."""
        self.seed = (request.seed + index * _CHOICE_STRIDE) & _MASK
        self.queued_s = now
        """Time of its arrival, or of its last preemption."""
        self.started_s: float | None = None
        """Time of its start; None while it waits."""
        self.start_counters = (0.0, 0.0)
        """R11: the counters of its tenant and its adapter when it started."""
        self.bypassed_since_s: float | None = None
        """R8: since when others are admitted before it although it is the first in order."""
        self.no_reservation_until_s = -math.inf
        """R12: until then no pages are reserved for its adapters, as a reservation was unused."""
        self.num_spare_refused: int | None = None
        """Spare pages at its last failed attempt to start."""
        self.first_started_s: float | None = None
        self._sample_row = SampleRow(
            params=request.params,
            seed=self.seed,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            constraint=constraint,
        )
        self._decode_rows = (Rows(0, 1, self._sample_row),)
        self._num_starts = 0
        self._num_charged = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_in_chunk(self) -> int:
        """R16: returns the maximum number of tokens in the next chunk."""
        is_before = self.num_computed < self.adapter_start
        return (self.adapter_start if is_before else self.num_tokens) - self.num_computed

    @property
    def has_unknown(self) -> bool:
        """Returns whether its newest token is still on the device."""
        return bool(self.output_token_ids) and self.output_token_ids[-1] == UNKNOWN_TOKEN

    @property
    def num_known_outputs(self) -> int:
        return len(self.output_token_ids) - self.has_unknown

    @property
    def is_full(self) -> bool:
        """Returns whether no token may follow the newest one."""
        return len(self.output_token_ids) >= self._max_outputs

    @property
    def num_draftable(self) -> int:
        """Returns how many drafts may follow its newest token: the last token needs none.

        After a token that is not known yet, as many may follow it at most.
        """
        if self.constraint is not None or not self.is_decoding:
            return 0
        return self._max_outputs - len(self.output_token_ids) - 1

    @property
    def num_shared_pages(self) -> int:
        return 0 if self.lease is None else len(self.lease.page_ids)

    @property
    def is_decoding(self) -> bool:
        outputs = self.output_token_ids
        num_tokens = len(self.prompt_token_ids) + len(outputs)
        return num_tokens == self.num_computed + 1 and bool(outputs)

    @property
    def needs_all_tokens(self) -> bool:
        """Returns whether the hidden state of every prompt token is asked for."""
        request = self.request
        wants_logprobs = request.params.prompt_logprobs is not None and not self.output_token_ids
        return wants_logprobs or request.pooling is Pooling.MEAN

    def reusable_token_ids(self) -> list[int]:
        """Return the tokens that may come from the prefix cache: all but the last one."""
        return [] if self.needs_all_tokens else self.tokens(0, self.num_tokens - 1)

    def start(self, now: float) -> None:
        self.started_s = now
        self.start_counters = (self.clients.tenant.counter, self.clients.adapter.counter)
        self.num_spare_refused = None
        self._num_starts += 1
        if self._num_starts == 1:
            self.first_started_s = now
            self.num_reused_tokens = self.num_computed

    def chunk(self, num_tokens: int) -> Chunk:
        """Return the next num_tokens uncomputed tokens, sampled if they are the last ones.

        R16: they are either all before the adapter's start or none of them is.
        """
        start, stop = self.num_computed, self.num_computed + num_tokens
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=self.tokens(start, stop),
            start=start,
            page_ids=self.page_ids,
            selection=BASE_SELECTION if start < self.adapter_start else self.request.selection,
            rows=tuple(self._rows(start, stop)),
            num_sampled=int(stop == self.num_tokens and self.request.params.max_tokens > 0),
        )

    def decode_chunk(self) -> Chunk:
        """Return chunk(1) of a decoding sequence, at less cost."""
        return Chunk(
            self.sequence_id,
            self.output_token_ids[-1:],
            self.num_computed,
            self.page_ids,
            self.request.selection,
            self._decode_rows,
            1,
        )

    def draft_chunk(self, drafts: list[int]) -> Chunk:
        """Return the chunk of a decoding sequence whose newest token is followed by drafts.

        Each row is sampled as if the drafts before it were accepted.
        """
        outputs, row = self.output_token_ids, self._sample_row
        self.num_drafts = len(drafts)
        after = (
            Rows(count, 1, replace(row, output_token_ids=outputs + drafts[:count]))
            for count in range(1, len(drafts) + 1)
        )
        return Chunk(
            self.sequence_id,
            outputs[-1:] + drafts,
            self.num_computed,
            self.page_ids,
            self.request.selection,
            (*self._decode_rows, *after),
            1 + len(drafts),
        )

    def commit(self, num_accepted: int) -> None:
        """Count the accepted drafts, which are tokens now, as computed; drop the others."""
        self.num_computed += num_accepted
        self.num_drafts = 0

    def _rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yield which tokens of a chunk are read, and what for."""
        params, pooling = self.request.params, self.request.pooling
        if params.prompt_logprobs is not None and not self.output_token_ids:
            following = self.prompt_token_ids[start + 1 : stop + 1]
            if following:
                yield Rows(0, len(following), NextTokens(following, params.prompt_logprobs))
        if pooling is Pooling.MEAN:
            yield Rows(0, stop - start, pooling)
        elif stop == self.num_tokens and pooling is not None:
            yield Rows(stop - start - 1, 1, pooling)
        elif stop == self.num_tokens and params.max_tokens > 0:
            yield Rows(stop - start - 1, 1, self._sample_row)

    def read(self, chunk: Chunk, result: StepResult) -> None:
        """Keep what a chunk of the prompt was read for beside its next token."""
        for rows in chunk.rows:
            if isinstance(rows.use, NextTokens):
                self.prompt_logprobs += result.logprobs[self.sequence_id][: rows.count]
            elif isinstance(rows.use, Pooling):
                self.add_pooled(result.pooled[self.sequence_id])

    def add_pooled(self, pooled: NDArray[np.float64]) -> None:
        self.pooled = pooled if self.pooled is None else self.pooled + pooled

    def pooled_vector(self) -> bytes | None:
        """Return the vector of a finished request with pooling, as a TokenEvent has it."""
        if self.pooled is None:
            return None
        is_mean = self.request.pooling is Pooling.MEAN
        pooled = self.pooled / len(self.prompt_token_ids) if is_mean else self.pooled
        return pooled.astype("<f4").tobytes()

    def preemption_limit(self, now: float, min_s: float) -> PreemptionLimit:
        """R11: for min_s, returns the counters at the start, and then the current ones."""
        assert self.started_s is not None
        if now - self.started_s < min_s:
            return PreemptionLimit(self.clients, *self.start_counters)
        tenant, adapter = self.clients.tenant, self.clients.adapter
        return PreemptionLimit(self.clients, tenant.counter, adapter.counter)

    def charge_prompt(self, num_tokens: int) -> None:
        """R2: charges the next num_tokens, except those that were charged before a preemption."""
        stop = min(self.num_computed + num_tokens, len(self.prompt_token_ids))
        num_new = stop - max(self.num_computed, self._num_charged)
        if num_new > 0:
            self.clients.charge(PROMPT_TOKEN_COST * num_new)
            self._num_charged = stop

    def restart(self, now: float) -> None:
        """Reset the computed state after a preemption; the tokens stay."""
        self.num_computed = 0
        self.num_drafts = 0
        self.page_ids = []
        self.prompt_logprobs = []
        self.pooled = None
        self.queued_s = now
        self.bypassed_since_s = None
        self.started_s = None

    def tokens(self, start: int, stop: int) -> list[int]:
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        tokens = self.prompt_token_ids[start:stop]
        return tokens + self.output_token_ids[: max(0, stop - num_prompt)]
