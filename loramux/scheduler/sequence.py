"""One choice of one request, on its way through the engine."""

from __future__ import annotations

import math

from loramux.memory.pages import Owner
from loramux.memory.prefix import PrefixLease
from loramux.scheduler.fairness import PROMPT_TOKEN_COST, Standing, Tenure
from loramux.types.request import Request, TokenLogprob
from loramux.types.step import UNKNOWN_TOKEN, Chunk, SampleRow

_CHOICE_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Sequence:
    """Tokens so far, how many of them have their keys and values in pages, and those pages."""

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        *,
        max_length: int,
        standing: Standing,
        now: float,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self._max_outputs = min(
            request.params.max_tokens, max_length - len(request.prompt_token_ids)
        )
        self.standing = standing
        self.cids = tuple(cid for cid, _ in request.selection)
        self.owner: Owner = ("kv", sequence_id)
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.page_ids: list[int] = []
        self.lease: PrefixLease | None = None
        """The first of page_ids, which it shares with others."""
        self.num_reused_tokens = 0
        """Prompt tokens that somebody else had computed."""
        self.prompt_logprobs: list[TokenLogprob] = []
        self.seed = (request.seed + index * _CHOICE_STRIDE) & _MASK
        self.queued_s = now
        """Since when it waits; after a preemption, since that."""
        self.started_s: float | None = None
        """Since when it runs."""
        self.start_counters = (0.0, 0.0)
        """What its tenant and its adapter had had when it got its place."""
        self.passed_over_s: float | None = None
        """Since when others go first although it is the best, to keep adapters out of the batch."""
        self.no_hold_until_s = -math.inf
        """Until then, no pages are kept free for its adapters: they were not used."""
        self.num_spare_refused: int | None = None
        """Pages that seemed to be left over when it was refused all the same."""
        self.first_started_s: float | None = None
        self._sample_row = SampleRow(
            params=request.params,
            seed=self.seed,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
        )
        self._num_starts = 0
        self._num_charged = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def has_unknown(self) -> bool:
        """Its newest token is still on the device."""
        return bool(self.output_token_ids) and self.output_token_ids[-1] == UNKNOWN_TOKEN

    @property
    def num_known_outputs(self) -> int:
        return len(self.output_token_ids) - self.has_unknown

    @property
    def is_full(self) -> bool:
        """No token may follow the newest one."""
        return len(self.output_token_ids) >= self._max_outputs

    @property
    def num_shared_pages(self) -> int:
        return 0 if self.lease is None else len(self.lease.page_ids)

    @property
    def is_decoding(self) -> bool:
        outputs = self.output_token_ids
        num_tokens = len(self.prompt_token_ids) + len(outputs)
        return num_tokens == self.num_computed + 1 and bool(outputs)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and not self.output_token_ids

    def reusable_token_ids(self) -> list[int]:
        """What may come from the prefix cache: one token at least must be computed to go on."""
        return [] if self.wants_prompt_logprobs else self.tokens(0, self.num_tokens - 1)

    def start(self, now: float) -> None:
        self.started_s = now
        self.start_counters = (self.standing.tenant.counter, self.standing.adapter.counter)
        self.num_spare_refused = None
        self._num_starts += 1
        if self._num_starts == 1:
            self.first_started_s = now
            self.num_reused_tokens = self.num_computed

    def chunk(self, num_tokens: int) -> Chunk:
        """The next num_tokens uncomputed tokens, with a sample row if they are the last."""
        start, stop = self.num_computed, self.num_computed + num_tokens
        completes = stop == self.num_tokens
        is_sampled = completes and self.request.params.max_tokens > 0
        wants_logprobs = self.wants_prompt_logprobs
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=self.tokens(start, stop),
            start=start,
            page_ids=self.page_ids,
            selection=self.request.selection,
            sample=self._sample_row if is_sampled else None,
            prompt_logprobs=self.request.params.prompt_logprobs if wants_logprobs else None,
            next_prompt_token_ids=self.prompt_token_ids[start + 1 : stop + 1]
            if wants_logprobs
            else (),
        )

    def decode_chunk(self) -> Chunk:
        """As chunk(1), of a sequence that is decoding."""
        return Chunk(
            self.sequence_id,
            self.output_token_ids[-1:],
            self.num_computed,
            self.page_ids,
            self.request.selection,
            self._sample_row,
        )

    def tenure(self, now: float, min_s: float) -> Tenure:
        """For min_s, it yields only to those who came before it when it started."""
        assert self.started_s is not None
        if now - self.started_s < min_s:
            return Tenure(self.standing, *self.start_counters)
        return Tenure(self.standing, self.standing.tenant.counter, self.standing.adapter.counter)

    def charge_prompt(self, num_tokens: int) -> None:
        """For the next num_tokens: what is computed again after a preemption costs nothing."""
        stop = min(self.num_computed + num_tokens, len(self.prompt_token_ids))
        num_new = stop - max(self.num_computed, self._num_charged)
        if num_new > 0:
            self.standing.charge(PROMPT_TOKEN_COST * num_new)
            self._num_charged = stop

    def restart(self, now: float) -> None:
        """After preemption: nothing is in pages any more; the tokens stay."""
        self.num_computed = 0
        self.page_ids = []
        self.prompt_logprobs = []
        self.queued_s = now
        self.passed_over_s = None
        self.started_s = None

    def tokens(self, start: int, stop: int) -> list[int]:
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        tokens = self.prompt_token_ids[start:stop]
        return tokens + self.output_token_ids[: max(0, stop - num_prompt)]
