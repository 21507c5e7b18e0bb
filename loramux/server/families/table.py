"""The families of other servers' APIs, and which of them answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response

from loramux.backend.host import Health
from loramux.errors import InvalidRequest, suggest
from loramux.server.context import Context, HostContext
from loramux.server.errors import ErrorShape
from loramux.server.families import (
    anthropic,
    llamacpp,
    lorax_embed,
    lorax_wire,
    ollama,
    ollama_embed,
    responses,
    sagemaker,
    sglang,
)
from loramux.server.families.anthropic import anthropic_error, anthropic_routes
from loramux.server.families.llamacpp import llamacpp_routes
from loramux.server.families.lorax import lorax_routes
from loramux.server.families.ollama import ollama_error, ollama_routes
from loramux.server.families.responses import responses_routes
from loramux.server.families.sagemaker import sagemaker_routes
from loramux.server.families.sglang import sglang_routes
from loramux.server.http.call import Call
from loramux.server.http.routes import OWN, Route
from loramux.server.live.page import is_browser, to_page
from loramux.wire import pooling as wire_pooling
from loramux.wire import text as wire

Bodies = tuple[Any, ...]


class PlacedScale(msgspec.Struct, kw_only=True):
    """llama.cpp's entry of a selection."""

    id: int | str
    scale: float = 0.0


_PREFIX = "#/components/schemas/"
LORAX = (lorax_wire.GenerateRequest,)

BODIES: Mapping[tuple[str, str], Bodies] = {
    ("anthropic", "/v1/messages"): (anthropic.MessageBody,),
    ("anthropic", "/v1/messages/count_tokens"): (anthropic.CountBody,),
    ("llamacpp", "/completion"): (llamacpp.CompletionBody,),
    ("llamacpp", "/completions"): (llamacpp.CompletionBody,),
    ("llamacpp", "/infill"): (llamacpp.InfillBody,),
    ("llamacpp", "/chat/completions"): (wire.ChatRequest,),
    ("llamacpp", "/lora-adapters"): (list[PlacedScale],),
    ("llamacpp", "/tokenize"): (llamacpp.TokenizeContent,),
    ("lorax", "/"): LORAX,
    ("lorax", "/generate"): LORAX,
    ("lorax", "/generate_stream"): LORAX,
    ("lorax", "/tokenize"): (lorax_wire.TokenizeInputs,),
    ("lorax", "/embed"): (lorax_embed.EmbedRequest,),
    ("ollama", "/api/chat"): (ollama.ChatBody,),
    ("ollama", "/api/generate"): (ollama.GenerateBody,),
    ("ollama", "/api/show"): (ollama.ShowBody,),
    ("ollama", "/api/embed"): (ollama_embed.EmbedBody,),
    ("ollama", "/api/embeddings"): (ollama_embed.EmbeddingBody,),
    ("responses", "/v1/responses"): (responses.ResponseBody,),
    ("sagemaker", "/invocations"): (
        *(wire.ChatRequest, wire.CompletionRequest, responses.ResponseBody, *LORAX),
        *(wire_pooling.RerankRequest, wire_pooling.ScoreRequest),
    ),
    ("sagemaker", "/adapters"): (sagemaker.AdapterBody,),
    ("sglang", "/generate"): (sglang.GenerateRequest,),
    ("sglang", "/load_lora_adapter"): (sglang.AdapterChange,),
    ("sglang", "/unload_lora_adapter"): (sglang.AdapterChange,),
    ("sglang", "/flush_cache"): (),
    ("sglang", "/reset_prefix_cache"): (),
}
"""(family, path) -> what a POST takes."""


def add_families(document: dict[str, Any], endpoints: Iterable[Route]) -> None:
    """Add the routes and the bodies of other servers' APIs to the document."""
    found = list(endpoints)
    kinds = [kind for one in found for kind in BODIES.get((one.family, one.path), ())]
    references = _add_schemas(document, list(dict.fromkeys(kinds)))
    for endpoint in found:
        path = endpoint.path.replace("{name:path}", "{name}")
        bodies = [references[kind] for kind in BODIES.get((endpoint.family, endpoint.path), ())]
        for method in endpoint.methods:
            operations = document["paths"].setdefault(path, {})
            new = _operation(endpoint, method)
            operation = operations.setdefault(method.lower(), new)
            # On a path of the own API, the reply may have the shape of another.
            operation["responses"] |= new["responses"]
            if method == "POST" and bodies:
                _add_bodies(operation, bodies)


