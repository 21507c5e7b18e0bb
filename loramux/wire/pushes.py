"""Replies about pushed adapters."""

from __future__ import annotations

import msgspec


class Pushed(msgspec.Struct, kw_only=True):
    """The reply to POST /v1/adapters/{name}:push."""

    name: str
    version: int
    cid: str
    bytes: int
    """Size on the device."""
    rank: int
    warnings: list[str]
    received_s: float
    """Seconds until the files were here."""
    seconds: float
    """Seconds until requests are answered by them."""


class AdapterVersion(msgspec.Struct, kw_only=True):
    """The reply to GET /v1/adapters/{name}/version."""

    name: str
    version: int
    """0: the name means what was not pushed."""
    cid: str
