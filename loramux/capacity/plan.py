"""What a plan for adapter memory says; the JSON of `loramux plan` and POST /v1/adapters/plan."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Tier = Literal["device", "host", "disk", "source"]


class BaseSizes(Struct, kw_only=True, frozen=True):
    name: str
    dtype: str
    num_layers: int
    weight_bytes: int
    """One copy of the weights; not part of the pool."""
    kv_token_bytes: int
    block_tokens: int
    page_bytes: int


class AdapterSize(Struct, kw_only=True, frozen=True):
    rank: int
    count: int
    bytes: int
    """In host memory."""
    disk_bytes: int
    """With the header of its file."""
    pages: int
    device_bytes: int
    """Whole pages."""


class HitRate(Struct, kw_only=True, frozen=True):
    ideal: float
    """With the most popular adapters in each tier."""
    lru: float
    """With the most recently used ones, by Che's approximation."""


class TierPlan(Struct, kw_only=True, frozen=True):
    tier: Tier
    budget_bytes: int | None
    """None: not limited."""
    room_bytes: int | None
    """What of the budget adapters may take; on the device KV cache takes the rest."""
    needed_bytes: int
    """The budget with which all adapters would fit."""
    used_bytes: int
    adapters: int
    """How many fit. A slower tier also holds what the faster ones have."""
    zipf: HitRate
    """Shares of the requests that find their adapter here, and in no faster tier."""
    uniform: HitRate


class Eviction(Struct, kw_only=True, frozen=True):
    """The adapters that are not on the device: the least popular ones."""

    adapters: int
    zipf_share: float
    """Of the requests: each of them waits for a load."""
    uniform_share: float


class EvictedNow(Struct, kw_only=True, frozen=True):
    """Of the adapters now on a running server's device: those that would make room."""

    adapters: int
    names: list[str]
    """The first of them to go, at most twenty."""
    is_enough: bool
    """False: cached prompts, or running requests, would have to give room as well."""


class MemoryPlan(Struct, kw_only=True, frozen=True):
    base: BaseSizes
    adapters: int
    targets: list[str]
    zipf: float
    sizes: list[AdapterSize]
    tiers: list[TierPlan]
    kv_tokens_reserved: int
    kv_tokens_left: int
    """Beside the adapters that fit; idle adapters give way when more are needed."""
    evicted: Eviction
    evicted_now: EvictedNow | UnsetType = UNSET
    advice: list[str]

    def tier(self, name: str) -> TierPlan:
        return next(tier for tier in self.tiers if tier.tier == name)
