"""POST /tokenize, POST /detokenize, GET /tokenizer_info"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.responses import Response

from loramux.backend.text import TextCodec
from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.checked_fields import check_fields
from loramux.server.generate.prompts import (
    MAX_CONTEXTS,
    check_token_ids,
    encode_messages,
    encode_prompt,
    off_loop,
)
from loramux.server.generate.selection import codec_for, select_model, vocab_size_for
from loramux.server.http.body import decode, json_response, read_body
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering, taking
from loramux.server.http.routes import Route, Routes
from loramux.types.caller import Caller
from loramux.wire.text import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

BodyT = TypeVar("BodyT", TokenizeRequest, DetokenizeRequest)


@runtime_checkable
class DescribesTokenizer(Protocol):
    """A codec that also describes its special tokens and its chat template."""

    def tokenizer_info(self) -> dict[str, Any]: ...


def token_routes(context: Context) -> list[Route]:
    routes = Routes("tokens")

    @routes.post("/tokenize", taking(TokenizeRequest, TokenizeAnswer))
    async def tokenize(request: Call) -> Response:
        """Token ids of a prompt, or of messages in the model's chat template."""
        body, num_bytes, named = await _read(context, request, TokenizeRequest)
        codec = named.codec
        answer = await off_loop(
            num_bytes,
            lambda: _tokenize(context, codec, body),
            codec=codec,
            base=context.backend.codec,
        )
        return json_response(answer)

    @routes.post("/detokenize", taking(DetokenizeRequest, DetokenizeAnswer))
    async def detokenize(request: Call) -> Response:
        """Text of token ids, special tokens included."""
        body, num_bytes, named = await _read(context, request, DetokenizeRequest)
        check_num_tokens_to_decode(len(body.tokens), context.backend.card.max_model_len)
        if body.tokens:
            check_token_ids(body.tokens, vocab_size=named.vocab_size, param="tokens")
        codec = named.codec
        text = await off_loop(
            num_bytes, lambda: codec.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeAnswer(prompt=text))

    @routes.get(
        "/tokenizer_info",
        answering(dict[str, Any], 400, 404, 422, 502, 503, parameters=[_model_parameter()]),
    )
    async def tokenizer_info(request: Call) -> Response:
        """Return the tokenizer's settings, for tools that count tokens like this server."""
        context.require_known()
        named = await _named(context, request.query_params.get("model"), request.caller)
        codec, max_model_len = named.codec, context.backend.card.max_model_len
        info = codec.tokenizer_info() if isinstance(codec, DescribesTokenizer) else {}
        known = {"vocab_size": named.vocab_size, "model_max_length": max_model_len}
        return json_response(info | known)

    return routes.found


@dataclass(frozen=True, slots=True)
class _NamedCodec:
    """The tokenizer of the model that a body names."""

    codec: TextCodec
    vocab_size: int


async def _read(
    context: Context, request: Call, kind: type[BodyT]
) -> tuple[BodyT, int, _NamedCodec]:
    raw = await read_body(request, context.options.max_body_bytes)
    body, num_bytes = decode(raw, kind), len(raw)
    check_fields(context, request, kind, raw, generates=False)
    context.require_known()
    return body, num_bytes, await _named(context, body.model, request.caller)


async def _named(context: Context, model: str | None, caller: Caller) -> _NamedCodec:
    selected = await select_model(context, model, caller=caller)
    return _NamedCodec(await codec_for(context, selected), vocab_size_for(context, selected))


def _model_parameter() -> dict[str, Any]:
    return {
        "name": "model",
        "in": "query",
        "required": False,
        "description": "The adapter whose tokenizer is described. Default: the base.",
        "schema": {"type": "string"},
    }


def check_num_tokens_to_decode(num_tokens: int, max_model_len: int) -> None:
    limit = MAX_CONTEXTS * max_model_len
    if num_tokens > limit:
        raise InvalidRequest(
            f"tokens has {num_tokens} entries; at most {limit} are decoded at once.",
            param="tokens",
        )


def _tokenize(context: Context, codec: TextCodec, body: TokenizeRequest) -> TokenizeAnswer:
    token_ids = _encode(context, codec, body)
    strings = list(map(codec.token_to_str, token_ids)) if body.return_token_strs else None
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=context.backend.card.max_model_len,
        tokens=token_ids,
        token_strs=strings,
    )


def _encode(context: Context, codec: TextCodec, body: TokenizeRequest) -> list[int]:
    max_model_len = context.backend.card.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.prompt is None:
        return encode_messages(
            codec,
            body.messages or [],
            max_model_len=max_model_len,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    return list(
        encode_prompt(
            codec,
            body.prompt,
            max_model_len=max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )
    )
