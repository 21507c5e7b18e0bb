"""A request's fields to SamplingParams; what cannot be honoured is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.body import decode
from loramux.server.wire import ChatRequest, CompletionRequest, GenerationRequest
from loramux.types.sampling import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_SEED = 2**63

TAKEN_AS_THEY_ARE = (
    *("n", "temperature", "top_p", "min_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)

# Fields that clients know from other servers -> the values that change nothing here. An adapter
# named in another server's way must not silently select the base.
REFUSED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "best_of": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "adapter_id": (),
    "merged_adapters": (),
}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
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

_ChatRefused = msgspec.defstruct(
    "ChatRefused", [(name, Any, None) for name in REFUSED_ANYWHERE | REFUSED_IN_CHAT]
)
_CompletionRefused = msgspec.defstruct(
    "CompletionRefused", [(name, Any, None) for name in REFUSED_ANYWHERE | REFUSED_IN_COMPLETIONS]
)


def refuse_unsupported(body: bytes, request: GenerationRequest) -> None:
    """Raises for a field of another server's that this one knows but cannot honour."""
    is_chat = isinstance(request, ChatRequest)
    given = decode(body, _ChatRefused if is_chat else _CompletionRefused)
    harmless = REFUSED_ANYWHERE | (REFUSED_IN_CHAT if is_chat else REFUSED_IN_COMPLETIONS)
    for name, values in harmless.items():
        value = getattr(given, name)
        is_own_n = name == "best_of" and value == (request.n or 1)
        if value is not None and value not in values and not is_own_n:
            raise InvalidRequest(
                f"{name} is not supported by this server: leave it out.", param=name
            )


def sampling_params(request: GenerationRequest, *, vocab_size: int) -> SamplingParams:
    """All but max_tokens, which depends on the prompt."""
    _check_seed(request.seed)
    given: dict[str, Any] = {
        name: value for name in TAKEN_AS_THEY_ARE if (value := getattr(request, name)) is not None
    }
    return SamplingParams(
        **given | _logprobs(request),
        top_k=min(request.top_k or 0, vocab_size),
        stop=_stop(request.stop),
        stop_token_ids=_token_ids(request.stop_token_ids or [], "stop_token_ids", vocab_size),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
    )


@dataclass(frozen=True, slots=True)
class AskedLength:
    max_tokens: int | None
    """None: the route's default."""
    param: str = "max_tokens"
    """The field that said so."""


def asked_length(request: GenerationRequest) -> AskedLength:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(request, name)
        if value is not None:
            if value < 0:
                raise InvalidRequest(f"{name} must be 0 or more, got {value}.", param=name)
            return AskedLength(value, name)
    return AskedLength(None)


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only for requests with stream: true.", param="stream_options"
        )


def _logprobs(request: GenerationRequest) -> dict[str, int]:
    if isinstance(request, ChatRequest):
        return _chat_logprobs(request)
    if not isinstance(request, CompletionRequest) or request.logprobs is None:
        return {}
    if request.echo:
        return {"logprobs": request.logprobs, "prompt_logprobs": request.logprobs}
    return {"logprobs": request.logprobs}


def _chat_logprobs(request: ChatRequest) -> dict[str, int]:
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be 0 to {MAX_LOGPROBS}, got {top}.", param="top_logprobs"
        )
    if top and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return {"logprobs": top} if request.logprobs else {}


def _check_seed(seed: int | None) -> None:
    if seed is not None and not -MAX_SEED <= seed < MAX_SEED:
        raise InvalidRequest(f"seed must fit into 64 bits, got {seed}.", param="seed")


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are taken.", param="stop"
        )
    longest = max((len(string) for string in strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are taken.",
            param="stop",
        )
    return strings


def _logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    _token_ids(list(bias), "logit_bias", vocab_size)
    return bias


def _token_ids(token_ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} names token {token_id}, outside the vocabulary of {vocab_size}.",
                param=param,
            )
    return tuple(token_ids)
