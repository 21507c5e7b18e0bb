"""One choice of one request, on its way through the engine."""

from __future__ import annotations

from loramux.types import Chunk, Request, SampleRow, TokenLogprob

_CHOICE_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Sequence:
    """Tokens so far, how many of them have their keys and values in pages, and those pages."""

    def __init__(self, sequence_id: int, request: Request, index: int, *, max_length: int) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self.max_length = max_length
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.page_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.seed = (request.seed + index * _CHOICE_STRIDE) & _MASK

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1 and bool(self.output_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def cids(self) -> list[str]:
        return [cid for cid, _ in self.request.selection]

    def chunk(self, num_tokens: int) -> Chunk:
        """The next num_tokens uncomputed tokens, with a sample row if they are the last."""
        start, stop = self.num_computed, self.num_computed + num_tokens
        completes = stop == self.num_tokens
        sample = None
        if completes and self.request.params.max_tokens > 0:
            sample = SampleRow(
                params=self.request.params,
                seed=self.seed,
                prompt_token_ids=self.prompt_token_ids,
                output_token_ids=self.output_token_ids,
            )
        wants_logprobs = self.wants_prompt_logprobs
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=self._tokens(start, stop),
            start=start,
            page_ids=self.page_ids,
            selection=self.request.selection,
            sample=sample,
            prompt_logprobs=self.request.params.prompt_logprobs if wants_logprobs else None,
            next_prompt_token_ids=self.prompt_token_ids[start + 1 : stop + 1]
            if wants_logprobs
            else (),
        )

    def restart(self) -> None:
        """After preemption: nothing is in pages any more; the tokens stay."""
        self.num_computed = 0
        self.page_ids = []
        self.prompt_logprobs = []

    def _tokens(self, start: int, stop: int) -> list[int]:
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        tokens = self.prompt_token_ids[start:stop]
        return tokens + self.output_token_ids[: max(0, stop - num_prompt)]
