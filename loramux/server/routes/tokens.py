"""POST /tokenize, POST /detokenize, GET /tokenizer_info"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.body import decode, json_response, read_body
from loramux.server.context import Context
from loramux.server.endpoint import find_keyed
from loramux.server.foreign_fields import unsupported_in
from loramux.server.openapi import answering, taking
from loramux.server.prompts import check_token_ids, encode_messages, encode_prompt, off_loop
from loramux.server.selection import select_model
from loramux.server.wire import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

BodyT = TypeVar("BodyT", TokenizeRequest, DetokenizeRequest)


@runtime_checkable
class DescribesTokenizer(Protocol):
    """A codec that also describes its special tokens and its chat template."""

    def tokenizer_info(self) -> dict[str, Any]: ...


def token_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **taking(TokenizeRequest, TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages in the model's chat template."""
        other = await find_keyed(request, context.options.max_body_bytes)
        if other is not None:
            return await other(request)
        body, num_bytes = await _read(context, request, TokenizeRequest)
        token_ids = await off_loop(num_bytes, lambda: _tokenize(context, body))
        codec = context.backend.codec
        strings = [codec.token_to_str(token_id) for token_id in token_ids]
        return json_response(
            TokenizeAnswer(
                count=len(token_ids),
                max_model_len=context.backend.card.max_model_len,
                tokens=token_ids,
                token_strs=strings if body.return_token_strs else None,
            )
        )

    @router.post("/detokenize", **taking(DetokenizeRequest, DetokenizeAnswer))
    async def detokenize(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body, num_bytes = await _read(context, request, DetokenizeRequest)
        if body.tokens:
            vocab_size = context.backend.card.vocab_size
            check_token_ids(body.tokens, vocab_size=vocab_size, param="tokens")
        codec = context.backend.codec
        text = await off_loop(
            num_bytes, lambda: codec.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeAnswer(prompt=text))

    @router.get("/tokenizer_info", **answering(dict[str, Any], 503))
    async def tokenizer_info() -> Response:
        """The tokenizer's settings, for tools that count tokens like this server."""
        context.require_known()
        codec, card = context.backend.codec, context.backend.card
        info = codec.tokenizer_info() if isinstance(codec, DescribesTokenizer) else {}
        known = {"vocab_size": card.vocab_size, "model_max_length": card.max_model_len}
        return json_response(info | known)

    return router


async def _read(context: Context, request: Request, kind: type[BodyT]) -> tuple[BodyT, int]:
    raw = await read_body(request, context.options.max_body_bytes)
    body, num_bytes = decode(raw, kind), len(raw)
    unsupported_in(kind).check(raw)
    context.require_known()
    await select_model(context, body.model)
    return body, num_bytes


def _tokenize(context: Context, body: TokenizeRequest) -> list[int]:
    codec, max_model_len = context.backend.codec, context.backend.card.max_model_len
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
