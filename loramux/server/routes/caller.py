"""GET /v1/caller: what the key of a request may do."""

from __future__ import annotations

from starlette.responses import Response

from loramux import __version__
from loramux.server.context import HostContext
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.wire.caller import CallerReport


def caller_routes(context: HostContext) -> list[Route]:
    routes = Routes("status")

    @routes.get("/v1/caller", answering(CallerReport, 401))
    async def caller(request: Call) -> Response:
        """Return the tenant and the scopes of the key, and what the server offers."""
        found = request.caller
        name, _ = context.base_identity()
        report = CallerReport(
            tenant=context.tenant_of(found),
            key_id=found.key_id,
            scopes=sorted(found.scopes),
            adapters=None if found.adapters is None else list(found.adapters),
            may_use_base=found.may_use_base,
            is_operator=found.is_operator,
            base=name,
            version=__version__,
            has_registry=context.registry is not None,
            allows_folders=found.is_operator and bool(context.options.allowed_roots),
            signs_receipts=context.receipts.key is not None,
        )
        response = json_response(report)
        response.headers["cache-control"] = "no-store"
        return response

    return routes.found
