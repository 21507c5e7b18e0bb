"""What a caller may do: the scopes of a key."""

from __future__ import annotations

from enum import StrEnum


class KeyScope(StrEnum):
    """A group of routes that a key opens; the table in `types/routes.py` has the routes."""

    INFER = "infer"
    PUSH = "push"
    ADMIN = "admin"
    METRICS = "metrics"
    RECEIPTS = "receipts"


ALL_SCOPES = frozenset(KeyScope)
