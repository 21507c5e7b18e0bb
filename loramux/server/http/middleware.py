"""Middleware: ids and notes in headers of answers; clients behind proxies."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from loramux.config.access import Network
from loramux.server.http.call import CallFacts, facts_of


class ForwardedMiddleware:
    """Takes the client's address from X-Forwarded-For, if the peer is a trusted proxy."""

    def __init__(self, app: ASGIApp, proxies: Sequence[Network]) -> None:
        self._app = app
        self._proxies = tuple(proxies)
        # uvicorn's types of ASGI are its own.
        self._forwarded: ASGIApp = ProxyHeadersMiddleware(  # type: ignore[assignment]
            app,  # type: ignore[arg-type]
            trusted_hosts=[str(network) for network in proxies],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts_of(scope).from_trusted_proxy = self._trusts(scope)
        await self._forwarded(scope, receive, send)

    def _trusts(self, scope: Scope) -> bool:
        client = scope.get("client")
        try:
            address = ipaddress.ip_address(client[0]) if client else None
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address is not None and any(address in network for network in self._proxies)


def is_from_trusted_proxy(http: HTTPConnection) -> bool:
    """Whether the peer of the connection itself is a trusted proxy."""
    return facts_of(http.scope).from_trusted_proxy


RECEIPT_HEADER = "x-loramux-receipt"
TOOLS_HEADER = "x-loramux-tools"
"""Why the schemas of tools are enforced in part only."""
WARNING_HEADER = "x-loramux-warning"
"""What of the request was not followed, or may not be meant."""
CID_HEADER = "x-loramux-cid"
"""CIDs of the adapters that answer, by which routers find the replicas that have them."""
TIER_HEADER = "x-loramux-tier"
"""The slowest tier of these adapters when the request arrived."""
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def header_text(text: str) -> str:
    """Return a text as a header may hold it: printable ASCII alone."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


class RequestIdMiddleware:
    """Takes the client's X-Request-Id if it is valid, and makes one otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        facts = facts_of(scope)
        facts.request_id = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                _add_headers(facts, headers)
            await send(message)

        await self._app(scope, receive, send_with_id)


def _add_headers(facts: CallFacts, headers: MutableHeaders) -> None:
    if facts.receipt_id is not None:
        headers[RECEIPT_HEADER] = facts.receipt_id
    if facts.tiers is not None:
        headers[CID_HEADER] = ",".join(cid for cid, _ in facts.tiers)
        if facts.tiers:
            headers[TIER_HEADER] = min(tier for _, tier in facts.tiers).name.lower()
    if facts.limits is not None:
        headers.update(facts.limits())
    if facts.tool_notes is not None:
        headers[TOOLS_HEADER] = facts.tool_notes
    if facts.warnings:
        headers[WARNING_HEADER] = header_text("; ".join(facts.warnings))
