"""The limits of a tenant or of an API key, and the other settings of a tenant."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from loramux.errors import InvalidRequest, suggest

MAX_LIMIT = 2**53
MAX_SHARE = 1e6


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The most that a tenant or an API key may use; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens."""
    concurrent_requests: int | None = None
    adapters: int | None = None
    """Adapters with at least one version."""
    stored_bytes: int | None = None
    """Files of all versions; content that several versions share counts once."""
    pinned_pages: int | None = None
    """Pages of the adapters that are pinned on one server."""
    max_rank: int | None = None
    """The highest rank of an adapter that is pushed."""

    @property
    def is_rate_limited(self) -> bool:
        """Whether requests are counted."""
        return any(
            limit is not None
            for limit in (
                self.requests_per_minute,
                self.tokens_per_minute,
                self.concurrent_requests,
            )
        )


class TenantSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the registry records of a tenant beside its adapters."""

    limits: Limits = Limits()
    share: float = 1.0
    """The tenant's share under fair scheduling."""
    require_signed: bool = False
    """Whether a push needs a signature of one of the tenant's signing keys."""


NO_LIMITS = Limits()
DEFAULT_SETTINGS = TenantSettings()
LIMITS: Mapping[str, str] = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "concurrent requests",
    "adapters": "stored adapters",
    "stored_bytes": "stored bytes",
    "pinned_pages": "pinned pages",
    "max_rank": "as the highest rank",
}
"""The names of all limits, with the words that follow their value in messages."""


def change_limits(limits: Limits, changes: Mapping[str, int | None]) -> Limits:
    """Return the limits with other values; None removes one. Raises InvalidRequest."""
    for name, value in changes.items():
        if name not in LIMITS:
            raise InvalidRequest(f"There is no limit {name!r}. {suggest(name, list(LIMITS))}")
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_LIMIT):
            raise InvalidRequest(
                f"{name} must be a whole number from 0 to {MAX_LIMIT}, got {value!r}.", param=name
            )
    return msgspec.structs.replace(limits, **changes)


def check_share(share: float | None) -> None:
    if share is not None and not (0 < share <= MAX_SHARE and math.isfinite(share)):
        raise InvalidRequest(f"share must be over 0 and at most {MAX_SHARE:g}.", param="share")
