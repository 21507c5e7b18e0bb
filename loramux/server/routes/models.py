"""GET /v1/models: the bases, each with its adapters."""

from __future__ import annotations

from starlette.responses import Response

from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.server.live.lists import host_entries, list_models, registered_model
from loramux.types.caller import Caller
from loramux.wire.text import ModelEntry, ModelList


def model_routes(context: HostContext) -> list[Route]:
    routes = Routes("OpenAI")

    @routes.get("/v1/models", answering(ModelList, 503))
    async def models(request: Call) -> Response:
        """List the names that a request may put into `model`."""
        return await answer_models(context, request.caller)

    @routes.get(
        "/v1/models/{model_id:path}", answering(ModelEntry, 400, 404, 503, path_name="model_id")
    )
    async def get_model(request: Call) -> Response:
        model_id, view = request.path_params["model_id"], context.view_of(request.caller)
        entry: ModelEntry | None = None
        for host in context.hosts:
            host.require_known()
            entry = entry or host_entries(host, view).get(model_id)
        entry = entry or await registered_model(context, model_id, view)
        if entry is None:
            raise NotServed(f"The model `{model_id}` does not exist.", param="model")
        return json_response(entry)

    return routes.found


async def answer_models(context: HostContext, caller: Caller) -> Response:
    return json_response(ModelList(data=await list_models(context, caller)))
