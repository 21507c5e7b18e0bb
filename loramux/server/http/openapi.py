"""The OpenAPI document: routes declare their bodies and replies, msgspec makes the schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loramux.capacity.plan import MemoryPlan
from loramux.http_server.error_body import ErrorBody
from loramux.receipts.receipt import Receipt
from loramux.server.http.body import PiecewiseResponse
from loramux.types.replica_report import ResidencyReport
from loramux.wire.accounts import (
    AuditList,
    KeyEntry,
    KeyList,
    KeyRequest,
    NewKeyEntry,
    RotateRequest,
    UsageList,
)
from loramux.wire.caller import CallerReport, ReceiptKey
from loramux.wire.images import ImageGeneration, ImagesReply, JsonImageEdit
from loramux.wire.pooling import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from loramux.wire.registry import (
    AliasEntry,
    PromoteRequest,
    PushedEntry,
    PushRequest,
    RegistryEntry,
    Removed,
    RollbackRequest,
    SplitRequest,
)
from loramux.wire.text import (
    AdapterEntry,
    AdapterList,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    EngineReport,
    FimRequest,
    HealthReport,
    Liveness,
    ModelEntry,
    ModelList,
    PlanRequest,
    ReceiptList,
    RunAnswer,
    RunChunk,
    RunRequest,
    TokenizeAnswer,
    TokenizeRequest,
    VersionReport,
)

STRUCTS = (
    *(ChatRequest, ChatCompletion, ChatChunk, CompletionRequest, Completion),
    FimRequest,
    *(TokenizeRequest, TokenizeAnswer, DetokenizeRequest, DetokenizeAnswer),
    *(ModelList, ModelEntry, HealthReport, Liveness, VersionReport, ErrorBody),
    ResidencyReport,
    *(AdapterList, AdapterEntry, EngineReport, PlanRequest, MemoryPlan),
    *(Receipt, ReceiptList, ReceiptKey, CallerReport, UsageList, AuditList),
    *(KeyRequest, NewKeyEntry, KeyEntry, KeyList, RotateRequest),
    *(EmbeddingRequest, EmbeddingList, PoolingRequest, PoolingList),
    *(ClassifyRequest, ClassificationList, ScoreRequest, ScoreList, RerankRequest, RerankAnswer),
    *(RunRequest, RunAnswer, RunChunk, PushRequest, PushedEntry, RegistryEntry, Removed),
    *(PromoteRequest, RollbackRequest, SplitRequest, AliasEntry),
    *(ImageGeneration, ImagesReply, JsonImageEdit),
)

EXAMPLES: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
    CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 16},
    FimRequest: {"prompt": "def add(a, b):", "suffix": "    return c", "max_tokens": 16},
    TokenizeRequest: {"prompt": "Hello!"},
    DetokenizeRequest: {"tokens": [72, 73]},
    RunRequest: {"artifact": "alice/refund-flagger@1.4.2", "input": "ticket text..."},
    PushRequest: {"reference": "alice/refund-flagger@1.4.2", "source": "adapters/refund-flagger"},
    PromoteRequest: {"version": "1.4.2", "alias": "prod"},
    RollbackRequest: {"alias": "prod"},
    SplitRequest: {"weights": {"1.4.2": 90, "1.5.0": 10}},
    EmbeddingRequest: {"input": ["Once upon a time", "Hello!"]},
    PoolingRequest: {"input": "Once upon a time"},
    ClassifyRequest: {"input": "The soup was cold."},
    ScoreRequest: {"text_1": "What is the capital of France?", "text_2": ["Paris", "Rome"]},
    RerankRequest: {"query": "What is the capital of France?", "documents": ["Paris", "Rome"]},
    ImageGeneration: {"prompt": "a red fox", "size": "512x512", "adapters": ["ink"]},
    KeyRequest: {"tenant": "acme", "scopes": ["infer"], "expires_in_s": 2592000},
    RotateRequest: {"overlap_s": 3600},
    JsonImageEdit: {"prompt": "a red fox", "image": "data:image/png;base64,iVBORw0KGgo="},
    PlanRequest: {"adapters": 300, "rank": 16, "targets": "q,k,v,o"},
}

WHEN = {
    400: "A field has an invalid type or value; `param` names it.",
    401: "The key is missing or invalid.",
    403: "The server, or its credentials, may not read the source.",
    404: "No such model, adapter or receipt.",
    408: "The request's `timeout` expired before its last token.",
    409: "The name is already in use, or another writer was first, also of the files of a source.",
    413: "The body is larger than the limit.",
    415: "The Content-Type is not JSON.",
    422: "The adapter cannot be used.",
    429: "The queue is full, or a limit is reached; Retry-After says when to retry.",
    500: "Internal error of the server.",
    502: "The source of the adapter failed.",
    503: "The engine is starting, restarting or stopping; Retry-After says when to retry.",
    507: "The store is full.",
}
OF_A_BODY = (400, 404, 413, 415, 500, 503)
OF_GENERATION = (*OF_A_BODY, 408, 422, 429)
OF_A_CHANGE = (*OF_A_BODY, 403, 408, 409, 422, 429, 502, 507)


def generating(request: type[Any], answer: type[Any]) -> dict[str, Any]:
    """Keyword arguments of a route that generates, complete or as server-sent events."""
    documented = _route(answer, OF_GENERATION, body=request)
    documented["responses"][200]["content"]["text/event-stream"] = {
        "schema": {
            "description": "Chunks as `data:` lines, then `[DONE]`; or an error, and the end."
        }
    }
    return documented


def uploading(request: type[Any], answer: type[Any], *files: str) -> dict[str, Any]:
    """Keyword arguments of a route that generates from files, in a form or as base64 in JSON."""
    documented = generating(request, answer)
    content = documented["openapi_extra"]["requestBody"]["content"]
    binary = {name: {"type": "string", "format": "binary"} for name in files}
    content["multipart/form-data"] = {
        "schema": {"type": "object", "properties": {"prompt": {"type": "string"}, **binary}}
    }
    return documented


def pooling(request: type[Any], answer: type[Any]) -> dict[str, Any]:
    """Keyword arguments of a route that returns vectors or scores."""
    return _route(answer, OF_GENERATION, body=request)


def taking(request: type[Any], answer: type[Any]) -> dict[str, Any]:
    return _route(answer, OF_A_BODY, body=request)


def changing(request: type[Any], answer: type[Any], path_name: str | None = None) -> dict[str, Any]:
    """Keyword arguments of a route that changes the registry."""
    documented = _route(answer, OF_A_CHANGE, body=request)
    if path_name is not None:
        documented["openapi_extra"]["parameters"] = [_in_path(path_name)]
    return documented


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def answering(
    answer: Any,
    *statuses: int,
    path_name: str | None = None,
    parameters: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    documented = _route(answer, (*statuses, 500))
    shown = list(parameters)
    if path_name is not None:
        shown.append(_in_path(path_name))
    if shown:
        documented["openapi_extra"]["parameters"] = shown
    return documented


def health_answers(*parameters: dict[str, Any]) -> dict[str, Any]:
    documented = _route(HealthReport, (500,))
    documented["responses"][503] = {
        "description": "Requests are not accepted now.",
        "content": _json_content(HealthReport),
    }
    documented["openapi_extra"]["parameters"] = list(parameters)
    return documented


def deep_parameter() -> dict[str, Any]:
    return {
        "name": "deep",
        "in": "query",
        "required": False,
        "description": "1: also generate a token and load an adapter.",
        "schema": {"type": "string"},
    }


def residency_parameters() -> tuple[dict[str, Any], ...]:
    described = {
        "since": ("integer", "The generation that the reader has; -1: everything."),
        "instance": ("string", "The instance that the generation belongs to."),
        "wait_s": ("number", "Seconds to wait for a move, up to 30."),
    }
    return tuple(
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": text,
            "schema": {"type": kind},
        }
        for name, (kind, text) in described.items()
    )


def text_answer() -> dict[str, Any]:
    documented = _route(None, (500,))
    documented["responses"][200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return documented


def install_openapi(app: FastAPI, extend: Callable[[dict[str, Any]], None]) -> None:
    """Set the document of the application; `extend` adds the routes of other servers' APIs."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _document(app)
            extend(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    encoded: dict[str, bytes] = {}

    async def get_document(request: Request) -> Response:
        prefix = request.scope.get("root_path", "")
        if prefix not in encoded:
            servers = {"servers": [{"url": prefix}]} if prefix else {}
            encoded[prefix] = msgspec.json.encode({**app.openapi(), **servers})
        return PiecewiseResponse(encoded[prefix], media_type="application/json")

    # FastAPI's own route encodes the document, of 150 KB, for each request.
    routes = app.router.routes
    index = next(i for i, one in enumerate(routes) if getattr(one, "path", "") == app.openapi_url)
    routes[index] = Route(str(app.openapi_url), get_document, include_in_schema=False)


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=app.servers,
    )
    _, components = msgspec.json.schema_components(
        STRUCTS, ref_template="#/components/schemas/{name}"
    )
    document["components"] = {"schemas": components}
    return document


def _route(
    answer: Any, statuses: tuple[int, ...], *, body: type[Any] | None = None
) -> dict[str, Any]:
    responses: dict[int, dict[str, Any]] = {200: {"description": "The reply."}}
    if answer is not None:
        responses[200]["content"] = _json_content(answer)
    for status in statuses:
        responses[status] = {"description": WHEN[status], "content": _json_content(ErrorBody)}
    extra: dict[str, Any] = {}
    if body is not None:
        content = _json_content(body)
        content["application/json"]["example"] = EXAMPLES[body]
        extra["requestBody"] = {"required": True, "content": content}
    # No response_model: handlers return bytes that msgspec has encoded.
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def _json_content(kind: Any) -> dict[str, Any]:
    if isinstance(kind, tuple):
        return {"application/json": {"schema": {"anyOf": [_schema(one) for one in kind]}}}
    return {"application/json": {"schema": _schema(kind)}}


def _schema(kind: Any) -> dict[str, Any]:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return {"$ref": f"#/components/schemas/{kind.__name__}"} if is_struct else {"type": "object"}
