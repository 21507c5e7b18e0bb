"""GET /v1/models: the base, then the adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.errors import AdapterNotFound
from loramux.registry.records import Resolved
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.openapi import answering
from loramux.server.wire import ModelEntry, ModelList
from loramux.threads import QUERIES

# Limit of the registry's adapters in the list; requests may name the others too.
MAX_LISTED = 1000


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", **answering(ModelList, 503))
    async def models() -> Response:
        """Lists the names that a request may put into `model`."""
        return await answer_models(context)

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


async def answer_models(context: Context) -> Response:
    return json_response(ModelList(data=await list_models(context)))


async def list_models(context: Context) -> list[ModelEntry]:
    """Returns the base and all adapters, those of the registry last."""
    context.require_known()
    entries = _entries(context)
    for entry in await _registry_entries(context):
        entries.setdefault(entry.id, entry)
    return list(entries.values())


async def _registry_entries(context: Context) -> list[ModelEntry]:
    if context.registry is None:
        return []
    found = await QUERIES.run(context.registry.list_current, limit=MAX_LISTED)
    return [_model_entry(context, f"{one.tenant}/{one.name}", one) for one in found]


async def _registry_entry(context: Context, model_id: str) -> ModelEntry | None:
    if context.registry is None:
        return None
    try:
        resolved = await context.registry.resolve(model_id, sticky_key="")
    except AdapterNotFound:
        return None
    return _model_entry(context, model_id, resolved)


def _model_entry(context: Context, model_id: str, resolved: Resolved) -> ModelEntry:
    """Describes an adapter of the registry; its root is its CID until it was first requested."""
    card = context.backend.adapters.get(resolved.cid)
    return ModelEntry(
        id=model_id,
        created=context.created_s,
        root=resolved.cid if card is None else card.path,
        parent=context.base_names[0],
        max_model_len=None,
    )


def _entries(context: Context) -> dict[str, ModelEntry]:
    """Returns the base and the given adapters by name, except for those that were refused.

    A name of the base always means the base.
    """
    card, base_names = context.backend.card, context.base_names
    adapters = {
        given.name: ModelEntry(
            id=given.name,
            created=given.created_s,
            root=given.path,
            parent=base_names[0],
            max_model_len=None,
        )
        for given in context.names.given()
        if given.state != "failed"
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
