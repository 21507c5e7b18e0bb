"""What a body of any API asks for, and how it becomes a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from loramux.backend import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.body import decode, read_body
from loramux.server.context import Context
from loramux.server.foreign_fields import unsupported_in
from loramux.server.generation import Generation, RouteKind, check_num_choices, open_generation
from loramux.server.names import Selected
from loramux.server.prompts import encode_messages, encode_prompt, off_loop
from loramux.server.receipt_draft import ReceiptDraft
from loramux.server.requests import resolve_request
from loramux.server.sampling import Logprobs
from loramux.server.selection import ModelReference, combination_of
from loramux.server.token_reports import Truncation
from loramux.server.wire import GenerationBody

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


Prompt = str | Sequence[str | int]
"""A text, token ids, or a mix of both."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the answer must follow, as another API writes it."""

    kind: str
    """json_schema, json_object, regex, gbnf or ebnf."""
    value: Any
    param: str
    """The field of the body."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools in OpenAI's form, and the choice among them."""

    tools: Sequence[Mapping[str, Any]]
    choice: Any = None
    param: str = "tools"


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
    constraint: Constraint | None = None
    tools: Tools | None = None
    name: str = ""
    """The adapter or model as the body names it, for receipts."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) if self.messages is None else 1


async def read_fields(context: Context, http: Request, kind: type[BodyT]) -> BodyT:
    """Decodes the body; refuses fields that would change the answer and are not known."""
    raw = await read_body(http, context.options.max_body_bytes)
    body = decode(raw, kind)
    unsupported_in(kind).check(raw)
    return body


def read_inner(fields: Mapping[str, Any] | None, kind: type[BodyT]) -> BodyT:
    """Decodes an object inside a body, under the rules of the body itself."""
    raw = msgspec.json.encode(fields or {})
    unsupported_in(kind).check(raw)
    return decode(raw, kind)


async def open_asked(
    context: Context, http: Request, draft: ReceiptDraft, asked: Asked
) -> Generation:
    """Resolves the adapters, tokenizes, and makes the engine requests."""
    _refuse_unsupported(asked)
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
    codec, max_model_len = request.codec, context.backend.card.max_model_len
    size = len(await read_body(http, context.options.max_body_bytes))
    truncation = replace(asked.truncation, max_tokens=request.max_tokens)

    def encode_all() -> tuple[tuple[int, ...], ...]:
        encoded = encode(asked, codec, max_model_len)
        return tuple(tuple(truncation.cut(ids, max_model_len)) for ids in encoded)

    is_own = codec is context.backend.codec
    request = replace(request, prompts=await off_loop(size, encode_all, is_own=is_own))
    return open_generation(context, http, request, draft)


def encode(asked: Asked, codec: TextCodec, max_model_len: int) -> list[Sequence[int]]:
    """Returns the token ids of each prompt, or of the messages."""
    if asked.messages is not None:
        messages = encode_messages(
            codec,
            asked.messages,
            max_model_len=max_model_len,
            chat_template_kwargs=asked.template,
        )
        return [messages]
    return [
        encode_prompt(
            codec,
            prompt,
            max_model_len=max_model_len,
            add_special_tokens=asked.add_special_tokens,
        )
        if isinstance(prompt, str)
        else _encode_parts(codec, prompt, max_model_len)
        for prompt in asked.prompts
    ]


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


def _refuse_unsupported(asked: Asked) -> None:
    """The one place where constraints and tools of other APIs end until they are supported."""
    if asked.tools is not None and asked.tools.tools:
        raise _unsupported(asked.tools.param)
    if asked.constraint is not None:
        raise _unsupported(asked.constraint.param)


def _unsupported(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported by this server: leave it out.", param=param)
