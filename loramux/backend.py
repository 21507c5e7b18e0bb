"""What a server needs of an engine, whichever process or machine it runs in. No torch here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from loramux.types import FinishReason, SamplingParams, TokenLogprob


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
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the choice's first delta, where they were asked for; the first prompt token has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters grow from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_steps: int = 0
    resident_adapters: tuple[str, ...] = ()
    """CIDs with their weights in pages."""
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    """CID -> sequences in the batch that use it."""
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)


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

        Raises InvalidRequest, DoesNotFit, AdapterNotFound, EngineBusy (queue full) or EngineStopped
        (the engine died: the answer is not complete). Closing the iterator early aborts the job.
        """
        ...

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Checks the folder in the engine and makes the name known, or raises AdapterRefused."""
        ...

    async def remove_adapter(self, name: str) -> None: ...

    async def probe(self, timeout_s: float) -> dict[str, float]:
        """Really generates a token on the base and loads an adapter; seconds of each, or raises."""
        ...

    async def close(self, *, drain_s: float) -> None:
        """Refuses new jobs, lets running ones end for at most drain_s, then stops the engine."""
        ...