def _add_schemas(document: dict[str, Any], kinds: list[Any]) -> dict[Any, dict[str, Any]]:
    """Add the schemas of some types; their names have a prefix, as families share names."""
    inner = {kind: kind.inner for kind in kinds if hasattr(kind, "inner")}
    types = list(dict.fromkeys([*kinds, *(one for _, one in inner.values())]))
    found, components = msgspec.json.schema_components(
        types, ref_template=_PREFIX + "families.{name}"
    )
    references = dict(zip(types, found, strict=True))
    for kind, (name, held) in inner.items():
        own = components[references[kind]["$ref"].removeprefix(_PREFIX + "families.")]
        own["properties"][name] = {"anyOf": [references[held], {"type": "null"}]}
    schemas = document["components"]["schemas"]
    schemas.update({f"families.{name}": schema for name, schema in components.items()})
    return references


def _operation(endpoint: Route, method: str) -> dict[str, Any]:
    path = endpoint.path.strip("/").replace("/", "_").replace("{name:path}", "name")
    operation: dict[str, Any] = {
        "tags": [endpoint.family],
        "operationId": f"{endpoint.family}_{method.lower()}_{path or 'root'}",
        "responses": {
            "200": {"description": "The reply, in the shape of this API."},
            "default": {"description": "An error, in the shape of this API."},
        },
    }
    if "{name:path}" in endpoint.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _add_bodies(operation: dict[str, Any], bodies: list[dict[str, Any]]) -> None:
    """Add bodies to those that the route has already, of its own API or of other families."""
    body = operation.setdefault("requestBody", {"required": True, "content": {}})
    content = body["content"].setdefault("application/json", {"schema": {"anyOf": []}})
    schema = content["schema"]
    known = schema.get("anyOf", [schema])
    merged = [*known, *(one for one in bodies if one not in known)]
    content["schema"] = {"anyOf": merged} if len(merged) > 1 else merged[0]


FAMILIES: dict[str, Callable[[Context], list[Route]]] = {
    "anthropic": anthropic_routes,
    "llamacpp": llamacpp_routes,
    "lorax": lorax_routes,
    "ollama": ollama_routes,
    "responses": responses_routes,
    "sagemaker": sagemaker_routes,
    "sglang": sglang_routes,
}
PREFIXES: tuple[tuple[str, str, ErrorShape], ...] = (
    ("ollama", "/api/", ollama_error),
    ("anthropic", "/v1/messages/", anthropic_error),
)
"""Families, the beginnings of paths that are theirs alone, and the shapes of their errors."""


def check_families(names: Iterable[str]) -> None:
    for name in names:
        if name not in FAMILIES:
            raise InvalidRequest(
                f"{name!r} is not an API that --compat knows. {suggest(name, [*FAMILIES])}",
                param="compat",
            )


def _served(context: Context) -> Collection[str]:
    names = FAMILIES if context.options.compat is None else context.options.compat
    check_families(names)
    return names


def prefixes_of(context: Context) -> dict[str, ErrorShape]:
    """Return the shape of errors of paths that belong to an API, by their beginning."""
    return {start: shape for name, start, shape in PREFIXES if name in _served(context)}


def paths_of_others(context: Context) -> dict[str, str]:
    """Return the paths of the APIs that do not answer, with what opens them."""
    others = [name for name in FAMILIES if name not in _served(context)]
    return {
        route.path: f"It is of an API that needs --compat {name} at the start of the server."
        for name in others
        for route in FAMILIES[name](context)
    }


def routes_of_others(context: Context) -> list[Route]:
    names = _served(context)
    found = [route for name in names for route in FAMILIES[name](context)]
    return [root_route(context, is_ollama="ollama" in names), *found]


def root_route(context: HostContext, *, is_ollama: bool = False) -> Route:
    """GET /, by which several clients see whether a server is there; Ollama's read its text.

    Browsers are sent to the web page.
    """

    async def root(request: Call) -> Response:
        if context.options.ui and is_browser(request):
            return to_page(request)
        is_ready = context.backend.health is Health.READY
        text = "Ollama is running" if is_ollama else "loramux is running"
        return PlainTextResponse(text, 200 if is_ready else 503, headers={"vary": "accept"})

    return Route(family=OWN, path="/", handler=root, methods=("GET", "HEAD"))
