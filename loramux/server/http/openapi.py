"""The OpenAPI document: routes declare their bodies and replies, msgspec makes the schemas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, Response
from starlette.routing import compile_path

from loramux import __version__
from loramux.capacity.plan import MemoryPlan
from loramux.http_server.error_body import ErrorBody
from loramux.receipts.receipt import Receipt
from loramux.server.http.body import PiecewiseResponse
from loramux.server.http.call import Call
from loramux.server.http.routes import Handler, Operation, Route
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

TITLE = "loramux"
DESCRIPTION = "Many LoRA adapters on one base model, mixed in one batch."
METHODS = ("GET", "HEAD")
# Both load a viewer from a content delivery network, and the document beside them.
SWAGGER_PAGE = """<!doctype html>
<title>loramux: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
<div id="api"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#api", deepLinking: true})</script>
"""
REDOC_PAGE = """<!doctype html>
<title>loramux: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<redoc spec-url="openapi.json"></redoc>
<script src="https://cdn.jsdelivr.net/npm/redoc@2/bundles/redoc.standalone.js"></script>
"""

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


def generating(request: type[Any], answer: type[Any]) -> Operation:
    """Describe a route that generates, complete or as server-sent events."""
    documented = _route(answer, OF_GENERATION, body=request)
    documented["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {
            "description": "Chunks as `data:` lines, then `[DONE]`; or an error, and the end."
        }
    }
    return documented


def uploading(request: type[Any], answer: type[Any], *files: str) -> Operation:
    """Describe a route that generates from files, in a form or as base64 in JSON."""
    documented = generating(request, answer)
    content = documented["requestBody"]["content"]
    binary = {name: {"type": "string", "format": "binary"} for name in files}
    content["multipart/form-data"] = {
        "schema": {"type": "object", "properties": {"prompt": {"type": "string"}, **binary}}
    }
    return documented


def pooling(request: type[Any], answer: type[Any]) -> Operation:
    """Describe a route that returns vectors or scores."""
    return _route(answer, OF_GENERATION, body=request)


def taking(request: type[Any], answer: type[Any]) -> Operation:
    return _route(answer, OF_A_BODY, body=request)


def changing(request: type[Any], answer: type[Any], path_name: str | None = None) -> Operation:
    """Describe a route that changes the registry."""
    documented = _route(answer, OF_A_CHANGE, body=request)
    if path_name is not None:
        documented["parameters"] = [_in_path(path_name)]
    return documented


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def answering(
    answer: Any,
    *statuses: int,
    path_name: str | None = None,
    parameters: Sequence[dict[str, Any]] = (),
) -> Operation:
    documented = _route(answer, (*statuses, 500))
    shown = list(parameters)
    if path_name is not None:
        shown.append(_in_path(path_name))
    if shown:
        documented["parameters"] = shown
    return documented


def health_answers(*parameters: dict[str, Any]) -> Operation:
    documented = _route(HealthReport, (500,))
    documented["responses"]["503"] = {
        "description": "Requests are not accepted now.",
        "content": _json_content(HealthReport),
    }
    if parameters:
        documented["parameters"] = list(parameters)
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


def text_answer() -> Operation:
    documented = _route(None, (500,))
    documented["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return documented


class OpenApi:
    """The document of an application, and the pages that show it."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        servers: Sequence[dict[str, str]],
        extend: Callable[[dict[str, Any]], None],
    ) -> None:
        """`extend` adds the routes of other servers' APIs."""
        self._routes = routes
        self._servers = list(servers)
        self._extend = extend
        self._encoded: dict[str, bytes] = {}

    @cached_property
    def document(self) -> dict[str, Any]:
        info = {"title": TITLE, "description": DESCRIPTION, "version": __version__}
        document: dict[str, Any] = {"openapi": "3.1.0", "info": info}
        if self._servers:
            document["servers"] = self._servers
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            if route.operation is not None:
                path = compile_path(route.path)[1]
                operations = paths.setdefault(path, {})
                operations |= {method.lower(): _described(route) for method in route.methods}
        _, components = msgspec.json.schema_components(
            STRUCTS, ref_template="#/components/schemas/{name}"
        )
        document |= {"paths": paths, "components": {"schemas": components}}
        self._extend(document)
        return document

    def routes(self) -> list[Route]:
        pages = {"/docs": SWAGGER_PAGE, "/redoc": REDOC_PAGE}
        found = [
            Route(path=path, handler=_page(html), methods=METHODS) for path, html in pages.items()
        ]
        return [Route(path="/openapi.json", handler=self._get, methods=METHODS), *found]

    async def _get(self, call: Call) -> Response:
        prefix = call.scope.get("root_path", "")
        if prefix not in self._encoded:
            servers = {"servers": [{"url": prefix}]} if prefix else {}
            self._encoded[prefix] = msgspec.json.encode({**self.document, **servers})
        return PiecewiseResponse(self._encoded[prefix], media_type="application/json")


def _page(html: str) -> Handler:
    async def show(_: Call) -> Response:
        return HTMLResponse(html)

    return show


def _described(route: Route) -> Operation:
    assert route.operation is not None
    described = {"tags": [route.tag], "summary": route.name.replace("_", " ").title()}
    text = inspect.getdoc(route.handler)
    if text:
        described["description"] = text
    return {**described, "operationId": route.name, **route.operation}


def _route(answer: Any, statuses: tuple[int, ...], *, body: type[Any] | None = None) -> Operation:
    responses: dict[str, dict[str, Any]] = {"200": {"description": "The reply."}}
    if answer is not None:
        responses["200"]["content"] = _json_content(answer)
    for status in statuses:
        error = {"description": WHEN[status], "content": _json_content(ErrorBody)}
        responses[str(status)] = error
    operation: Operation = {"responses": responses}
    if body is not None:
        content = _json_content(body)
        content["application/json"]["example"] = EXAMPLES[body]
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _json_content(kind: Any) -> dict[str, Any]:
    if isinstance(kind, tuple):
        return {"application/json": {"schema": {"anyOf": [_schema(one) for one in kind]}}}
    return {"application/json": {"schema": _schema(kind)}}


def _schema(kind: Any) -> dict[str, Any]:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return {"$ref": f"#/components/schemas/{kind.__name__}"} if is_struct else {"type": "object"}
