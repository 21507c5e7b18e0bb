"""GET /v1/doctor: what an adapter's files hold, and why they are refused."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.server.naming.view import View


def doctor_routes(context: HostContext) -> list[Route]:
    routes = Routes("adapters")

    @routes.get(
        "/v1/doctor/{name:path}",
        answering(dict[str, Any], 400, 404, 502, 503, path_name="name"),
    )
    async def examine_adapter(request: Call) -> Response:
        """Return the report of `loramux doctor --json` on an adapter, which is read for it."""
        name = request.path_params["name"]
        view = context.view_of(request.caller)
        host = await context.host_for(name, view)
        host.require_ready()
        folder = await _folder(host, name, view)
        return json_response(await host.backend.examine_adapter(folder))

    return routes.found


async def _folder(context: HostContext, name: str, view: View) -> str:
    """Return the folder of an adapter, also of one that is refused."""
    given = context.names.find(name) if view.sees_given(name) else None
    if given is not None:
        return given.path
    card = context.backend.adapters.get(name) if view.is_whole else None
    if card is not None:
        return card.path
    if context.registry is None:
        raise NotServed(f"The adapter `{name}` does not exist.", param="name")
    try:
        resolved = await context.registry.resolve(name, sticky_key="", view=view)
    except AdapterNotFound as error:
        raise NotServed(str(error), param="name") from error
    if resolved.recipe is not None:
        raise InvalidRequest(f"{name} is a recipe and has no files. Name its parts.", param="name")
    return str(await context.registry.materialize(resolved.cid))
