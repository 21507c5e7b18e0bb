"""Sampling fields of a body: conversion to SamplingParams, and fields that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.types.request import TokenLogprob
from loramux.types.sampling import MAX_LOGPROBS, SamplingParams
from loramux.wire.text import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    OpenAiBody,
    PromptLogprob,
    PromptLogprobs,
)

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 32_768
MAX_SHARED_IDS = 2**18
"""Every prompt of a request takes its token ids to the engine: of stops, biases and the like."""
MAX_PROMPT_LOGPROBS = 2**18
"""Log probabilities of prompt tokens that one answer may have."""
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
        stop_token_ids=_token_ids(
            body.stop_token_ids or [], "stop_token_ids", vocab_size, MAX_STOP_TOKEN_IDS
        ),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, vocab_size),
        num_speculative_tokens=None
        if body.speculative is None
        else body.speculative.num_speculative_tokens,
    )


def bad_words_of(body: GenerationBody, codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word, with and without a space before it."""
    words = body.bad_words or []
    longest = max(map(len, words), default=0)
    if len(words) > MAX_BAD_WORDS or longest > MAX_STOP_CHARACTERS or not all(words):
        raise InvalidRequest(
            f"bad_words takes up to {MAX_BAD_WORDS} words of 1 to {MAX_STOP_CHARACTERS} "
            "characters.",
            param="bad_words",
        )
    if sum(map(len, words)) > MAX_BAD_WORD_CHARACTERS:
        raise InvalidRequest(
            f"bad_words may have {MAX_BAD_WORD_CHARACTERS} characters together.", param="bad_words"
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


def check_sizes(params: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequest if the parameters of all prompts, or what they report, is too much."""
    num_ids = (
        len(params.stop_token_ids)
        + len(params.logit_bias)
        + len(params.allowed_token_ids or ())
        + sum(map(len, params.bad_words_token_ids))
    )
    if num_ids * len(prompts) > max(MAX_SHARED_IDS, num_ids):
        raise InvalidRequest(
            f"{len(prompts)} prompts with {num_ids} token ids each in stop_token_ids, logit_bias, "
            f"allowed_token_ids and bad_words are more than {MAX_SHARED_IDS}. Send fewer prompts.",
            param="prompt",
        )
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(map(len, prompts))
    num_logprobs = num_tokens * params.n * (params.prompt_logprobs + 1)
    if num_logprobs > max(MAX_PROMPT_LOGPROBS, num_tokens):
        raise InvalidRequest(
            f"{num_tokens} prompt tokens, n={params.n} and {params.prompt_logprobs} alternatives "
            f"are {num_logprobs} log probabilities; one answer may have {MAX_PROMPT_LOGPROBS}. "
            "Lower logprobs or n, or send fewer prompts.",
            param="logprobs",
        )


def _logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    _token_ids(list(bias), "logit_bias", vocab_size, MAX_LOGIT_BIASES)
    return bias


def _allowed(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    return _token_ids(token_ids, "allowed_token_ids", vocab_size, vocab_size)


def _token_ids(token_ids: list[int], param: str, vocab_size: int, limit: int) -> tuple[int, ...]:
    if len(token_ids) > limit:
        raise InvalidRequest(
            f"{param} has {len(token_ids)} entries; at most {limit} are allowed.", param=param
        )
    extremes = (min(token_ids), max(token_ids)) if token_ids else ()
    outside = [i for i in extremes if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequest(
            f"{param} names token {outside[0]}, outside the vocabulary of {vocab_size}.",
            param=param,
        )
    return tuple(token_ids)


# JSON cannot represent -Infinity.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What a request wants to know about tokens."""

    token_ids: bool = False
    """The ids of the tokens of prompt and answer."""
    as_ids: bool = False
    """Tokens of log probabilities are written as `token_id:N`."""
    prompt_logprobs: bool = False


def token_report(body: OpenAiBody) -> TokenReport:
    return TokenReport(
        token_ids=bool(body.return_token_ids),
        as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
    )


def show_token(codec: TextCodec, token_id: int, report: TokenReport) -> str:
    return f"token_id:{token_id}" if report.as_ids else codec.token_to_str(token_id)


def prompt_logprobs(
    codec: TextCodec, logprobs: Sequence[TokenLogprob]
) -> list[PromptLogprobs | None]:
    """vLLM's list: null for the first token, then the alternatives at each position by id."""

    def shown(entry: TokenLogprob) -> PromptLogprobs:
        ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(i): PromptLogprob(
                logprob=max(logprob, LOWEST), rank=rank, decoded_token=codec.token_to_str(i)
            )
            for i, (logprob, rank) in ranked.items()
        }

    return [None, *map(shown, logprobs)]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt are kept, and at which end."""

    num_kept: int | None = None
    """None: all, -1: as many as fit."""
    keeps_start: bool = False
    max_tokens: MaxTokens = MaxTokens(None)

    def cut(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        kept = self.num_kept
        if kept == -1:
            kept = max(1, max_model_len - (self.max_tokens.value or 1))
        if kept is None or len(token_ids) <= kept:
            return token_ids
        return token_ids[:kept] if self.keeps_start else token_ids[-kept:]


def truncation_of(body: OpenAiBody) -> Truncation:
    kept = body.truncate_prompt_tokens
    check_kept(kept)
    return Truncation(kept, body.truncation_side == "right")


def check_kept(kept: int | None) -> None:
    if kept is not None and kept != -1 and kept < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or over 0, got {kept}.",
            param="truncate_prompt_tokens",
        )
