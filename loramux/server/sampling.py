"""Sampling fields of a body: conversion to SamplingParams, and fields that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loramux.backend import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.wire import ChatRequest, CompletionRequest, GenerationBody, OpenAiBody
from loramux.types.sampling import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_SEED = 2**63

COPIED_FIELDS = (
    *("n", "temperature", "top_p", "min_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How many log probabilities a request wants per token; None: no log probabilities."""

    num_output: int | None = None
    num_prompt: int | None = None


def chat_logprobs_of(body: ChatRequest) -> Logprobs:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {top}.", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return Logprobs(top if body.logprobs else None, _prompt_logprobs(body))


def completion_logprobs_of(body: CompletionRequest) -> Logprobs:
    num_prompt = _prompt_logprobs(body)
    if body.echo and body.logprobs is not None:
        if num_prompt not in (None, body.logprobs):
            raise InvalidRequest(
                "prompt_logprobs must be equal to logprobs if echo reports both.",
                param="prompt_logprobs",
            )
        num_prompt = body.logprobs
    return Logprobs(body.logprobs, num_prompt)


def _prompt_logprobs(body: OpenAiBody) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs is only for requests without stream.", param="prompt_logprobs"
        )
    return body.prompt_logprobs


def sampling_params(body: GenerationBody, logprobs: Logprobs, *, vocab_size: int) -> SamplingParams:
    """All sampling parameters but max_tokens, which depends on the prompt."""
    _check_seed(body.seed)
    given: dict[str, Any] = {
        name: value for name in COPIED_FIELDS if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        **given,
        logprobs=logprobs.num_output,
        prompt_logprobs=logprobs.num_prompt,
        top_k=min(body.top_k or 0, vocab_size),
        stop=_stop(body.stop),
        stop_token_ids=_token_ids(body.stop_token_ids or [], "stop_token_ids", vocab_size),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, vocab_size),
    )


def bad_words_of(body: GenerationBody, codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """The token ids of each bad word, with and without a space before it."""
    words = body.bad_words or []
    longest = max(map(len, words), default=0)
    if len(words) > MAX_BAD_WORDS or longest > MAX_STOP_CHARACTERS or not all(words):
        raise InvalidRequest(
            f"bad_words takes up to {MAX_BAD_WORDS} words of 1 to {MAX_STOP_CHARACTERS} "
            "characters.",
            param="bad_words",
        )
    runs = []
    for word in words:
        plain = codec.encode(word, add_special_tokens=False)
        spaced = codec.encode(f" {word.lstrip()}", add_special_tokens=False)
        runs.append(tuple(plain))
        # Otherwise the run of the plain word is part of it.
        if len(spaced) == len(plain) and spaced != plain:
            runs.append(tuple(spaced))
    return tuple(run for run in runs if run)


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """The limit of output tokens that a body sets."""

    value: int | None
    """None: the route's default."""
    param: str = "max_tokens"
    """The field that sets it."""


def max_tokens_of(body: GenerationBody) -> MaxTokens:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is not None:
            if value < 0:
                raise InvalidRequest(f"{name} must be 0 or more, got {value}.", param=name)
            return MaxTokens(value, name)
    return MaxTokens(None)


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only for requests with stream: true.", param="stream_options"
        )


def _check_seed(seed: int | None) -> None:
    if seed is not None and not -MAX_SEED <= seed < MAX_SEED:
        raise InvalidRequest(f"seed must fit into 64 bits, got {seed}.", param="seed")


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.",
            param="stop",
        )
    longest = max((len(string) for string in strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are valid.",
            param="stop",
        )
    return strings


def _logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    _token_ids(list(bias), "logit_bias", vocab_size)
    return bias


def _allowed(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    return None if token_ids is None else _token_ids(token_ids, "allowed_token_ids", vocab_size)


def _token_ids(token_ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} names token {token_id}, outside the vocabulary of {vocab_size}.",
                param=param,
            )
    return tuple(token_ids)
