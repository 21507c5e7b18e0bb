"""GET /v1/models: the base first, then its adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.openapi import answering
from loramux.wire import ModelEntry, ModelList


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", **answering(ModelList, 503))
    async def list_models() -> Response:
        """Every name that a request may put into `model`."""
        context.require_known()
        return json_response(ModelList(data=list(_entries(context).values())))

    @router.get(
        "/v1/models/{model_id:path}", **answering(ModelEntry, 404, 503, path_name="model_id")
    )
    async def get_model(request: Request) -> Response:
        context.require_known()
        model_id = request.path_params["model_id"]
        entry = _entries(context).get(model_id)
        if entry is None:
            raise NotServed(f"The model `{model_id}` does not exist.", param="model")
        return json_response(entry)

    return router


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
        for adapter in context.backend.adapters.values()
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
