"""What a body of any API asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import Conversation
from loramux.server.chat.structured.fields import AskedConstraint, json_options
from loramux.server.chat.tools.chat import ChatPlan, plan_chat
from loramux.server.context import Context
from loramux.server.generate.fim import Filler, FillPrompt
from loramux.server.generate.generation import RouteKind
from loramux.server.generate.prompts import encode_messages, encode_pair, encode_prompt
from loramux.server.generate.sampling import Logprobs, TokenReport, Truncation
from loramux.server.generate.selection import ModelReference, combination_of
from loramux.server.naming.names import Selected
from loramux.types.pooling import Pooling
from loramux.types.sampling import SamplingParams
from loramux.wire.text import GenerationBody


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a cross-encoder reads as one input."""

    first: str
    second: str


Encoder = Callable[[TextCodec, int], Sequence[int]]
"""Returns the token ids of a prompt for a tokenizer and a maximum context length."""
Prompt = str | TextPair | FillPrompt | Sequence[str | int] | Encoder
"""A text, two texts, a text with a hole, token ids, a mix of texts and token ids, or what encodes
the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body of any API asks for, before names and sizes are checked."""

    kind: RouteKind
    body: GenerationBody
    """Model, adapters, and sampling parameters."""
    prompts: Sequence[Prompt] = ()
    chat: Conversation | None = None
    """Messages in the place of prompts."""
    selected: ModelReference | Selected | None = None
    """None: what `body` names."""
    logprobs: Logprobs = Logprobs()
    truncation: Truncation = Truncation()
    add_special_tokens: bool = True
    constraint: AskedConstraint | None = None
    """Instead of a constraint in `body`."""
    pooling: Pooling | None = None
    """Asks for a vector of each prompt instead of an answer."""
    report: TokenReport = TokenReport()
    name: str = ""
    """The adapter or model as the body names it, for receipts."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) if self.chat is None else 1

    @property
    def reference(self) -> ModelReference | Selected:
        return self.selected or reference_of(self.body)

    @property
    def shown_name(self) -> str | None:
        return self.name or str(self.reference) or None


async def plan_asked(
    context: Context, asked: Asked, params: SamplingParams, codec: TextCodec
) -> ChatPlan | None:
    """Return how messages are put to the model; None: there are prompts."""
    if asked.chat is None:
        return None
    whitespace = json_options(asked.body)
    return await plan_chat(context.options, asked.chat, whitespace, params, codec)


def encode(
    asked: Asked, plan: ChatPlan | None, codec: TextCodec, max_model_len: int
) -> list[Sequence[int]]:
    """Return the token ids of each prompt, or of the messages."""
    if plan is None or asked.chat is None:
        return [_encode_one(codec, prompt, max_model_len, asked) for prompt in asked.prompts]
    messages = encode_messages(
        codec,
        plan.messages,
        tools=plan.tools,
        max_model_len=max_model_len,
        add_generation_prompt=asked.chat.add_generation_prompt,
        continue_final_message=asked.chat.continue_final_message,
        chat_template_kwargs=asked.chat.template,
    )
    return [messages]


def _encode_one(
    codec: TextCodec, prompt: Prompt, max_model_len: int, asked: Asked
) -> Sequence[int]:
    adds = asked.add_special_tokens
    match prompt:
        case TextPair():
            return encode_pair(codec, prompt.first, prompt.second, max_model_len, adds)
        case FillPrompt():
            return Filler(codec).encode(
                prompt, max_model_len=max_model_len, add_special_tokens=adds
            )
        case str():
            return encode_prompt(
                codec, prompt, max_model_len=max_model_len, add_special_tokens=adds
            )
        case Sequence():
            return _encode_parts(codec, prompt, max_model_len)
    return prompt(codec, max_model_len)


def _encode_parts(
    codec: TextCodec, parts: Sequence[str | int], max_model_len: int
) -> Sequence[int]:
    """Token ids with the texts between them encoded; special tokens come before the first part."""
    token_ids: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            token_ids.append(part)
            continue
        token_ids += encode_prompt(
            codec, part, max_model_len=max_model_len, add_special_tokens=at == 0
        )
    return token_ids


def reference_of(body: GenerationBody) -> ModelReference:
    return ModelReference(
        body.model, body.adapters, body.adapter_weights, combination=combination_of(body)
    )


def generation_body(**fields: Any) -> GenerationBody:
    """Return a body of the own API from fields of another one; raises InvalidRequest for a wrong
    type.
    """
    try:
        return msgspec.convert(fields, GenerationBody)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}.") from error


class Penalised(Protocol):
    """A body with penalties, and the number of the last tokens that they are to count."""

    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_last_n: int | None


def check_penalty_window(body: Penalised) -> None:
    is_penalised = body.repeat_penalty not in (None, 1) or bool(
        body.presence_penalty or body.frequency_penalty
    )
    if is_penalised and body.repeat_last_n not in (None, -1):
        raise InvalidRequest(
            "Penalties count the whole text here: leave repeat_last_n out, or send -1.",
            param="repeat_last_n",
        )
