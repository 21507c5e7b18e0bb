"""Keeps web pages of other sites from using a server that the browser can reach.

Hosts: a name that an attacker points at a private address (DNS rebinding) is not one of the
allowed hosts. Sites: browsers say in Origin or Sec-Fetch-Site that a page of another site sends a
request; without --cors-origins such a request may change nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from loramux.http_server.error_body import encode_error
from loramux.types.routes import UNSAFE_GETS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY = "*"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def default_hosts(address: str) -> tuple[str, ...]:
    """Return the hosts that may be named on an address: on a loopback address only local ones."""
    if not is_loopback(address):
        return (ANY,)
    return tuple(dict.fromkeys(("localhost", "*.localhost", "127.0.0.1", "::1", address)))


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class BrowserGuard:
    """Refuses requests for unknown hosts, and changes that pages of other sites ask for."""

    def __init__(
        self, app: ASGIApp, allowed_hosts: Sequence[str], cors_origins: Iterable[str]
    ) -> None:
        self._app = app
        self._hosts = frozenset(map(host_of, allowed_hosts))
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._origins = frozenset(origin.lower() for origin in cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        fault = self._fault_of(scope)
        if fault is None:
            await self._app(scope, receive, send_guarded)
        else:
            await _forbid(fault, send_guarded)

    def _fault_of(self, scope: Scope) -> str | None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        host = headers.get("host")
        if host is not None and not self._knows(host_of(host)):
            return (
                f"This server is not called {host[:200]!r}. Allow the name: --allowed-hosts "
                f"{host_of(host)[:200]}."
            )
        is_safe = scope["method"] in SAFE_METHODS and not scope["path"].endswith(UNSAFE_GETS)
        if not is_safe and self._is_cross_site(headers, host):
            origin = headers.get("origin", "another site")[:200]
            return f"A web page of {origin} sent this request. Allow it: --cors-origins {origin}."
        return None

    def _knows(self, host: str) -> bool:
        return ANY in self._hosts or host in self._hosts or host.endswith(self._suffixes)

    def _is_cross_site(self, headers: Mapping[str, str], host: str | None) -> bool:
        origin = headers.get("origin")
        if ANY in self._origins or (origin is not None and origin.lower() in self._origins):
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site not in ("same-origin", "none")
        # A proxy with TLS in front of the server changes the scheme, and keeps the host.
        return origin is not None and origin.partition("://")[2].lower() != (host or "").lower()


async def _forbid(message: str, send: Send) -> None:
    body = encode_error(403, message)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def host_of(header: str) -> str:
    """Return the host of a Host header without port and brackets, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    if header.count(":") > 1:
        # An IPv6 address without brackets, as in a setting.
        return header.lower()
    return header.partition(":")[0].lower().rstrip(".")
