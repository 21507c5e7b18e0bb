"""What a body of any API asks for, and how it becomes a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from msgspec import structs

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.check import enforceable_grammar
from loramux.server.chat.structured.fields import AskedConstraint, json_options
from loramux.server.chat.tools.chat import ChatPlan, plan_chat
from loramux.server.context import Context
from loramux.server.generate.fim import Filler, FillPrompt
from loramux.server.generate.generation import (
    Generation,
    RouteKind,
    check_num_choices,
    open_generation,
)
from loramux.server.generate.prompts import encode_messages, encode_pair, encode_prompt, off_loop
from loramux.server.generate.receipt_draft import ReceiptDraft
from loramux.server.generate.requests import resolve_request
from loramux.server.generate.sampling import Logprobs
from loramux.server.generate.selection import ModelReference, combination_of
from loramux.server.generate.token_reports import Truncation
from loramux.server.http.body import read_body
from loramux.server.http.call import Call
from loramux.server.naming.names import Selected
from loramux.types.pooling import Pooling
from loramux.types.sampling import SamplingParams
from loramux.wire.text import ChatRequest, GenerationBody


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a cross-encoder reads as one input."""

    first: str
    second: str


Prompt = str | TextPair | FillPrompt | Sequence[str | int]
"""A text, two texts, a text with a hole, token ids, or a mix of texts and token ids."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools in OpenAI's form, and the choice among them."""

    tools: Sequence[Mapping[str, Any]]
    choice: Any = None
    is_parallel: bool = True
    """Whether one answer may have several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body of another API in the words of the own one: prompts or messages, and parameters."""

    kind: RouteKind
    body: GenerationBody
    prompts: Sequence[Prompt] = ()
    messages: Sequence[dict[str, Any]] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    selected: ModelReference | Selected | None = None
    """None: what `body` names."""
    logprobs: Logprobs = Logprobs()
    truncation: Truncation = Truncation()
    add_special_tokens: bool = True
    constraint: AskedConstraint | None = None
    tools: Tools | None = None
    pooling: Pooling | None = None
    """Asks for a vector of each prompt instead of an answer."""
    name: str = ""
    """The adapter or model as the body names it, for receipts."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) if self.messages is None else 1


async def open_asked(context: Context, http: Call, draft: ReceiptDraft, asked: Asked) -> Generation:
    """Resolves the adapters, tokenizes, and makes the engine requests."""
    reference = asked.selected or reference_of(asked.body)
    draft.asked = asked.name or str(reference) or None
    request = await resolve_request(
        context,
        http,
        draft,
        asked.body,
        asked.kind,
        raw=None,
        reference=reference,
        logprobs=asked.logprobs,
    )
    check_num_choices(context, request, asked.num_prompts)
    if asked.constraint is not None:
        constraint = replace(asked.constraint, options=json_options(asked.body))
        grammar = await enforceable_grammar(constraint)
        params = structs.replace(request.params, grammar=grammar.encode())
        request = replace(request, params=params)
    codec, max_model_len = request.codec, context.backend.card.max_model_len
    if any(isinstance(prompt, FillPrompt) for prompt in asked.prompts):
        request = replace(request, params=Filler(codec).end(request.params))
    plan = await plan_asked(context, asked, request.params, codec)
    if plan is not None:
        http.facts.tool_notes = plan.notes
        params = plan.reply.constrain(request.params)
        request = replace(request, params=params, reply=plan.reply)
    size = len(await read_body(http, context.options.max_body_bytes))
    truncation = replace(asked.truncation, max_tokens=request.max_tokens)

    def encode_all() -> tuple[tuple[int, ...], ...]:
        encoded = encode(asked, plan, codec, max_model_len)
        return tuple(tuple(truncation.cut(ids, max_model_len)) for ids in encoded)

    prompts = await off_loop(size, encode_all, codec=codec, base=context.backend.codec)
    request = replace(request, prompts=prompts, pooling=asked.pooling)
    return open_generation(context, http, request, draft)


async def plan_asked(
    context: Context, asked: Asked, params: SamplingParams, codec: TextCodec
) -> ChatPlan | None:
    """Returns how messages are put to the model; None: there are prompts."""
    if asked.messages is None:
        return None
    body = ChatRequest(
        messages=list(asked.messages),
        guided_whitespace_pattern=asked.body.guided_whitespace_pattern,
    )
    if asked.tools is not None:
        body.tools = [dict(tool) for tool in asked.tools.tools]
        body.tool_choice = asked.tools.choice
        body.parallel_tool_calls = asked.tools.is_parallel
    return await plan_chat(context.options, body, params, codec)


def encode(
    asked: Asked, plan: ChatPlan | None, codec: TextCodec, max_model_len: int
) -> list[Sequence[int]]:
    """Returns the token ids of each prompt, or of the messages."""
    if plan is not None:
        messages = encode_messages(
            codec,
            plan.messages,
            tools=plan.tools,
            max_model_len=max_model_len,
            chat_template_kwargs=asked.template,
        )
        return [messages]
    return [_encode_one(codec, prompt, max_model_len, asked) for prompt in asked.prompts]


def _encode_one(
    codec: TextCodec, prompt: Prompt, max_model_len: int, asked: Asked
) -> Sequence[int]:
    adds = asked.add_special_tokens
    if isinstance(prompt, TextPair):
        return encode_pair(codec, prompt.first, prompt.second, max_model_len, adds)
    if isinstance(prompt, FillPrompt):
        return Filler(codec).encode(prompt, max_model_len=max_model_len)
    if isinstance(prompt, str):
        return encode_prompt(codec, prompt, max_model_len=max_model_len, add_special_tokens=adds)
    return _encode_parts(codec, prompt, max_model_len)


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
    """A body of the own API from fields of another one; raises InvalidRequest for a wrong type."""
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
