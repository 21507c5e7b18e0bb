"""JSON bodies of the routes for usage, audit and keys."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from loramux.types.access import KeyScope
from loramux.types.limits import NO_LIMITS, Limits


class UsageList(Struct, kw_only=True):
    data: list[dict[str, str | int]]
    """One object per day, tenant, key and adapter, with the numbers of requests and tokens."""
    object: Literal["list"] = "list"


class AuditList(Struct, kw_only=True):
    data: list[dict[str, Any]]
    """Entries with actor, action, target, result and digest."""
    object: Literal["list"] = "list"


class KeyRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A new key, as by `loramux keys create`."""

    tenant: str | None = None
    """Without one: the tenant of the caller's key, or none if that has none."""
    scopes: list[KeyScope] = field(default_factory=lambda: [KeyScope.INFER])
    adapters: list[str] | None = None
    """Patterns of the adapters that the key may use; null: all that its tenant may use."""
    may_use_base: bool = True
    expires_in_s: float | None = None
    """Null: never."""
    limits: dict[str, int | None] = field(default_factory=dict)
    """Such as {"requests_per_minute": 60}."""
    note: str = ""


class RotateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    overlap_s: float = 0.0
    """How long the old key stays valid."""


class KeyEntry(Struct, kw_only=True):
    """A key without its secret."""

    id: str
    tenant: str | None
    """Null: the key of an operator."""
    scopes: list[KeyScope]
    adapters: list[str] | None
    may_use_base: bool
    note: str
    state: str
    """active, expired or revoked."""
    created_at: float
    ends_at: float | None
    limits: Limits = NO_LIMITS
    object: Literal["key"] = "key"


class NewKeyEntry(KeyEntry, kw_only=True):
    key: str
    """The text to send as a bearer token; it is shown only here."""


class KeyList(Struct, kw_only=True):
    data: list[KeyEntry]
    object: Literal["list"] = "list"
