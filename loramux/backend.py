"""What a server needs of an engine, whichever process or machine it runs in. No torch here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from loramux.errors import AdapterRefused, DoesNotFit, LoramuxError, RequestTimeout
from loramux.types.model import BaseModelInfo
from loramux.types.request import FinishReason, RequestFacts, TokenLogprob
from loramux.types.sampling import SamplingParams


class Health(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """The engine died or hung; a new one is coming up. Requests are refused with 503 until then."""
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the engine said of its base when it came up."""

    name: str
    path: str
    digest: str
    max_model_len: int
    vocab_size: int
    dtype: str
    pool_bytes: int
    block_tokens: int = 16
    """Tokens of one KV page."""
    shapes: BaseModelInfo | None = None
    max_loras: int | None = None
    """Distinct adapters in one batch; None: as many as fit."""
    host_memory_bytes: int = 0
    disk_space_bytes: int = 0
    adapter_memory_fraction: float = 1.0
    """Largest share of the pool that adapters may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """An adapter that requests may name."""

    name: str
    path: str
    cid: str
    rank: int
    num_bytes: int
    warnings: tuple[str, ...] = ()
    created_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt for the engine: tokenized, its adapter called by a name of the backend's."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    """None: the base."""
    adapter_weight: float = 1.0
    label: str | None = None
    """What shares and metrics call the adapter; None: by its name."""
    tenant: str = ""
    """Whose share of the machine it uses."""
    cache_salt: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice of a job."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token; None for an end-of-sequence token."""
    stop_hit: bool = False
    """A stop string ended the choice, and the scheduler does not know yet."""
    error: str | None = None
    error_code: str | None = None
    """As in TokenEvent: timeout, adapter or memory."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the choice's first delta, where they were asked for; the first prompt token has none."""
    num_reused: int | None = None
    """With the choice's first delta: prompt tokens that came from the prefix cache."""
    facts: RequestFacts | None = None
    """With the job's first delta."""


def failure_of(delta: Delta) -> LoramuxError:
    """What a choice that ended in an error raises."""
    message = delta.error or "The engine failed on this request."
    match delta.error_code:
        case "timeout":
            return RequestTimeout(message)
        case "adapter":
            return AdapterRefused("adapter_unavailable", message)
        case "memory":
            return DoesNotFit(message)
    return LoramuxError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """One known adapter, as the engine sees it."""

    cid: str
    tier: str
    """The fastest that has its bytes: device, host, disk or source; loading while they move."""
    num_bytes: int
    rank: int
    hits: int = 0
    """Requests that found it on the device."""
    misses: int = 0
    last_use_s: float | None = None
    """Seconds since the epoch; None: never used."""
    is_pinned: bool = False
    num_running: int = 0
    num_waiting: int = 0
    cached_tokens: int = 0
    """Tokens of its prefixes that are kept in pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters since the engine's start."""

    tier: str
    """device, host or disk"""
    budget_bytes: int = 0
    used_bytes: int = 0
    num_adapters: int = 0
    hits: int = 0
    misses: int = 0
    loads: int = 0
    """Adapters brought into this tier."""
    evictions: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTierStats:
    """What stands behind the store of adapters, in files."""

    tier: str
    """shared_cache or remote_store"""
    hits: int = 0
    misses: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters grow from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_idle_pages: int = 0
    """Of idle adapters and cached prefixes: they are given up when somebody needs the room."""
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_steps: int = 0
    resident_adapters: tuple[str, ...] = ()
    """CIDs with their weights in pages."""
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    """CID -> sequences in the batch that use it."""
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)
    tiers: tuple[TierStats, ...] = ()
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Those of them that were not computed again."""
    step_loss_s: Mapping[str, int] = field(default_factory=dict)
    """Steps by time lost to loads: upper bound in seconds, ascending, "+Inf" last -> steps in
    this bucket alone."""
    step_loss_sum_s: float = 0.0


class TextCodec(Protocol):
    """The tokenizer, as far as a server uses it."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def token_to_str(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Backend(Protocol):
    """start() returns when the engine can answer, or raises; a failed job raises as it is read."""

    @property
    def health(self) -> Health: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def codec(self) -> TextCodec: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        """By name, in the order they were added."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None: ...

    def submit(self, job: Job) -> AsyncIterator[Delta]:
        """Deltas of all choices until each has its finish_reason.

        Raises InvalidRequest, DoesNotFit, AdapterNotFound, AdapterRefused (it cannot be loaded),
        EngineBusy (queue full), RequestTimeout or EngineStopped (the engine died: the answer is
        not complete). Closing the iterator early aborts the job.
        """
        ...

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Checks the folder in the engine and makes the name known, or raises AdapterRefused."""
        ...

    async def remove_adapter(self, name: str) -> None: ...

    async def prewarm(self, names: Sequence[str], *, num_busiest: int = 0) -> None:
        """Loads these adapters, then the busiest of earlier runs, while there is room to spare."""
        ...

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        """A pinned adapter is never evicted from the device, once it is there."""
        ...

    async def adapter_uses(self) -> Sequence[AdapterUse]:
        """Every adapter that the engine knows, one entry per CID."""
        ...

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Really generates a token on the base and loads an adapter; seconds of each, or raises."""
        ...

    async def close(self, *, drain_s: float) -> None:
        """Refuses new jobs, lets running ones end for at most drain_s, then stops the engine."""
        ...
