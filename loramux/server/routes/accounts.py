"""GET /v1/usage and /v1/audit: what was used, and what was changed."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux import __version__
from loramux.base.threads import QUERIES
from loramux.errors import InvalidRequest
from loramux.registry.audit import MAX_LIMIT, Action
from loramux.registry.usage_report import days_between, to_csv, usage_row
from loramux.server.context import HostContext
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.wire.accounts import AuditList, UsageList
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


DEFAULT_LIMIT = 100
FORMATS = ("json", "csv")


def account_routes(context: HostContext) -> list[Route]:
    routes = Routes("accounts")

    @routes.get("/v1/usage", answering(UsageList, 400, 404, 503, parameters=_OF_USAGE))
    async def list_usage(request: Call) -> Response:
        """Add up requests and tokens by day, tenant, key and adapter, as receipts say."""
        registry, query = context.require_registry().registry, request.query_params
        since_day, until_day = days_between(query.get("since"), query.get("until"))
        form = query.get("format", FORMATS[0])
        if form not in FORMATS:
            raise InvalidRequest(f"format must be {' or '.join(FORMATS)}.", param="format")
        tenant = _tenant(context, request)
        found = await QUERIES.run(
            registry.daily_usage, tenant=tenant, since_day=since_day, until_day=until_day
        )
        if form == "csv":
            return Response(await QUERIES.run(to_csv, found), media_type="text/csv")
        return json_response(UsageList(data=[usage_row(one) for one in found]))

    @routes.get("/v1/audit", answering(AuditList, 400, 404, 503, parameters=_OF_AUDIT))
    async def list_audit(request: Call) -> Response:
        """List entries of the audit log, the newest first."""
        registry, query = context.require_registry().registry, request.query_params
        action = query.get("action")
        if action is not None and action not in list(Action):
            raise InvalidRequest(f"action must be one of {', '.join(Action)}.", param="action")
        found = await QUERIES.run(
            registry.audit.entries,
            tenant=query.get("tenant"),
            action=action,
            before=_count(query.get("before"), "before"),
            limit=_count(query.get("limit"), "limit") or DEFAULT_LIMIT,
        )
        return json_response(AuditList(data=[one.to_dict() for one in found]))

    return routes.found


def _tenant(context: HostContext, request: Call) -> str | None:
    """Return the tenant whose usage may be shown: a tenant's key sees its own."""
    caller, asked = request.caller, request.query_params.get("tenant")
    if caller.is_operator:
        return asked
    own = context.tenant_of(caller)
    if asked not in (None, own):
        raise InvalidRequest(f"This key shows the usage of {own} only.", param="tenant")
    return own


def _count(text: str | None, param: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 16 and int(text) > 0):
        raise InvalidRequest(f"{param} must be a whole number from 1 on.", param=param)
    return int(text)


def _parameters(**meanings: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": meaning,
            "schema": {"type": "integer" if name in ("limit", "before") else "string"},
        }
        for name, meaning in meanings.items()
    ]


_OF_USAGE = _parameters(
    since="First day, such as 2026-01-31, in UTC; default 30 days with the last one.",
    until="Last day; default today.",
    tenant="Only this tenant.",
    format="json or csv.",
)
_OF_AUDIT = _parameters(
    tenant="Only changes of what belongs to this tenant.",
    action=f"Only one of {', '.join(Action)}.",
    before="Only entries with a smaller number.",
    limit=f"Maximum number of entries, at most {MAX_LIMIT}; default {DEFAULT_LIMIT}.",
)
