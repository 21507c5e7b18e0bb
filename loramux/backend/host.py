"""The interface between the server and an engine of any kind. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from loramux.errors import LoramuxError
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.types.residency import ResidencyView


class Health(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    """The engine has given no sign of life for 4 s, and may go on. New requests get 503."""
    RESTARTING = "restarting"
    """The engine died or hung and a new one is starting. Requests are refused with 503."""
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCard:
    """Describes the base model of a running engine, whatever it generates, and its budgets."""

    name: str
    path: str
    digest: str
    """The digest of the model's weights."""
    dtype: str
    pool_bytes: int
    device: str = "cpu"
    gpu_name: str | None = None
    fallback_reason: str | None = None
    """Why the CPU is used although the machine has an NVIDIA GPU."""
    num_pages: int = 0
    """Pages of the pool."""
    max_sequences: int = 256
    """Requests of one step."""
    max_resident: int | None = None
    """Limit of the adapters on the device; None: as many as fit."""
    max_loras: int | None = None
    """Maximum number of distinct adapters in one batch; None: no limit."""
    host_memory_bytes: int = 0
    disk_space_bytes: int = 0
    adapter_memory_fraction: float = 1.0
    """Largest fraction of the page pool that adapters may take."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start; some phases run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """Residency and usage of one adapter that the host has registered."""

    cid: str
    tier: str
    """The fastest tier that has its bytes (device, host, disk or source); loading during a load."""
    num_bytes: int
    rank: int
    hits: int = 0
    """Requests that found the adapter on the device."""
    misses: int = 0
    last_use_s: float | None = None
    """Seconds since the epoch; None: never used."""
    is_pinned: bool = False
    num_running: int = 0
    num_waiting: int = 0
    cached_tokens: int = 0
    """Tokens of this adapter's prefixes in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Size and counters of one adapter tier; counters start at 0 with the engine."""

    tier: str
    """device, host or disk"""
    budget_bytes: int = 0
    used_bytes: int = 0
    num_adapters: int = 0
    hits: int = 0
    misses: int = 0
    loads: int = 0
    """Adapters loaded into this tier."""
    evictions: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTierStats:
    """Counters, in files, of a tier behind the adapter store."""

    tier: str
    """shared_cache or remote_store"""
    hits: int = 0
    misses: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine; counters start at 0 with the engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_idle_pages: int = 0
    """Pages of idle adapters and cached prefixes, which are evicted on demand."""
    num_adapter_pages: int = 0
    """Pages that adapters own, those of unfinished loads included."""
    num_prefix_pages: int = 0
    """Pages of cached prefixes, those in use included."""
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_steps: int = 0
    resident_adapters: tuple[str, ...] = ()
    """CIDs of the adapters whose weights are in pages."""
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    """CID -> number of running sequences that use it."""
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)
    waiting_tenants: Mapping[str, int] = field(default_factory=dict)
    """Tenant -> number of its waiting sequences."""
    tiers: tuple[TierStats, ...] = ()
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    draft_tokens: Mapping[str, int] = field(default_factory=dict)
    """CID -> verified drafts of its requests; "": the base, and adapters beyond a bound."""
    accepted_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    """The drafts of draft_tokens that the model sampled too."""
    step_loss_s: Mapping[str, int] = field(default_factory=dict)
    """Histogram of step time lost to adapter loads: upper bound in seconds, ascending, "+Inf"
    last -> number of steps in this bucket (not cumulative)."""
    step_loss_sum_s: float = 0.0
    waiting_tokens: int = 0
    """Tokens that waiting sequences have to compute before their first new one."""
    step_s: float = 0.0
    """Smoothed duration of a step."""
    token_s: float = 0.0
    """Smoothed duration of a prefill token."""
    kernels: str = ""
    """The kernels of the next step: numba, cpu (torch's operations), torch (reference), triton."""
    tier_s: tuple[float, ...] = ()
    """Seconds to bring an adapter of the usual size to the device, by the number of its Tier."""


class AdapterHost(Protocol):
    """An engine with a base model and adapters by CID, whatever it generates.

    Its adapters outlive an internal restart.
    """

    @property
    def health(self) -> Health: ...

    @property
    def card(self) -> HostCard: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def residency(self) -> ResidencyView:
        """The tiers of the engine's adapters; another object after each restart of the engine."""
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        """Registered adapters by CID, in the order in which they were added."""
        ...

    @property
    def pinned(self) -> Set[str]:
        """CIDs of the pinned adapters."""
        ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def kills(self) -> Mapping[str, int]:
        """Engine processes that the server killed, by cause."""
        ...

    async def start(self) -> None:
        """Return once the engine accepts requests; raise the error that prevents the start."""
        ...

    async def add_adapter(self, path: str) -> AdapterCard:
        """Check an adapter's files and register it by its CID; raise AdapterRefused."""
        ...

    async def inspect_adapters(
        self, paths: Sequence[str]
    ) -> Sequence[AdapterCard | InspectedCard | LoramuxError]:
        """Check several adapters, of PEFT folders configs and headers without their weights.

        Returns for each its card, if its CID is known and it is registered now, else what its
        header says, or why it is refused.
        """
        ...

    async def remove_adapter(self, cid: str) -> None:
        """Frees the adapter once no request uses it; raises AdapterNotFound for an unknown CID."""
        ...

    async def prewarm(self, cids: Sequence[str], *, num_busiest: int = 0) -> None:
        """Load these adapters, then the busiest of earlier runs, while there is free memory."""
        ...

    async def pin_adapter(self, cid: str, pinned: bool) -> None:
        """Protects an adapter from eviction from the device once it is resident there."""
        ...

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        """Return residency and usage of every registered adapter."""
        ...

    async def examine_adapter(self, path: str) -> Mapping[str, Any]:
        """Return the doctor's report on an adapter; a refusal is a finding in it."""
        ...

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Generate on the base and on an adapter; return the seconds of each check, or raise.

        `broken_adapters` is the number of those that were tried and cannot be served; 0: left out.
        """
        ...

    async def close(self, *, drain_s: float) -> None:
        """Refuses new requests, waits up to drain_s for running ones, then stops the engine."""
        ...
