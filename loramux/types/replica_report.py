"""The residency report of a replica, as it goes over the wire to routers."""

from __future__ import annotations

import msgspec

MAX_WAIT_S = 30.0
USUAL_ANSWER_TOKENS = 100.0
"""Assumed length of an answer until a replica has measured its own."""


class ResidencyReport(msgspec.Struct, kw_only=True):
    """Load and state of a replica, and the adapters that moved between its tiers."""

    instance: str
    """Random for each start of the engine; after another one only a full report is valid."""
    since: int
    generation: int
    """`moves` lead from `since` (exclusive) to this generation."""
    full: bool
    """Whether `moves` are all adapters in a tier and replace what the reader knew."""
    moves: dict[str, int]
    """First 8 bytes of the CID's digest in hexadecimal, and the tier: 0 gone, 1 source, 2 disk, 3
    host, 4 loading, 5 device."""
    state: str
    """starting, ready, stalled, restarting, draining or stopped."""
    base: str
    """Name of the base model; empty until the engine has started."""
    base_digest: str
    revision: int
    """Newest revision of the registry that this server follows; 0 without one."""
    open: int
    """Running and waiting sequences."""
    waiting: int
    waiting_tokens: int
    """Tokens that waiting sequences have to compute before their first new one."""
    slots: int
    """Sequences that the engine can run at once now."""
    step_s: float
    """Smoothed seconds of a step."""
    token_s: float
    """Smoothed seconds of a prompt token."""
    tier_s: list[float]
    """Seconds to bring an adapter to the device, by the number of its tier."""
    free_pages: int
    answer_tokens: float = USUAL_ANSWER_TOKENS
    """Smoothed number of tokens of an answer."""
