"""Token events of one request to what its caller reads: deltas on the way, and the whole."""

from __future__ import annotations

from loramux.backend import Delta
from loramux.engine.detokenizer import Detokenizer
from loramux.engine.tokenizer import Tokenizer
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
    """`output` is whole when `is_finished`; until then it is what has come so far."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, prompt: str | None = None
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
        """None where there is nothing to send yet, or the choice has ended before."""
        logprobs = self.output.prompt_logprobs
        if logprobs is not None and not logprobs and event.prompt_logprobs:
            # Each choice brings the whole list.
            logprobs += event.prompt_logprobs
        return self._choices[event.index].apply(event)

    @property
    def is_finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.output.outputs)


class _Choice:
    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
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
        """The event's new text. A token that ends the choice has none, unless it is asked for."""
        text = ""
        if event.token_id is not None:
            self.output.token_ids.append(event.token_id)
            ends_it = event.finish_reason is FinishReason.STOP
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
        )
