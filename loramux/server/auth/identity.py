"""Callers by tokens (JWT) of an identity provider, which publishes the keys that sign them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import jwt

from loramux.base.threads import FOLDER_READS
from loramux.errors import InvalidRequest, SourceFailed
from loramux.registry.names import check_name
from loramux.server.errors import Unauthenticated
from loramux.types.access import KeyScope
from loramux.types.caller import Caller

# By the type of the key: with asymmetric ones alone, a public key can never stand for a secret.
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
LEEWAY_S = 30.0
FRESH_S = 300.0
"""Keys are read again after this time."""
RETRY_S = 10.0
"""The shortest time between two reads, also for tokens with unknown keys."""
MAX_STALE_S = 3600.0
"""How long keys are used that cannot be read again."""
FETCH_TIMEOUT_S = 5.0
MAX_DOCUMENT_BYTES = 2**20
MAX_SUBJECT_CHARACTERS = 64
MAX_TIME = 2**53
DISCOVERY = "/.well-known/openid-configuration"
SCOPE_PREFIX = "loramux:"
_INVALID = "The token is not valid"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Which tokens are accepted, and which claims say what their holder may do."""

    issuer: str
    audience: str
    keys: str | None = None
    """A file or a URL with the provider's keys (JWKS); None: what the issuer's discovery names."""
    tenant_claim: str = "tenant"
    scopes_claim: str = "scope"


class IdentityTokens:
    """Checks tokens; every one names a tenant. It belongs to one event loop."""

    def __init__(self, rules: TokenRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._keys = ProviderKeys(rules, clock=clock)

    async def caller(self, token: str) -> Caller:
        """Raise Unauthenticated, and SourceFailed if the provider's keys cannot be read."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise Unauthenticated(f"{_INVALID}: it cannot be read.") from error
        key = await self._keys.find(header.get("kid"))
        if key is None:
            raise Unauthenticated(f"{_INVALID}: the provider has no such key.")
        return self._read(token, header.get("alg"), key)

    def _read(self, token: str, algorithm: Any, key: Mapping[str, Any]) -> Caller:
        allowed = ALGORITHMS[key["kty"]]
        if algorithm not in allowed or key.get("alg", algorithm) != algorithm:
            raise Unauthenticated(f"{_INVALID}: its algorithm is not one of its key.")
        try:
            claims = jwt.decode(
                token,
                jwt.PyJWK(dict(key), algorithm=algorithm),
                algorithms=[algorithm],
                issuer=self._rules.issuer,
                audience=self._rules.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise Unauthenticated("The token has expired.") from error
        except (jwt.InvalidIssuerError, jwt.InvalidAudienceError) as error:
            raise Unauthenticated(f"{_INVALID}: it is not for this server.") from error
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthenticated(f"{_INVALID}.") from error
        return self._caller_of(claims)

    def _caller_of(self, claims: Mapping[str, Any]) -> Caller:
        tenant = claim_of(claims, self._rules.tenant_claim)
        try:
            check_name(tenant if isinstance(tenant, str) else "", "tenant")
        except InvalidRequest as error:
            raise Unauthenticated(
                f"{_INVALID}: its claim {self._rules.tenant_claim} names no tenant."
            ) from error
        subject = str(claims.get("sub", ""))[:MAX_SUBJECT_CHARACTERS]
        return Caller(
            tenant=str(tenant),
            scopes=scopes_of(claim_of(claims, self._rules.scopes_claim)),
            key_id=f"jwt:{subject}" if subject.isprintable() else "jwt:",
            ends_at=float(min(int(claims["exp"]), MAX_TIME)),
            is_operator=False,
        )


def claim_of(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim, which may be inside of others: `org.tenant`."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def scopes_of(claim: Any) -> frozenset[KeyScope]:
    """Return the scopes in a claim, a text with spaces or a list; others are the provider's."""
    words = claim.split() if isinstance(claim, str) else claim
    if not isinstance(words, list):
        return frozenset()
    given = {word.removeprefix(SCOPE_PREFIX) for word in words if isinstance(word, str)}
    return frozenset(scope for scope in KeyScope if scope.value in given)


class ProviderKeys:
    """The public keys of a provider, by key id, read again when they are old."""

    def __init__(self, rules: TokenRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._keys: dict[str | None, Mapping[str, Any]] = {}
        self._read_s: float | None = None
        self._tried_s: float | None = None
        self._lock = asyncio.Lock()

    async def find(self, key_id: Any) -> Mapping[str, Any] | None:
        """Return the key with an id; without an id, the provider's only key."""
        if self._is_older_than(FRESH_S) or self._get(key_id) is None:
            await self._refresh()
        return self._get(key_id)

    def _get(self, key_id: Any) -> Mapping[str, Any] | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id) if isinstance(key_id, str) else None

    def _is_older_than(self, seconds: float) -> bool:
        return self._read_s is None or self._clock() - self._read_s >= seconds

    async def _refresh(self) -> None:
        async with self._lock:
            now = self._clock()
            if self._tried_s is not None and now - self._tried_s < RETRY_S:
                # Another request has tried just now.
                if self._is_older_than(MAX_STALE_S):
                    raise SourceFailed("The keys of the identity provider cannot be read.")
                return
            self._tried_s = now
            try:
                self._keys = usable_keys(await self._document())
                self._read_s = now
            except (SourceFailed, OSError, ValueError) as error:
                _log.warning("The keys of the identity provider cannot be read: %s", error)
                if self._is_older_than(MAX_STALE_S):
                    raise SourceFailed(
                        "The keys of the identity provider cannot be read."
                    ) from error

    async def _document(self) -> Any:
        source = self._rules.keys
        if source is not None and "://" not in source:
            return json.loads(await FOLDER_READS.run(_read_file, source))
        if source is None:
            found = await fetch_json(self._rules.issuer.rstrip("/") + DISCOVERY)
            is_own = isinstance(found, dict) and found.get("issuer") == self._rules.issuer
            if not (is_own and isinstance(found.get("jwks_uri"), str)):
                raise SourceFailed("The discovery document is not the issuer's.")
            source = str(found["jwks_uri"])
            check_url(source)
        return await fetch_json(source)


def usable_keys(document: Any) -> dict[str | None, Mapping[str, Any]]:
    """Return the keys of a JWKS that verify signatures, by id; raise ValueError."""
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise ValueError("it has no list of keys")
    return {
        key.get("kid"): key
        for key in keys
        if isinstance(key, dict) and key.get("kty") in ALGORITHMS and key.get("use", "sig") == "sig"
    }


def check_url(url: str) -> None:
    """Raise InvalidRequest for a URL whose answer could be replaced on the way."""
    parsed = httpx2.URL(url)
    is_local = parsed.host in ("127.0.0.1", "localhost", "::1")
    if parsed.scheme != "https" and not (parsed.scheme == "http" and is_local):
        raise InvalidRequest(f"{url[:200]} is not https://, so that its answer could be replaced.")


async def fetch_json(url: str) -> Any:
    """Fetch a document of limited size, without redirects; raise SourceFailed."""
    body = bytearray()
    try:
        async with (
            asyncio.timeout(FETCH_TIMEOUT_S),
            httpx2.AsyncClient(timeout=FETCH_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise SourceFailed(f"{url} answers {response.status_code}.")
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise SourceFailed(f"{url} is larger than {MAX_DOCUMENT_BYTES} bytes.")
        return json.loads(body)
    except (httpx2.HTTPError, TimeoutError, ValueError) as error:
        raise SourceFailed(f"{url}: {type(error).__name__}.") from error


def _read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_DOCUMENT_BYTES)
