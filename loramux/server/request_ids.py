"""Middleware that adds ids of request and receipt, and notes on tools, to every response."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RECEIPT_HEADER = "x-loramux-receipt"
TOOLS_HEADER = "x-loramux-tools"
"""Why the schemas of tools are enforced in part only."""
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


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
                if (notes := state.get("tool_notes")) is not None:
                    headers[TOOLS_HEADER] = notes
            await send(message)

        await self._app(scope, receive, send_with_id)
