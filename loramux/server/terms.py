"""On which terms a request runs: whose it is, what it shares, how long it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.datastructures import Headers

from loramux.errors import InvalidRequest
from loramux.server.wire import GenerationRequest

MAX_TENANT_CHARACTERS = 128
# Salts are kept as long as the prefixes that they keep apart.
MAX_SALT_CHARACTERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None


def read_terms(headers: Headers, request: GenerationRequest, *, tenant_header: str | None) -> Terms:
    return Terms(
        tenant="" if tenant_header is None else _tenant(headers, tenant_header),
        cache_salt=_cache_salt(request.cache_salt),
        timeout_s=_timeout_s(request.timeout),
    )


def known_tenant(headers: Headers, name: str | None) -> str:
    """Empty also for one that would be refused."""
    try:
        return "" if name is None else _tenant(headers, name)
    except InvalidRequest:
        return ""


def _tenant(headers: Headers, name: str) -> str:
    """Empty without the header: all who are not named are one tenant."""
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


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}.",
            param="cache_salt",
        )
    return salt


def _timeout_s(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"timeout must be a number of seconds over 0, got {timeout_s:g}.", param="timeout"
        )
    return timeout_s
