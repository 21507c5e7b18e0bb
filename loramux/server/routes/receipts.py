"""GET /v1/receipts: list and read the receipts of served requests."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from loramux.adapters.identity import CID_PREFIX
from loramux.base.signing import key_id_of, public_pem
from loramux.base.threads import QUERIES
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.receipts.receipt import Receipt, ServingStatus
from loramux.registry.names import parse_name_reference
from loramux.registry.records import ReceiptFilter
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.server.naming.view import View, unknown_adapter
from loramux.wire.caller import ReceiptKey
from loramux.wire.text import ReceiptList

DEFAULT_LIMIT = 100


def receipt_routes(context: HostContext) -> list[Route]:
    routes = Routes("receipts")

    @routes.get("/v1/receipts", answering(ReceiptList, 400, 404, 503, parameters=_parameters()))
    async def list_receipts(request: Call) -> Response:
        """List receipts, newest first, or slowest first with `slow_ms`."""
        registry = context.require_registry().registry
        view = context.view_of(request.caller)
        given = await _given_cids(context, request.query_params.get("adapter"), view)
        wanted = await QUERIES.run(_filter, context, request, given, view)
        found = await QUERIES.run(registry.find_receipts, wanted)
        return json_response(ReceiptList(data=[dict(receipt.body) for receipt in found]))

    @routes.get("/v1/receipts/key", answering(ReceiptKey, 404))
    async def get_receipt_key(_: Call) -> Response:
        """Return the public key that verifies the receipts of this server."""
        key = context.receipts.key
        if key is None:
            raise NotServed(
                "This server signs no receipts: start it with --receipt-key.", param=None
            )
        public = key.public_key()
        return json_response(ReceiptKey(key_id=key_id_of(public), public_key=public_pem(public)))

    @routes.get("/v1/receipts/{receipt_id}", answering(Receipt, 404, 503, path_name="receipt_id"))
    async def get_receipt(request: Call) -> Response:
        receipt_id = request.path_params["receipt_id"]
        registry = context.require_registry().registry
        view = context.view_of(request.caller)
        tenant = view.tenant if view.is_confined else None
        writer = context.receipts.writer
        pending = None if writer is None else writer.find(receipt_id)
        if pending is not None and tenant in (None, pending.tenant):
            return json_response(pending)
        stored = await QUERIES.run(registry.receipt, receipt_id, tenant=tenant)
        if stored is None:
            raise NotServed(f"There is no receipt `{receipt_id}`.", param="receipt_id")
        return json_response(dict(stored.body))

    return routes.found


async def _given_cids(
    context: HostContext, adapter: str | None, view: View
) -> tuple[str, ...] | None:
    """CIDs of a given name: none if its adapter is refused; None: it is not a given name."""
    if adapter is None or not view.sees_given(adapter) or context.names.find(adapter) is None:
        return None
    try:
        given = await context.names.identify(adapter)
    except AdapterRefused:
        return ()
    return None if given is None or given.cid is None else (given.cid,)


def _filter(
    context: HostContext, request: Call, given: tuple[str, ...] | None, view: View
) -> ReceiptFilter:
    query = request.query_params
    tenant = query.get("tenant")
    cids = _cids(context, query.get("adapter"), view) if given is None else given
    if view.is_confined and tenant not in (None, view.tenant):
        # There are no receipts of another tenant in the view.
        cids = ()
    slow_ms = _number(query.get("slow_ms"), "slow_ms")
    limit = _number(query.get("limit"), "limit")
    return ReceiptFilter(
        tenant=view.tenant if view.is_confined else tenant,
        cids=cids,
        min_latency_ms=slow_ms,
        slowest_first=slow_ms is not None,
        statuses=_statuses(query.get("status")),
        limit=DEFAULT_LIMIT if limit is None else int(limit),
    )


def _cids(context: HostContext, adapter: str | None, view: View) -> tuple[str, ...] | None:
    """CIDs of an adapter: a bare name means all its versions, a name with @ the current one."""
    if adapter is None:
        return None
    if adapter.startswith(CID_PREFIX):
        return (adapter,)
    registry = context.require_registry().registry
    home = view.tenant if view.is_confined else context.receipts.home_tenant
    reference = parse_name_reference(adapter, home_tenant=home)
    is_named = "@" in adapter
    if not (view.allows(reference) if is_named else view.sees(reference.adapter)):
        raise unknown_adapter(reference.adapter)
    if is_named:
        return tuple(choice.resolved.cid for choice in registry.route(reference).choices)
    return tuple(sorted(registry.cids_of(str(reference.adapter))))


def _statuses(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    wanted = tuple(text.split(","))
    if not {*wanted} <= {*ServingStatus}:
        valid = ", ".join(ServingStatus)
        raise InvalidRequest(f"status must be among {valid}, got {text!r}.", param="status")
    return wanted


def _number(text: str | None, param: str) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e12:
        raise InvalidRequest(f"{param} must be a number from 0 on, got {text!r}.", param=param)
    return number


def _parameters() -> list[dict[str, Any]]:
    meanings = {
        "adapter": "tenant/name for all its versions, tenant/name@version, or a content id.",
        "tenant": "Tenant of the request.",
        "slow_ms": "Only receipts with at least this latency, slowest first.",
        "status": f"Among {', '.join(ServingStatus)}; several with commas.",
        "limit": f"Maximum number of receipts; default {DEFAULT_LIMIT}.",
    }
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": meaning,
            "schema": {"type": "number" if name in ("slow_ms", "limit") else "string"},
        }
        for name, meaning in meanings.items()
    ]
