"""JSON bodies about the caller and about the key that signs receipts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class CallerReport(Struct, kw_only=True):
    """What the key of this request may do, and what the server offers."""

    object: Literal["caller"] = "caller"
    tenant: str
    """The tenant of the request; without one, the home tenant."""
    key_id: str | None
    """The public part of the key; null: the request came without a key."""
    scopes: list[str]
    adapters: list[str] | None
    """Patterns of the adapters that the key may use; null: all that its tenant may use."""
    may_use_base: bool
    is_operator: bool
    """Not bound to a tenant."""
    base: str
    """The first name of the base model; empty until the engine has started."""
    version: str
    has_registry: bool
    allows_folders: bool
    """Whether adapters may be pushed from folders of the server."""
    signs_receipts: bool


class ReceiptKey(Struct, kw_only=True):
    object: Literal["receipt.key"] = "receipt.key"
    key_id: str
    public_key: str
    """Ed25519, as PEM."""
