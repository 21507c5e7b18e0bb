"""Ollama's /api/embed, and the older /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.embeddings import Inputs, Pooled, default_body, embeddings, encoded
from loramux.server.generate.generation import RouteKind
from loramux.server.generate.requests import note_no_model
from loramux.server.generate.selection import ModelReference, hint_for, select
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.naming.names import Selected

LATEST = ":latest"


async def select_tagged(context: Context, request: Call, name: str) -> Selected:
    """Find a model whose name may have the tag `latest`."""
    context.require_ready()
    for candidate in dict.fromkeys((name, name.removesuffix(LATEST))):
        try:
            reference = ModelReference(candidate)
            found = await select(context, reference, caller=request.caller)
        except (NotServed, AdapterNotFound):
            continue
        if reference.names_nothing and not found.adapters:
            note_no_model(context, request, "model")
        return found
    view = context.view_of(request.caller)
    hint = await hint_for(context, view, name.removesuffix(LATEST))
    raise NotServed(f"model '{name}' not found{'.' if hint else ''}{hint}", param="model")


KIND = RouteKind(id_prefix="embd", prompt_param="input", default_max_tokens=0, pools=True)
NO_LIMIT = -1


class EmbedBody(Struct, kw_only=True):
    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    """They are about the machine."""
    keep_alive: Any = None


class EmbeddingBody(Struct, kw_only=True):
    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None


async def embed(context: Context, request: Call) -> Response:
    """Return the embedding of each text."""
    started = time.monotonic_ns()
    body = await read_fields(context, request, EmbedBody, generates=False)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise InvalidRequest("input is an empty list: give at least one text.", param="input")
    found = await _embeddings(
        context, request, body.model, texts, body.dimensions, truncates=body.truncate
    )
    return json_response(
        {
            "model": body.model,
            "embeddings": [encoded(vector, None) for vector in found.vectors],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": found.usage.prompt_tokens,
        }
    )


async def embed_one(context: Context, request: Call) -> Response:
    """Return the embedding of one text."""
    body = await read_fields(context, request, EmbeddingBody, generates=False)
    found = await _embeddings(context, request, body.model, [body.prompt])
    return json_response({"embedding": encoded(found.vectors[0], None)})


async def _embeddings(  # noqa: PLR0913
    context: Context,
    request: Call,
    model: str,
    texts: list[str],
    dimensions: int | None = None,
    *,
    truncates: bool = True,
) -> Pooled:
    inputs = Inputs(
        texts=texts,
        dimensions=dimensions,
        kind=KIND,
        selected=await select_tagged(context, request, model),
        adapter=model,
    )
    # Ollama keeps the beginning of a long text.
    limits = {"truncate_prompt_tokens": NO_LIMIT, "truncation_side": "right"} if truncates else {}
    return await embeddings(context, request, default_body(**limits), inputs)
