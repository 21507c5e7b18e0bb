"""Who calls: the interface of authentication, and the header that names a tenant."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from loramux.errors import InvalidRequest
from loramux.types.caller import ANONYMOUS, Caller
from loramux.types.expected import EXPECT_HEADER, read_expected

MAX_TENANT_CHARACTERS = 128


class Authenticator(Protocol):
    """Finds the caller of a request."""

    async def caller(self, http: HTTPConnection) -> Caller:
        """Raise Unauthenticated; InvalidRequest and Forbidden for a wrong tenant header."""
        ...


class TenantHeader:
    """Authenticates nothing: every request is allowed, and a header may name its tenant."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    async def caller(self, http: HTTPConnection) -> Caller:
        return read_caller(http.headers, self._name)


def read_caller(headers: Headers, tenant_header: str | None) -> Caller:
    return ANONYMOUS if tenant_header is None else Caller(read_tenant(headers, tenant_header))


def with_expected(caller: Caller, headers: Headers) -> Caller:
    """Return the caller with the contents that the request expects; raises InvalidRequest."""
    values = headers.getlist(EXPECT_HEADER)
    if not values:
        return caller
    try:
        return replace(caller, expected=read_expected(values))
    except ValueError as error:
        raise InvalidRequest(
            f"The header {EXPECT_HEADER}: {error}.", param=EXPECT_HEADER
        ) from error


def read_tenant(headers: Headers, name: str) -> str:
    """Return the tenant that a header names, or "" without it; raise InvalidRequest."""
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
