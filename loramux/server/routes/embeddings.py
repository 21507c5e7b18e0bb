"""POST /v1/embeddings in OpenAI's format, and vLLM's POST /pooling."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from loramux.server.context import Context
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.embeddings import (
    Inputs,
    Pooled,
    embeddings,
    encoded,
    scores,
    split_input,
)
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import pooling
from loramux.server.http.routes import Route, Routes
from loramux.types.pooling import Pooling
from loramux.wire.pooling import (
    EmbeddingData,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    PoolingData,
    PoolingList,
    PoolingRequest,
)


def embedding_routes(context: Context) -> list[Route]:
    routes = Routes("Embeddings")

    @routes.post("/v1/embeddings", pooling(EmbeddingRequest, EmbeddingList))
    async def create_embeddings(request: Call) -> Response:
        """Return the embedding of each input, by the base or by adapters."""
        return await answer_embeddings(context, request)

    @routes.post("/pooling", pooling(PoolingRequest, PoolingList))
    async def create_pooling(request: Call) -> Response:
        """Return the embedding of each input, or the scores of a sequence classifier."""
        body = await read_fields(context, request, PoolingRequest, generates=False)
        inputs = Inputs(texts=split_input(body.input), dimensions=body.dimensions)
        context.require_known()
        is_classifier = context.backend.card.pooling.pooling is Pooling.HEAD
        found = await (scores if is_classifier else embeddings)(context, request, body, inputs)
        data = [
            PoolingData(index=index, data=encoded(vector, body.encoding_format))
            for index, vector in enumerate(found.vectors)
        ]
        return json_response(PoolingList(data=data, **reply_fields(found)))

    return routes.found


async def answer_embeddings(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, EmbeddingRequest, generates=False)
    inputs = Inputs(texts=split_input(body.input), dimensions=body.dimensions)
    found = await embeddings(context, request, body, inputs)
    data = [
        EmbeddingData(index=index, embedding=encoded(vector, body.encoding_format))
        for index, vector in enumerate(found.vectors)
    ]
    return json_response(EmbeddingList(data=data, **reply_fields(found)))


def reply_fields(found: Pooled) -> dict[str, Any]:
    """Return the fields that all replies of these routes have."""
    generation, num_tokens = found.generation, found.usage.prompt_tokens
    return {
        "id": generation.request.id,
        "created": generation.created_s,
        "model": generation.request.selected.model,
        "usage": EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        "serving": generation.draft.receipt or UNSET,
    }
