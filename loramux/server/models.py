"""GET /v1/models: the base first, then its adapters."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.errors import AdapterNotFound
from loramux.registry.records import Resolved
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.naming import given_adapters
from loramux.server.openapi import answering
from loramux.server.wire import ModelEntry, ModelList

# Of a registry: a list is for people, and requests may name any of the others too.
MAX_LISTED = 1000


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", **answering(ModelList, 503))
    async def list_models() -> Response:
        """Every name that a request may put into `model`."""
        context.require_known()
        entries = _entries(context)
        for entry in await _registry_entries(context):
            entries.setdefault(entry.id, entry)
        return json_response(ModelList(data=list(entries.values())))

    @router.get(
        "/v1/models/{model_id:path}", **answering(ModelEntry, 400, 404, 503, path_name="model_id")
    )
    async def get_model(request: Request) -> Response:
        context.require_known()
        model_id = request.path_params["model_id"]
        entry = _entries(context).get(model_id) or await _registry_entry(context, model_id)
        if entry is None:
            raise NotServed(f"The model `{model_id}` does not exist.", param="model")
        return json_response(entry)

    return router


async def _registry_entries(context: Context) -> list[ModelEntry]:
    if context.registry is None:
        return []
    found = await asyncio.to_thread(context.registry.list_current, limit=MAX_LISTED)
    return [_of_registry(context, f"{one.tenant}/{one.name}", one) for one in found]


async def _registry_entry(context: Context, model_id: str) -> ModelEntry | None:
    if context.registry is None:
        return None
    try:
        resolved = await context.registry.resolve(model_id, sticky_key="")
    except AdapterNotFound:
        return None
    return _of_registry(context, model_id, resolved)


def _of_registry(context: Context, model_id: str, resolved: Resolved) -> ModelEntry:
    """Its root is its folder once it was asked for, before that its content id."""
    card = context.backend.adapters.get(resolved.cid)
    return ModelEntry(
        id=model_id,
        created=context.created_s,
        root=resolved.cid if card is None else card.path,
        parent=context.base_names[0],
        max_model_len=None,
    )


def _entries(context: Context) -> dict[str, ModelEntry]:
    """By name; a name of the base is never an adapter's, as in requests."""
    card, base_names = context.backend.card, context.base_names
    adapters = {
        adapter.name: ModelEntry(
            id=adapter.name,
            created=adapter.created_s or context.created_s,
            root=adapter.path,
            parent=base_names[0],
            max_model_len=None,
        )
        for adapter in given_adapters(context).values()
    }
    bases = {
        name: ModelEntry(
            id=name,
            created=context.created_s,
            root=card.path,
            parent=None,
            max_model_len=card.max_model_len,
        )
        for name in base_names
    }
    return bases | {name: entry for name, entry in adapters.items() if name not in bases}
