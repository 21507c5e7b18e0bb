"""Every response says which request it answers, by the client's X-Request-Id or one made here,
and which receipt was written for it."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RECEIPT_HEADER = "x-loramux-receipt"
_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE.fullmatch(asked) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if (receipt_id := state.get("receipt_id")) is not None:
                    headers[RECEIPT_HEADER] = receipt_id
            await send(message)

        await self._app(scope, receive, send_with_id)
