"""Turns the token events of a request into deltas, a stream of them, and the complete output."""

from __future__ import annotations

import asyncio

from loramux.backend.text import Delta
from loramux.engine.codec import EngineCodec
from loramux.engine.detokenizer import Detokenizer
from loramux.errors import LoramuxError
from loramux.types.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestFacts,
    RequestOutput,
    TokenEvent,
    TokenLogprob,
)


class OutputCollector:
    """Collects the events of one request; `output` is complete once `is_finished`."""

    def __init__(
        self, request: Request, tokenizer: EngineCodec, *, prompt: str | None = None
    ) -> None:
        self.request = request
        self._choices = [_Choice(i, request, tokenizer) for i in range(request.params.n)]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[choice.output for choice in self._choices],
            prompt_logprobs=None if request.params.prompt_logprobs is None else [],
        )

    def apply(self, event: TokenEvent) -> Delta | None:
        """Return the new delta; None if there is no new text or the choice has already ended."""
        logprobs = self.output.prompt_logprobs
        if logprobs is not None and not logprobs and event.prompt_logprobs:
            # Every choice carries the whole list.
            logprobs += event.prompt_logprobs
        self.output.pooled = event.pooled or self.output.pooled
        return self._choices[event.index].apply(event)

    @property
    def is_finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.output.outputs)


class _Choice:
    def __init__(self, index: int, request: Request, tokenizer: EngineCodec) -> None:
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._num_sent = 0
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._num_reused: int | None = None
        self._facts: RequestFacts | None = None
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])

    def apply(self, event: TokenEvent) -> Delta | None:
        if self.output.finish_reason is not None:
            return None
        if event.prompt_logprobs and self._request.params.prompt_logprobs is not None:
            self._prompt_logprobs = tuple(event.prompt_logprobs)
        if not self.output.token_ids:
            self._num_reused = event.num_reused
        self._facts = event.facts or self._facts
        text = self._read(event)
        self.output.text += text
        stop_string = self._detokenizer.stopped_by
        if stop_string is not None:
            self.output.finish_reason = FinishReason.STOP
            self.output.stop_reason = stop_string
        else:
            self.output.finish_reason = event.finish_reason
            self.output.stop_reason = self._stop_token(event)
        if not text and self.output.finish_reason is None:
            return None
        stop_hit = stop_string is not None and event.finish_reason is None
        return self._delta(text, event, stop_hit=stop_hit)

    def _read(self, event: TokenEvent) -> str:
        """Return the event's new text; a stop token has none unless the parameters include it."""
        text = ""
        if event.token_id is not None:
            self.output.token_ids.append(event.token_id)
            # The last token of a grammar is part of the answer; a stop token is not.
            ends_it = event.stop_token_id is not None
            if not ends_it or self._request.params.include_stop_str_in_output:
                text = self._detokenizer.push(event.token_id)
        if self.output.logprobs is not None and event.logprob is not None:
            self.output.logprobs.append(event.logprob)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        return text

    def _stop_token(self, event: TokenEvent) -> int | None:
        is_eos = (
            event.stop_token_id in self._request.eos_token_ids
            and not self._request.params.ignore_eos
        )
        return None if is_eos else event.stop_token_id

    def _delta(self, text: str, event: TokenEvent, *, stop_hit: bool) -> Delta:
        output, start = self.output, self._num_sent
        self._num_sent = len(output.token_ids)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        num_reused, self._num_reused = self._num_reused, None
        facts, self._facts = self._facts, None
        return Delta(
            index=output.index,
            text=text,
            token_ids=tuple(output.token_ids[start:]),
            logprobs=None if output.logprobs is None else tuple(output.logprobs[start:]),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            stop_hit=stop_hit,
            error=event.error,
            error_code=event.error_code,
            prompt_logprobs=prompt_logprobs,
            num_reused=num_reused,
            facts=facts,
            pooled=event.pooled,
        )


class RequestStream:
    """Merges new deltas into those not read yet, so that it never holds more than the answer."""

    def __init__(self, collector: OutputCollector) -> None:
        self._collector = collector
        self._pending: dict[int, Delta] = {}
        self._error: LoramuxError | None = None
        self._has_news = asyncio.Event()

    @property
    def request(self) -> Request:
        return self._collector.request

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended and all deltas were taken."""
        return self._collector.is_finished and not self._pending

    def put(self, event: TokenEvent) -> Delta | None:
        """Return the new delta; the caller checks it for a stop string."""
        delta = self._collector.apply(event)
        if delta is not None:
            waiting = self._pending.get(delta.index)
            self._pending[delta.index] = delta if waiting is None else _join(waiting, delta)
            self._has_news.set()
        return delta

    def fail(self, error: LoramuxError) -> None:
        self._error = error
        self._has_news.set()

    async def take(self) -> list[Delta]:
        """Wait for deltas; raise the request's error once all deltas before it were taken."""
        await self._has_news.wait()
        self._has_news.clear()
        deltas, self._pending = list(self._pending.values()), {}
        if self._error is not None:
            if not deltas:
                raise self._error
            self._has_news.set()
        return deltas


def _join(first: Delta, second: Delta) -> Delta:
    logprobs = None
    if first.logprobs is not None:
        logprobs = first.logprobs + (second.logprobs or ())
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        stop_hit=second.stop_hit,
        error=second.error,
        error_code=second.error_code,
        prompt_logprobs=first.prompt_logprobs,
        num_reused=first.num_reused,
        facts=first.facts or second.facts,
        pooled=second.pooled,
    )
