"""Replies of the routes for usage and audit."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class UsageList(Struct, kw_only=True):
    data: list[dict[str, str | int]]
    """One object per day, tenant, key and adapter, with the numbers of requests and tokens."""
    object: Literal["list"] = "list"


class AuditList(Struct, kw_only=True):
    data: list[dict[str, Any]]
    """Entries with actor, action, target, result and digest."""
    object: Literal["list"] = "list"
