"""Writes generations as LoRAX and TGI do: sequences, details and token events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from loramux.backend.text import Delta, TextCodec
from loramux.server.context import Context
from loramux.server.families import lorax_wire as wire
from loramux.server.families.lorax_wire import Details, GenerateAnswer, Parameters, StreamAnswer
from loramux.server.generate.generation import Choice, Generation
from loramux.server.generate.receipt_draft import Timing
from loramux.server.generate.sampling import LOWEST
from loramux.types.request import TokenLogprob
from loramux.wire.text import Usage


def finish_reason(reason: str, stop_reason: str | int | None) -> str:
    if reason == "length":
        return "length"
    return "eos_token" if stop_reason is None else "stop_sequence"


@dataclass(frozen=True, slots=True)
class TokenWriter:
    """Writes tokens with their log probabilities and alternatives."""

    codec: TextCodec
    parameters: Parameters

    def is_special(self, token_id: int) -> bool:
        text = self.codec.decode([token_id], skip_special_tokens=True)
        return not text and bool(self.codec.token_to_str(token_id))

    def token(
        self, token_id: int, entry: TokenLogprob | None, text: str | None = None
    ) -> wire.Token:
        shown = self.codec.token_to_str(token_id) if text is None else text
        return wire.Token(
            id=token_id,
            text=shown,
            logprob=None if entry is None else max(entry.logprob, LOWEST),
            special=self.is_special(token_id),
            alternative_tokens=self.top(entry, self.parameters.return_k_alternatives),
        )

    def top(self, entry: TokenLogprob | None, num: int | None) -> list[wire.TopToken] | UnsetType:
        if not num or entry is None:
            return UNSET
        return [
            wire.TopToken(
                id=i,
                text=self.codec.token_to_str(i),
                logprob=max(logprob, LOWEST),
                special=self.is_special(i),
            )
            for i, logprob in entry.top[:num]
        ]


@dataclass(frozen=True, slots=True)
class SequenceWriter:
    """Writes complete choices."""

    codec: TextCodec
    parameters: Parameters
    prefix: str
    """Text before every answer: the prompt, if it was asked for."""
    prompt: Sequence[int]

    def sequence(self, choice: Choice) -> wire.Sequence:
        tokens = TokenWriter(self.codec, self.parameters)
        entries: list[TokenLogprob | None] = [*choice.logprobs]
        entries = entries or [None] * len(choice.token_ids)
        pairs = list(zip(choice.token_ids, entries, strict=False))
        num_top = self.parameters.top_n_tokens
        tops = [tokens.top(entry, num_top) for _, entry in pairs]
        return wire.Sequence(
            generated_text=self.prefix + choice.text,
            finish_reason=finish_reason(choice.finish_reason, choice.stop_reason),
            generated_tokens=len(choice.token_ids),
            seed=self.parameters.seed,
            prefill=self._prefill(choice),
            tokens=[tokens.token(i, entry) for i, entry in pairs],
            top_tokens=[top for top in tops if top is not UNSET] if num_top else UNSET,
        )

    def _prefill(self, choice: Choice) -> list[wire.InputToken]:
        if not self.parameters.decoder_input_details:
            return []
        logprobs = [None, *(max(one.logprob, LOWEST) for one in choice.prompt_logprobs)]
        return [
            wire.InputToken(id=i, text=self.codec.token_to_str(i), logprob=logprob)
            for i, logprob in zip(self.prompt, logprobs, strict=False)
        ]


def answer_of(choices: Sequence[Choice], writer: SequenceWriter) -> GenerateAnswer:
    """Write the choice with the highest mean log probability, and the others in the details."""
    ranked = sorted(choices, key=_mean_logprob, reverse=True)
    first, *others = [writer.sequence(choice) for choice in ranked]
    parameters = writer.parameters
    if not parameters.details and not parameters.decoder_input_details:
        return GenerateAnswer(generated_text=first.generated_text)
    details = Details(
        finish_reason=first.finish_reason,
        prompt_tokens=len(writer.prompt),
        generated_tokens=first.generated_tokens,
        seed=first.seed,
        prefill=first.prefill,
        tokens=first.tokens,
        top_tokens=first.top_tokens,
        best_of_sequences=others or UNSET,
    )
    return GenerateAnswer(generated_text=first.generated_text, details=details)


def _mean_logprob(choice: Choice) -> float:
    return sum(one.logprob for one in choice.logprobs) / max(1, len(choice.logprobs))


class StreamWriter:
    """Writes one event per token; the last one has the whole text."""

    def __init__(
        self, codec: TextCodec, parameters: Parameters, prefix: str, num_prompt_tokens: int
    ) -> None:
        self._tokens = TokenWriter(codec, parameters)
        self._codec = codec
        self._parameters = parameters
        self._texts = [prefix]
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def write(self, delta: Delta) -> Iterator[StreamAnswer]:
        self._texts.append(delta.text)
        entries = delta.logprobs or ()
        texts = split_text(self._codec, delta)
        last = len(delta.token_ids) - 1
        for at, (token_id, text) in enumerate(zip(delta.token_ids, texts, strict=True)):
            entry = entries[at] if at < len(entries) else None
            self._num_tokens += 1
            answer = StreamAnswer(
                index=self._num_tokens,
                token=self._tokens.token(token_id, entry, text),
                top_tokens=self._tokens.top(entry, self._parameters.top_n_tokens),
            )
            if at == last and delta.finish_reason is not None:
                self._end(answer, delta)
            yield answer

    def _end(self, answer: StreamAnswer, delta: Delta) -> None:
        answer.generated_text = "".join(self._texts)
        answer.details = wire.StreamDetails(
            finish_reason=finish_reason(str(delta.finish_reason), delta.stop_reason),
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=self._num_tokens,
            seed=self._parameters.seed,
            input_length=self._num_prompt_tokens,
        )


def split_text(codec: TextCodec, delta: Delta) -> list[str]:
    """Return the text of each token of a delta; together they are its text."""
    shown = [codec.decode([i], skip_special_tokens=True) for i in delta.token_ids]
    if "".join(shown) == delta.text:
        return shown
    return [*[""] * (len(shown) - 1), delta.text] if shown else []


def response_headers(
    context: Context, generation: Generation, inputs: str, usage: Usage | None = None
) -> dict[str, str]:
    """`usage`: None in a stream, whose headers are sent before its answer."""
    request = generation.request
    headers = {
        "x-compute-type": context.backend.card.device.partition(":")[0],
        "x-compute-characters": str(len(inputs)),
        "x-model-id": context.base_names[0],
    }
    if request.selected.adapters:
        parts = [part for one in request.selected.adapters for part in one.parts or (one,)]
        # Header values are Latin-1; names may be any text.
        names = ",".join(part.text for part in parts)
        headers["x-adapter-id"] = names.encode("ascii", "backslashreplace").decode()
    if usage is not None:
        headers |= {
            "x-prompt-tokens": str(usage.prompt_tokens),
            "x-generated-tokens": str(usage.completion_tokens),
            "x-skipped-tokens": "0",
            "x-total-tokens": str(usage.total_tokens),
        }
        headers |= _times(generation.draft.timing, usage.completion_tokens)
    return headers


def _times(timing: Timing, num_tokens: int) -> dict[str, str]:
    """In milliseconds, but for the time of computing."""
    first_ms = timing.first_ms or timing.total_ms
    inference_ms = max(0.0, timing.total_ms - timing.checked_ms - timing.queue_ms)
    milliseconds = {
        "x-total-time": timing.total_ms,
        "x-validation-time": timing.checked_ms,
        "x-queue-time": timing.queue_ms,
        "x-inference-time": inference_ms,
        "x-time-per-token": inference_ms / max(1, num_tokens),
        "x-time-to-first-token": first_ms,
        "x-time-per-output-token": (timing.total_ms - first_ms) / max(1, num_tokens - 1),
    }
    shown = {name: str(round(value)) for name, value in milliseconds.items()}
    return shown | {"x-compute-time": f"{timing.total_ms / 1000:.6f}"}
