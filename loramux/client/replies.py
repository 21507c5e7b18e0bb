"""Replies of a server: the fields that this client reads; others are ignored."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: dict[str, Any] | None = None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    created: int = 0
    choices: tuple[ChatChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].message.content or ""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: dict[str, Any] | None = None


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    created: int = 0
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Message
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, Any] | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    created: int = 0
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None
    """Set in the last chunk, which has no choices."""

    @property
    def text(self) -> str:
        """New text of choice 0."""
        return "".join(choice.delta.content or "" for choice in self.choices if choice.index == 0)


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, Any] | None = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    created: int = 0
    choices: tuple[CompletionChunkChoice, ...]
    usage: Usage | None = None
    """Set in the last chunk, which has no choices."""

    @property
    def text(self) -> str:
        """New text of choice 0."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int = 0
    owned_by: str | None = None
    root: str | None = None
    """Path or id of the weights."""
    parent: str | None = None
    """Name of the base model, for an adapter."""
    max_model_len: int | None = None

    @property
    def is_adapter(self) -> bool:
        return self.parent is not None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[ModelCard, ...]


class AdapterFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an adapter was refused."""

    code: str
    message: str
    fix: str = ""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Residency and traffic of one adapter."""

    id: str
    names: tuple[str, ...] = ()
    state: str = "ready"
    """registered (its weights are read before its first use), ready or failed"""
    failure: AdapterFailure | None = None
    cid: str | None
    """None until its weights were read."""
    path: str | None = None
    rank: int
    bytes: int
    tier: str
    """Fastest tier that holds it: device, host, disk or source; loading during a load."""
    pinned: bool = False
    hits: int = 0
    misses: int = 0
    last_use: float | None = None
    """Seconds since the epoch."""
    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    replicas: dict[str, str] = {}
    """Its tier on each server, if a router answered."""
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recipe: dict[str, Any] | None = None
    """Method and parts of a combination of adapters; None for others."""
    tokenizer_digest: str | None = None
    """Digest of its own tokenizer files; None if it has none."""
    aliases: tuple[str, ...] = ()
    """Its aliases in the registry, if the list is of what is stored there."""
    signed_by: str | None = None
    """Id of the key whose signature was verified, likewise."""
    modality: str = "text"
    """The kind of model that it is for: text or image."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A server of a router's fleet."""

    name: str
    url: str
    state: str
    revision: int = 0
    """The registry's revision that it follows."""


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[ReplicaInfo, ...]


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[AdapterInfo, ...]
    total: int = 0


class TierInfo(msgspec.Struct, frozen=True, kw_only=True):
    tier: str
    budget_bytes: int = 0
    used_bytes: int = 0
    adapters: int = 0
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State and counters of the engine; counters start at 0 with the server."""

    model: str
    status: str
    restarts: int = 0
    device: str = ""
    """cpu, cuda or cuda:N"""
    gpu_name: str | None = None
    fallback_reason: str | None = None
    """Why the CPU is used although the machine has an NVIDIA GPU."""
    dtype: str = ""
    kv_cache_dtype: str | None = None
    """None for an image model."""
    max_batch_tokens: int = 0
    max_sequences: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    pages: int = 0
    free_pages: int = 0
    page_bytes: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    tiers: tuple[TierInfo, ...] = ()
    modality: str = "text"
    kernels: str | None = None
    """The kernels of a language model's next step: numba, cpu (torch's operations) or triton."""
    image: EngineInfo | None = None
    """The engine of the image model beside that of the language model."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int | None = None
    token_strs: tuple[str, ...] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Made by the client from the HTTP status; the body differs between servers."""

    is_healthy: bool
    status: int
    detail: dict[str, Any] = {}
