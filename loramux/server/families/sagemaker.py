"""SageMaker's routes: invocations of any other route by its fields, and its adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.errors import NotServed, error_response
from loramux.server.families.lorax import answer_inputs
from loramux.server.families.lorax_wire import lorax_error
from loramux.server.families.openai import answer_chat, answer_completion
from loramux.server.families.responses import answer_response
from loramux.server.http.body import decode, read_body
from loramux.server.http.call import Call
from loramux.server.http.routes import Route
from loramux.server.live.warming import pin
from loramux.server.routes.pooling import (
    answer_classify,
    answer_embeddings,
    answer_rerank,
    answer_score,
)
from loramux.server.routes.runtime_lora import (
    LoadRequest,
    VllmError,
    load_named,
    unload_named,
)
from loramux.types.pooling import Pooling

FAMILY = "sagemaker"
IDENTIFIER = "x-amzn-sagemaker-adapter-identifier"
ALIAS = "x-amzn-sagemaker-adapter-alias"
# Fields of a body that the header replaces.
NAMING_FIELDS = {"model", "adapters", "adapter_weights", "lora", "lora_path", "lora_request"}
EMBEDDING_FIELDS = {"encoding_format", "dimensions"}
NAMING_PARAMETERS = {"adapter_id", "merged_adapters"}
Answer = Callable[[Context, Call], Awaitable[Response]]


async def _input(context: Context, request: Call) -> Response:
    """Answers `input`, which embeddings, classifications and responses share."""
    raw = await read_body(request, context.options.max_body_bytes)
    fields = decode(raw, dict[str, Any])
    context.require_known()
    model = context.backend.card.pooling
    if model.pooling is Pooling.HEAD:
        return await answer_classify(context, request)
    if EMBEDDING_FIELDS & fields.keys() or not model.generates:
        return await answer_embeddings(context, request)
    return await answer_response(context, request)


async def _inputs(context: Context, request: Call) -> Response:
    return await answer_inputs(context, request)


# The field that tells a body's API -> its route.
ANSWERS: dict[str, Answer] = {
    "messages": answer_chat,
    "prompt": answer_completion,
    "input": _input,
    "inputs": _inputs,
    "query": answer_rerank,
    "text_1": answer_score,
}


class AdapterBody(Struct, kw_only=True):
    name: str = ""
    src: str = ""
    preload: bool = True
    pin: bool = False
    load_inplace: bool = False


def sagemaker_routes(context: Context) -> list[Route]:
    def invoke(key: str) -> Route:
        async def handler(request: Call) -> Response:
            await _name_adapter(context, request, key)
            return await ANSWERS[key](context, request)

        return Route(
            family=FAMILY,
            path="/invocations",
            handler=handler,
            keys=frozenset({key}),
            shape=lorax_error if key == "inputs" else error_response,
        )

    async def register(request: Call) -> Response:
        return await _register(context, request)

    async def unregister(request: Call) -> Response:
        return await _unregister(context, request)

    found = [invoke(key) for key in ANSWERS]
    if context.options.allow_runtime_lora_updating:
        found += [
            Route(family=FAMILY, path="/adapters", handler=register),
            Route(
                family=FAMILY, path="/adapters/{name:path}", handler=unregister, methods=("DELETE",)
            ),
        ]
    return found


async def _name_adapter(context: Context, request: Call, key: str) -> None:
    """Put the adapter of the header into the body, where it replaces the body's own."""
    name = request.headers.get(IDENTIFIER)
    if not name:
        return
    raw = await read_body(request, context.options.max_body_bytes)
    fields = decode(raw, dict[str, Any])
    if key == "inputs":
        parameters = fields.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequest("parameters must be an object.", param="parameters")
        kept = {key: parameters[key] for key in parameters.keys() - NAMING_PARAMETERS}
        fields["parameters"] = kept | {"adapter_id": name}
    else:
        kept = {key: fields[key] for key in fields.keys() - NAMING_FIELDS}
        fields = kept | {"model": name}
    request.facts.body = msgspec.json.encode(fields)


async def _register(context: Context, request: Call) -> Response:
    raw = await read_body(request, context.options.max_body_bytes)
    body = decode(raw or b"{}", AdapterBody)
    name, source = (
        (body.name or request.query_params.get("name", "")),
        (body.src or request.query_params.get("src", "")),
    )
    if not name or not source:
        raise InvalidRequest("Give name and src.", param="src" if name else "name")
    if not body.preload:
        raise InvalidRequest("preload must be true: adapters are read at once.", param="preload")
    asked = LoadRequest(lora_name=name, lora_path=source, load_inplace=body.load_inplace)
    try:
        async with context.name_locks.held(name):
            await load_named(context, request, asked)
    except VllmError as error:
        return error.response()
    given = context.names.find(name)
    if body.pin and given is not None and given.cid is not None:
        await pin(context, request, name, [given.cid], pinned=True)
    return PlainTextResponse(f"Adapter {request.headers.get(ALIAS) or name} registered")


async def _unregister(context: Context, request: Call) -> Response:
    name = request.path_params["name"]
    if context.names.find(name) is None:
        raise NotServed(f"The adapter `{name}` does not exist.", param="name")
    async with context.name_locks.held(name):
        await unload_named(context, request, name)
    return PlainTextResponse(f"Adapter {request.headers.get(ALIAS) or name} unregistered")
