"""GET /v1/models: the bases, each with its adapters."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.server.auth.caller import Caller, caller_of
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.openapi import answering
from loramux.server.live.model_list import host_entries, list_models, registry_entry
from loramux.wire.text import ModelEntry, ModelList


def model_routes(context: HostContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", **answering(ModelList, 503))
    async def models(request: Request) -> Response:
        """Lists the names that a request may put into `model`."""
        return await answer_models(context, caller_of(request))

    @router.get(
        "/v1/models/{model_id:path}", **answering(ModelEntry, 400, 404, 503, path_name="model_id")
    )
    async def get_model(request: Request) -> Response:
        model_id, view = request.path_params["model_id"], context.view_of(caller_of(request))
        entry: ModelEntry | None = None
        for host in context.hosts:
            host.require_known()
            entry = entry or host_entries(host, view).get(model_id)
        entry = entry or await registry_entry(context, model_id, view)
        if entry is None:
            raise NotServed(f"The model `{model_id}` does not exist.", param="model")
        return json_response(entry)

    return router


async def answer_models(context: HostContext, caller: Caller) -> Response:
    return json_response(ModelList(data=await list_models(context, caller)))
