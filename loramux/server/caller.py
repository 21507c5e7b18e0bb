"""The caller of a request: read once by middleware, and carried to the engine and the receipt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.errors import InvalidRequest

MAX_TENANT_CHARACTERS = 128


class Permission(StrEnum):
    """What a caller may do; every caller has all permissions until API keys exist."""

    GENERATE = "generate"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and user of a request, and its permissions."""

    tenant: str = ""
    """Requests without a tenant share the empty one."""
    user: str | None = None
    """The `user` field of the body."""
    scopes: frozenset[Permission] = frozenset(Permission)

    @property
    def sticky_key(self) -> str | None:
        """The key that assigns the caller to a version of a split alias."""
        return self.user or self.tenant or None


ANONYMOUS = Caller()


class CallerMiddleware:
    """Puts the caller of every HTTP request into its state."""

    def __init__(self, app: ASGIApp, tenant_header: str | None) -> None:
        self._app = app
        self._tenant_header = tenant_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            try:
                state["caller"] = read_caller(Headers(scope=scope), self._tenant_header)
            # Raised by caller_of: routes without a caller answer all the same.
            except InvalidRequest as error:
                state["caller"] = error
        await self._app(scope, receive, send)


def read_caller(headers: Headers, tenant_header: str | None) -> Caller:
    return ANONYMOUS if tenant_header is None else Caller(_tenant(headers, tenant_header))


def caller_of(http: Request) -> Caller:
    """The caller of a request; raises InvalidRequest for an invalid tenant header."""
    caller: Caller | InvalidRequest = http.state.caller
    if isinstance(caller, InvalidRequest):
        raise caller
    return caller


def known_caller(http: Request) -> Caller:
    """The caller of a request, or the anonymous one if its tenant header is invalid."""
    caller: Caller | InvalidRequest = http.state.caller
    return caller if isinstance(caller, Caller) else ANONYMOUS


def _tenant(headers: Headers, name: str) -> str:
    values = headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(
            f"The header {name} comes {len(values)} times, and one request has one tenant.",
            param=name,
        )
    try:
        tenant = values[0].encode("latin-1").decode() if values else ""
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The header {name} is not valid UTF-8.", param=name) from error
    if len(tenant) > MAX_TENANT_CHARACTERS or not tenant.isprintable():
        raise InvalidRequest(
            f"The header {name} must name a tenant in at most {MAX_TENANT_CHARACTERS} printable "
            "characters.",
            param=name,
        )
    return tenant
