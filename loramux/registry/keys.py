"""The text of a key, `lmx_ID_SECRET`, and the salted hash that is stored of it."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from loramux.errors import InvalidRequest
from loramux.registry.names import check_name
from loramux.types.access import KeyScope

PREFIX = "lmx_"
ID_DIGITS = 12
MAX_KEY_CHARACTERS = 256
MAX_NOTE_CHARACTERS = 128
MAX_PATTERNS = 100
MAX_KEYS_OF_TENANT = 1000
"""Valid keys; as many ended ones are kept."""
MAX_LIFETIME_S = 100 * 365 * 86_400.0
ACTIVE, EXPIRED, REVOKED = "active", "expired", "revoked"
PATTERN = re.compile(r"[A-Za-z0-9._/*?\[\]!:-]{1,256}", re.ASCII)
_KEY = re.compile(
    rf"{PREFIX}(?P<id>[0-9a-f]{{{ID_DIGITS}}})_(?P<secret>[A-Za-z0-9_-]{{43}})", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRights:
    """What a key opens."""

    tenant: str | None
    """None: the key is not bound to a tenant."""
    scopes: frozenset[KeyScope] = frozenset({KeyScope.INFER})
    adapters: tuple[str, ...] | None = None
    """Patterns of the adapters that it may use; None: all that its tenant may use."""
    may_use_base: bool = True

    def check(self) -> None:
        """Raise InvalidRequest for a tenant or a pattern that cannot match."""
        if self.tenant is not None:
            check_name(self.tenant, "tenant")
        if not self.scopes:
            raise InvalidRequest("A key needs at least one scope.", param="scopes")
        patterns = self.adapters or ()
        if len(patterns) > MAX_PATTERNS:
            raise InvalidRequest(f"A key has at most {MAX_PATTERNS} patterns.", param="adapters")
        for pattern in patterns:
            if not PATTERN.fullmatch(pattern):
                raise InvalidRequest(
                    f"{pattern[:100]!r} is not a pattern of adapters. Write one like acme/sql-*.",
                    param="adapters",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as the registry stores it: without its secret."""

    key_id: str
    rights: KeyRights
    note: str
    salt: str = field(repr=False)
    digest: str = field(repr=False)
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def opens(self, secret: str, *, now: float) -> bool:
        """Whether the secret is this key's, and the key is valid at this time."""
        return self.has_secret(secret) and self.is_valid(now)

    def has_secret(self, secret: str) -> bool:
        """Whether the secret is this key's, which may have ended; the time says nothing of it."""
        return hmac.compare_digest(hash_secret(self.salt, secret), self.digest)

    def is_valid(self, now: float) -> bool:
        is_expired = self.expires_at is not None and self.expires_at <= now
        return not is_expired and (self.revoked_at is None or self.revoked_at > now)

    def state(self, now: float) -> str:
        if self.is_valid(now):
            return ACTIVE
        is_revoked = self.revoked_at is not None and self.revoked_at <= now
        return REVOKED if is_revoked else EXPIRED

    @property
    def ends_at(self) -> float | None:
        """When it stops being valid; None: never."""
        ends = [end for end in (self.expires_at, self.revoked_at) if end is not None]
        return min(ends, default=None)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made; its text is not stored."""

    record: KeyRecord
    text: str = field(repr=False)


def make_key(
    rights: KeyRights, *, note: str = "", now: float, expires_at: float | None = None
) -> NewKey:
    rights.check()
    if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
        raise InvalidRequest(
            f"A note has at most {MAX_NOTE_CHARACTERS} printable characters.", param="note"
        )
    key_id, secret = secrets.token_hex(ID_DIGITS // 2), secrets.token_urlsafe(32)
    salt = secrets.token_hex(16)
    record = KeyRecord(
        key_id=key_id,
        rights=rights,
        note=note,
        salt=salt,
        digest=hash_secret(salt, secret),
        created_at=now,
        expires_at=expires_at,
    )
    return NewKey(record, f"{PREFIX}{key_id}_{secret}")


def parse_key(text: str) -> tuple[str, str] | None:
    """Return id and secret of a key, or None for any other text."""
    match = _KEY.fullmatch(text) if len(text) <= MAX_KEY_CHARACTERS else None
    return None if match is None else (match["id"], match["secret"])


def hash_secret(salt: str, secret: str) -> str:
    """Return the stored hash; a fast one is enough for 256 random bits."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def matches(patterns: Iterable[str] | None, full_name: str, bare_name: str) -> bool:
    """Whether an adapter is among the patterns: by its full name, or by its name alone."""
    if patterns is None:
        return True
    return any(
        fnmatchcase(full_name, pattern) or ("/" not in pattern and fnmatchcase(bare_name, pattern))
        for pattern in patterns
    )
