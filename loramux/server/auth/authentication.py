"""Finds the caller of a request by its key or token, and by the header of a trusted gateway."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from loramux.errors import InvalidRequest
from loramux.registry.access import NO_ACCESS, AccessSnapshot
from loramux.registry.keys import MAX_KEY_CHARACTERS, KeyRecord, hash_secret, parse_key
from loramux.server.errors import Forbidden, Unauthenticated
from loramux.server.http.middleware import is_from_trusted_proxy
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


BEARER = "bearer"
MAX_TOKEN_CHARACTERS = 16_384
_NO_SALT = "00" * 16
_MISSING = "Send an API key: Authorization: Bearer KEY, or x-api-key: KEY."
_INVALID = "The API key is not valid."
_ENDED = "The API key has expired or was revoked."


class TokenVerifier(Protocol):
    """Checks tokens of an identity provider."""

    async def caller(self, token: str) -> Caller:
        """Raise Unauthenticated."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a server accepts from its callers."""

    api_keys: Sequence[str] = field(default=(), repr=False)
    """Keys of --api-key, which open every route."""
    access: Callable[[], AccessSnapshot] = lambda: NO_ACCESS
    """Returns the keys of the registry."""
    tokens: TokenVerifier | None = None
    tenant_header: str | None = None
    has_proxies: bool = False
    """Whether --trusted-proxies are configured, so that only they may send the header."""


class CredentialAuthenticator:
    """Checks keys and tokens; without any, every caller is an operator."""

    def __init__(self, credentials: Credentials, *, clock: Callable[[], float] = time.time) -> None:
        self._given = credentials
        self._clock = clock
        self._digests = [_digest(key) for key in credentials.api_keys]

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key; keys of the registry count even if they are revoked."""
        given = self._given
        return bool(self._digests or given.tokens is not None or given.access().keys)

    async def caller(self, http: HTTPConnection) -> Caller:
        needs_key = self.needs_key
        caller = await self._authenticated(http) if needs_key else ANONYMOUS
        return self._with_tenant(http, caller, is_open=not needs_key)

    async def _authenticated(self, http: HTTPConnection) -> Caller:
        text = read_credential(http)
        tokens = self._given.tokens
        parsed = parse_key(text)
        if parsed is not None:
            return self._recorded(*parsed)
        found = self._simple(text) if len(text) <= MAX_KEY_CHARACTERS else None
        if found is not None:
            return found
        if tokens is not None and text.count(".") == 2:
            return await tokens.caller(text)
        raise Unauthenticated(_INVALID)

    def _simple(self, text: str) -> Caller | None:
        digest = _digest(text)
        # All are compared, so that the time does not depend on which one it is.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return Caller(key_id=f"api-key-{matches.index(True) + 1}") if True in matches else None

    def _recorded(self, key_id: str, secret: str) -> Caller:
        record = self._given.access().keys.get(key_id)
        if record is None:
            # Hashed all the same: unknown ids take as long as known ones.
            hash_secret(_NO_SALT, secret)
            raise Unauthenticated(_INVALID)
        if not record.has_secret(secret):
            raise Unauthenticated(_INVALID)
        if not record.is_valid(self._clock()):
            raise Unauthenticated(_ENDED)
        return caller_of_key(record)

    def _with_tenant(self, http: HTTPConnection, caller: Caller, *, is_open: bool) -> Caller:
        """Apply the tenant header: it confines an operator, and no one else may differ."""
        given = self._given
        tenant = (
            "" if given.tenant_header is None else read_tenant(http.headers, given.tenant_header)
        )
        if not tenant:
            return caller
        if is_open and not given.has_proxies:
            return replace(caller, tenant=tenant)
        if not is_from_trusted_proxy(http):
            raise Forbidden(
                f"The header {given.tenant_header} is accepted from --trusted-proxies only."
            )
        if caller.is_operator:
            return replace(caller, tenant=tenant, is_operator=False)
        if caller.tenant != tenant:
            raise Forbidden(f"The key is not one of the tenant in {given.tenant_header}.")
        return caller


def caller_of_key(record: KeyRecord) -> Caller:
    rights = record.rights
    return Caller(
        tenant=rights.tenant or "",
        scopes=rights.scopes,
        key_id=record.key_id,
        adapters=rights.adapters,
        may_use_base=rights.may_use_base,
        ends_at=record.ends_at,
        is_operator=rights.tenant is None,
    )


def read_credential(http: HTTPConnection) -> str:
    """Return the bearer token or the x-api-key of a request; raise Unauthenticated."""
    given = {value.strip() for value in http.headers.getlist("x-api-key")}
    for value in http.headers.getlist("authorization"):
        scheme, _, text = value.strip().partition(" ")
        if scheme.lower() != BEARER:
            raise Unauthenticated(_MISSING)
        given.add(text.strip())
    if len(given) > 1:
        raise Unauthenticated("The request has several API keys. Send one.")
    text = given.pop() if given else ""
    if not text:
        raise Unauthenticated(_MISSING)
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise Unauthenticated(_INVALID)
    return text


def _digest(key: str) -> bytes:
    # Headers arrive as Latin-1; keys are ASCII.
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
