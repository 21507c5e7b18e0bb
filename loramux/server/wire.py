"""JSON bodies of the HTTP API: OpenAI's format, vLLM's additions, and loramux's own."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.receipts.receipt import Receipt
from loramux.registry.records import AdapterInfo, AliasState, VersionInfo


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    """Send one more chunk before the end, with usage and no choices."""
    continuous_usage_stats: bool | None = None
    """With include_usage: put the usage so far into every chunk."""


class GenerationBody(Struct, kw_only=True):
    """Fields of all generating routes. Absent or null: the default. Unknown fields are ignored."""

    model: str | None = None
    """The base's name or an adapter's; absent: the base."""
    adapters: list[str] | None = None
    """Adapters by name, whatever `model` says; an empty list is the base."""
    adapter_weights: list[float] | None = None
    """One factor per entry of `adapters`; absent: 1.0 each."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Another name of max_tokens; wins when both are given."""
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Token id (as a string) -> number added to its logit, in [-100, 100]."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    """Seconds from arrival to the last token; then the request ends with an error."""
    cache_salt: str | None = None
    """Only requests of the same salt share cached prefixes."""
    user: str | None = None


class ChatRequest(GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of either."""
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    """Prompt tokens that were not computed again."""


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChatTokenLogprob]


class ChatMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    """The stop string or the id of the stop token that ended it."""


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole answer, and also one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class ErrorInfo(Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    """The field of the request that is at fault."""
    code: int
    """The HTTP status; in a stream, the one it would have had."""
    reason: str | UnsetType = UNSET
    """What is wrong with an adapter, as a short word for programs."""


class ErrorBody(Struct, kw_only=True):
    error: ErrorInfo


class ModelEntry(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "loramux"
    root: str | None
    """Where its files are."""
    parent: str | None
    """The base of an adapter."""
    max_model_len: int | None


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class AdapterEntry(Struct, kw_only=True):
    """One adapter, whatever it is called."""

    id: str
    """The first of its names; its CID when it has none any more."""
    object: Literal["adapter"] = "adapter"
    names: list[str]
    cid: str
    path: str | None
    rank: int
    bytes: int
    tier: str
    """The fastest that has its bytes: device, host, disk or source; loading while they move."""
    pinned: bool
    hits: int
    """Requests that found it on the device."""
    misses: int
    last_use: float | None
    """Seconds since the epoch."""
    running: int
    waiting: int
    cached_tokens: int
    """Tokens of its prompts that are kept for the next one."""
    requests: int
    prompt_tokens: int
    generation_tokens: int


class AdapterList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AdapterEntry]
    total: int
    """How many there are, whatever `limit` said."""


class TierEntry(Struct, kw_only=True):
    tier: str
    budget_bytes: int
    used_bytes: int
    adapters: int
    hits: int
    misses: int
    loads: int
    evictions: int
    failures: int
    load_seconds: float
    load_bytes: int


class EngineReport(Struct, kw_only=True):
    """The engine and its memory at a glance; counters grow from the start."""

    model: str
    status: str
    restarts: int
    running: int
    waiting: int
    steps: int
    preemptions: int
    pages: int
    free_pages: int
    page_bytes: int
    requests: int
    prompt_tokens: int
    generation_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    tiers: list[TierEntry]


class PlanRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Adapters to plan for; budgets that are left out are those of this server."""

    adapters: int
    rank: int | list[int]
    """One rank, or several to deal out in turn."""
    targets: str | list[str] | None = None
    """q,k,v,o, attention, mlp, all or any projections; absent: q,k,v,o."""
    zipf: float | None = None
    """How unequal their popularity is; 0: all equal; absent: 1."""
    device_memory: int | str | None = None
    """Bytes, or text such as 8GiB."""
    host_memory: int | str | None = None
    disk_space: int | str | None = None
    kv_tokens: int | None = None
    """Tokens of KV cache to keep free."""


class TokenizeRequest(Struct, kw_only=True):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """For a prompt; true unless said otherwise."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(Struct, kw_only=True):
    prompt: str


class HealthReport(Struct, kw_only=True):
    status: str
    """starting, ready, restarting, draining, stopped; failing when a deep check failed."""
    restarts: int
    """How often the engine had to be started again."""
    running: int
    waiting: int
    checks: dict[str, float] | UnsetType = UNSET
    """Of a deep check: seconds that each thing took."""
    failure: str | UnsetType = UNSET
    """Why a deep check failed."""


class VersionReport(Struct, kw_only=True):
    version: str


class ServedChat(ChatCompletion, kw_only=True):
    serving: Receipt | UnsetType = UNSET


class ServedChatChunk(ChatChunk, kw_only=True):
    serving: Receipt | UnsetType = UNSET


class ServedCompletion(Completion, kw_only=True):
    """A whole answer, and also one chunk of a streamed one."""

    serving: Receipt | UnsetType = UNSET


class ReceiptList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class RunRequest(GenerationBody, kw_only=True):
    """Sampling fields as in the other routes; `artifact` names the adapter."""

    artifact: str
    """tenant/name, with @version or @alias, a content id, or a name that was given at start."""
    input: str
    raw: bool | None = None
    """The input is the prompt itself; otherwise it is a user's message in the chat template."""


class RunAnswer(Struct, kw_only=True):
    id: str
    object: Literal["run"] = "run"
    artifact: str
    """As it was resolved."""
    output: str
    finish_reason: str
    usage: Usage
    serving: Receipt | UnsetType = UNSET


class RunChunk(Struct, kw_only=True):
    id: str
    object: Literal["run.chunk"] = "run.chunk"
    artifact: str
    output: str
    finish_reason: str | None = None
    usage: Usage | UnsetType = UNSET
    """With the last chunk."""
    serving: Receipt | UnsetType = UNSET


class PushRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    reference: str
    """tenant/name@1.4.2; without a version the next free one is taken."""
    source: str
    """A folder of the server's, or an id such as hf:owner/name or s3://bucket/folder."""


class PromoteRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    version: str
    alias: str = "prod"
    if_revision: int | None = None
    """Refuse (409) unless the alias is still at this revision."""
    warm: bool = False
    """Load the version first, so that nobody waits for it."""


class RollbackRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    alias: str = "prod"
    if_revision: int | None = None
    warm: bool = False


class SplitRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    weights: dict[str, int]
    """Version -> share, such as {"1.4.2": 90, "1.5.0": 10}."""
    alias: str = "prod"
    if_revision: int | None = None
    warm: bool = False


class VersionEntry(Struct, kw_only=True):
    version: str
    cid: str
    bytes: int
    base_model: str | None
    created: float


class AliasEntry(Struct, kw_only=True):
    alias: str
    revision: int
    action: str
    targets: dict[str, int]
    """Version -> share; empty: the alias is gone."""
    created: float


class RegistryEntry(Struct, kw_only=True):
    """An adapter of the registry."""

    id: str
    object: Literal["registry.adapter"] = "registry.adapter"
    tenant: str
    name: str
    latest: str | None
    versions: list[VersionEntry]
    """Highest first."""
    aliases: list[AliasEntry]


class PushedEntry(Struct, kw_only=True):
    id: str
    object: Literal["registry.version"] = "registry.version"
    version: str
    cid: str
    bytes: int
    is_new: bool
    """False: the version was there with the same bytes."""


class Removed(Struct, kw_only=True):
    id: str
    object: Literal["registry.removed"] = "registry.removed"
    deleted: bool = True


def registry_entry(info: AdapterInfo) -> RegistryEntry:
    return RegistryEntry(
        id=str(info.adapter),
        tenant=info.adapter.tenant,
        name=info.adapter.name,
        latest=info.latest,
        versions=[version_entry(version) for version in info.versions],
        aliases=[alias_entry(state) for state in info.aliases],
    )


def version_entry(version: VersionInfo) -> VersionEntry:
    return VersionEntry(
        version=version.version,
        cid=version.cid,
        bytes=version.size_bytes,
        base_model=version.base_model,
        created=version.created_at,
    )


def alias_entry(state: AliasState) -> AliasEntry:
    return AliasEntry(
        alias=state.alias,
        revision=state.revision,
        action=state.action.value,
        targets={target.version: target.weight for target in state.targets},
        created=state.created_at,
    )
