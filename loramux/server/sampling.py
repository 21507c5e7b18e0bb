"""Sampling fields of a body: conversion to SamplingParams, and fields that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from loramux.backend import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.body import decode
from loramux.server.wire import ChatRequest, CompletionRequest, GenerationBody
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

# Fields of other servers -> their values that have no effect and are accepted. A request that names
# an adapter in such a field must not silently run on the base.
REFUSED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "best_of": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "adapter_id": (),
    "merged_adapters": (),
}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": (),
    "add_special_tokens": (False,),
    "mm_processor_kwargs": (),
}
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


class UnsupportedFields:
    """Fields of other servers that a route refuses, unless their value has no effect."""

    def __init__(self, harmless: Mapping[str, tuple[Any, ...]]) -> None:
        self._harmless = harmless
        self._struct = msgspec.defstruct("Unsupported", [(name, Any, None) for name in harmless])

    def check(self, raw: bytes, *, num_choices: int) -> None:
        """Raise InvalidRequest for the first such field of the body."""
        given = decode(raw, self._struct)
        for name, values in self._harmless.items():
            value = getattr(given, name)
            is_num_choices = name == "best_of" and value == num_choices
            if value is not None and value not in values and not is_num_choices:
                raise InvalidRequest(
                    f"{name} is not supported by this server: leave it out.", param=name
                )


UNSUPPORTED_IN_CHAT = UnsupportedFields(REFUSED_ANYWHERE | REFUSED_IN_CHAT)
UNSUPPORTED_IN_COMPLETIONS = UnsupportedFields(REFUSED_ANYWHERE | REFUSED_IN_COMPLETIONS)


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
    return Logprobs(top if body.logprobs else None)


def completion_logprobs_of(body: CompletionRequest) -> Logprobs:
    return Logprobs(body.logprobs, body.logprobs if body.echo else None)


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
