"""Middleware that adds ids of request and receipt, limits, warnings and notes on tools."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def add_warning(http: Request, text: str) -> None:
    """Add a warning to the headers of the answer, also of a stream."""
    warnings: list[str] = getattr(http.state, "warnings", [])
    if text not in warnings:
        http.state.warnings = [*warnings, text]


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
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if (receipt_id := state.get("receipt_id")) is not None:
                    headers[RECEIPT_HEADER] = receipt_id
                if (found := state.get("found_in_tiers")) is not None:
                    headers[CID_HEADER] = ",".join(cid for cid, _ in found)
                    if found:
                        headers[TIER_HEADER] = min(tier for _, tier in found).name.lower()
                if (admission := state.get("admission")) is not None:
                    headers.update(admission.headers())
                if (notes := state.get("tool_notes")) is not None:
                    headers[TOOLS_HEADER] = notes
                if (warnings := state.get("warnings")) is not None:
                    headers[WARNING_HEADER] = header_text("; ".join(warnings))
            await send(message)

        await self._app(scope, receive, send_with_id)
