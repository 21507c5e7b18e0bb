"""The addresses of clients behind proxies, which only trusted proxies may state."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from loramux.config.access import Network
from loramux.server.http.call import facts_of


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
