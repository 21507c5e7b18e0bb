"""The caller of a request: made once by middleware, and carried to the engine and the receipt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request

from loramux.errors import InvalidRequest, LoramuxError
from loramux.types.access import ALL_SCOPES, KeyScope
from loramux.types.expected import EXPECT_HEADER, Expected, read_expected

MAX_TENANT_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and user of a request, and what they may do."""

    tenant: str = ""
    """Requests without a tenant share the empty one, which means the home tenant."""
    user: str | None = None
    """The `user` field of the body."""
    scopes: frozenset[KeyScope] = ALL_SCOPES
    key_id: str | None = None
    """The public part of the key; None: the request came without a key."""
    adapters: tuple[str, ...] | None = None
    """Patterns of the adapters that the key may use; None: all that its tenant may use."""
    may_use_base: bool = True
    """Whether the base may answer without an adapter."""
    ends_at: float | None = None
    """When the key or token ends; None: never."""
    is_operator: bool = True
    """Not bound to a tenant: sees the adapters, receipts and metrics of all."""
    expected: Expected | None = None
    """The contents of given names that may answer this request; None: any."""

    @property
    def confined_to(self) -> str | None:
        """The tenant that the caller is bound to; None: an operator."""
        return None if self.is_operator else self.tenant

    @property
    def sticky_key(self) -> str | None:
        """The key that assigns the caller to a version of a split alias."""
        return self.user or self.tenant or None


ANONYMOUS = Caller()
UNKNOWN = Caller(scopes=frozenset(), may_use_base=False, is_operator=False)
"""The caller of an open route whose key or tenant is invalid."""


class Authenticator(Protocol):
    """Finds the caller of a request."""

    async def caller(self, http: HTTPConnection) -> Caller:
        """Raises Unauthenticated; InvalidRequest and Forbidden for a wrong tenant header."""
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


def caller_of(http: Request) -> Caller:
    """The caller of a request; raises the error of its key or tenant header on open routes."""
    caller: Caller | LoramuxError = http.state.caller
    if isinstance(caller, Caller):
        return caller
    raise caller


def known_caller(http: Request) -> Caller:
    """The caller of a request, or one without rights if its key or tenant header is invalid."""
    caller: Caller | LoramuxError = http.state.caller
    return caller if isinstance(caller, Caller) else UNKNOWN


def read_tenant(headers: Headers, name: str) -> str:
    """Returns the tenant that a header names, or "" without it; raises InvalidRequest."""
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
