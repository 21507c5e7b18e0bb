"""The prefix of paths under which a proxy publishes the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class PrefixMiddleware:
    """Takes the prefix off the paths of requests, for proxies that do not."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and f"{path}/".startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path") or path.encode()
            scope = {
                **scope,
                "path": path[len(self._prefix) :] or "/",
                "raw_path": raw[len(self._prefix.encode()) :] or b"/",
            }
        await self._app(scope, receive, send)
