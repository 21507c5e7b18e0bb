"""JSON bodies of the HTTP API: OpenAI's format, vLLM's additions, and loramux's own."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.receipts.receipt import Receipt
from loramux.types.modality import Modality


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    """Send a last chunk with usage and without choices."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk contains the usage so far."""


class Speculative(Struct, kw_only=True):
    """How the engine may guess ahead for a request; it changes no answer."""

    num_speculative_tokens: int | None = None
    """Most drafts in one step, up to the server's limit; 0: none."""


class StructuredOutputs(Struct, kw_only=True):
    """One constraint of the answer, and its options."""

    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A Lark or GBNF grammar."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    """true: no whitespace between the parts of a JSON value; false: up to 64 characters; absent: at
    most one space or newline."""
    disable_additional_properties: bool | None = None
    """Objects have only the properties that the schema names, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace in JSON values."""


class GenerationBody(Struct, kw_only=True):
    """Fields of all generating routes. Absent or null: the default."""

    model: str | None = None
    """Name of the base model or of an adapter, or a sum such as `a+0.3*b`; absent: the base."""
    adapters: list[str] | None = None
    """Up to 8 adapters whose weighted deltas are added; they take precedence over `model`, and an
    empty list selects the base."""
    adapter_weights: list[float] | None = None
    """One LoRA weight per entry of `adapters`; absent: 1.0 each."""
    combination: str | None = None
    """How several adapters are combined: `cat` (default) adds their deltas; the other methods of
    PEFT make a new adapter on first use."""
    density: float | None = None
    """Share of elements that the combination keeps; for ties, dare and magnitude_prune."""
    majority_sign_method: str | None = None
    """How ties and dare_ties elect a sign: `total` (default) or `frequency`."""
    combination_seed: int | None = None
    """Seed of dare; absent: 0."""
    svd_rank: int | None = None
    """Rank of the result of an SVD combination; absent: the largest rank of the adapters."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Another name of max_tokens, which takes precedence."""
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
    """Token id (as a string) -> number in [-100, 100] that is added to its logit."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    """No stop token or stop string ends the answer before so many tokens."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated."""
    bad_words: list[str] | None = None
    """Words that are never generated."""
    speculative: Speculative | None = None
    response_format: dict[str, Any] | None = None
    """`type` is text, json_object, json_schema or structural_tag."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    """A regular expression of the whitespace in JSON values, wherever their schema is."""
    nvext: dict[str, Any] | None = None
    """The guided_ fields of another server are read from it."""
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    """Limit in seconds from arrival to the last token; a later request ends with an error."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    user: str | None = None


class OpenAiBody(GenerationBody, kw_only=True):
    """Fields that OpenAI's two routes share, most of them vLLM's."""

    prompt_logprobs: int | None = None
    """Number of alternatives to report for each token of the prompt; not in streams."""
    return_token_ids: bool | None = None
    """Also report the ids of the tokens of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:N`."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of the prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut off; absent: left, so that the last tokens are kept."""
    lora_path: str | list[str | None] | None = None
    """The adapter beside `model`, as with SGLang; a list has it once for each prompt."""


class ChatRequest(OpenAiBody, kw_only=True):
    messages: list[dict[str, Any]]
    reasoning_effort: str | None = None
    """A variable of the chat template."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that the answer may call."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto (default), required, {"type": "function", "function": {"name": …}}, or
    {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    include_reasoning: bool | None = None
    """false: leave out the reasoning that --reasoning-parser finds."""


class CompletionRequest(OpenAiBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, a list of token ids, or a list of either."""
    logprobs: int | None = None
    suffix: str | None = None
    """The text after the answer, for models that fill a hole between two texts."""
    echo: bool | None = None
    add_special_tokens: bool | None = None


class FimRequest(GenerationBody, kw_only=True):
    """Mistral's body of a hole between two texts."""

    prompt: str
    """The text before the answer."""
    suffix: str | None = None
    """The text after it."""
    random_seed: int | None = None
    """Another name of seed."""


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


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


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """The text before `</think>`, with --reasoning-parser."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice."""
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = dict[str, PromptLogprob]
"""Token id -> its log probability at one position of the prompt."""


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogprobs | None] | UnsetType = UNSET
    serving: Receipt | UnsetType = UNSET
    """Receipt of the request; in a stream, in the last chunk only."""


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str
    """The next part of the JSON text."""


class ToolCallDelta(Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk of a choice."""
    serving: Receipt | UnsetType = UNSET
    """Receipt of the request; in a stream, in the last chunk only."""


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
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In a stream in the first chunk of the choice."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptLogprobs | None] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A complete reply, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    serving: Receipt | UnsetType = UNSET
    """Receipt of the request; in a stream, in the last chunk only."""


class ModelEntry(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "loramux"
    root: str | None
    """Path of its files."""
    parent: str | None
    """Name of an adapter's base model."""
    max_model_len: int | None
    modality: Modality | UnsetType = UNSET
    """image; absent for text"""
    cid: str | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    """The weight of an image adapter in requests that name none."""
    is_default: bool | UnsetType = UNSET
    """Whether requests for images that name no adapter use it."""
    trigger_words: list[str] | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class AdapterFailure(Struct, kw_only=True):
    """Why an adapter was refused, as the error of a request for it says."""

    code: str
    message: str
    fix: str


class AdapterEntry(Struct, kw_only=True):
    """Residency and traffic of one adapter with all its names."""

    id: str
    """Its first name, or its CID if it has no name."""
    object: Literal["adapter"] = "adapter"
    names: list[str]
    state: Literal["registered", "ready", "failed", "stored"]
    """registered: only its header was checked; its weights are read before its first use.
    stored: a version of the registry that no request has named yet."""
    failure: AdapterFailure | None = None
    cid: str | None
    """None until the weights were read."""
    path: str | None
    rank: int
    bytes: int
    tier: str
    """Fastest tier that holds it: device, host, disk or source; loading during a load."""
    pinned: bool
    hits: int
    """Requests that found the adapter on the device."""
    misses: int
    last_use: float | None
    """Seconds since the epoch."""
    running: int
    waiting: int
    cached_tokens: int
    """Tokens of its prompts in the prefix cache."""
    requests: int
    prompt_tokens: int
    generation_tokens: int
    recipe: dict[str, Any] | UnsetType = UNSET
    """Method, parts (CID and weight) and parameters of a combined adapter, or of a sum that is a
    version of the registry: its bytes are those of its parts, which are listed themselves."""
    tokenizer_digest: str | UnsetType = UNSET
    """Digest of the adapter's tokenizer files, if it has any."""
    aliases: list[str] | UnsetType = UNSET
    """With `stored`: its aliases in the registry, such as acme/sql@prod."""
    signed_by: str | UnsetType = UNSET
    """With `stored`: the id of the key whose signature was verified."""
    modality: Modality | UnsetType = UNSET
    """image; absent for text"""


class AdapterList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AdapterEntry]
    total: int
    """Number of adapters without `limit`."""


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
    """State and counters of the engine; counters start at 0 with the server."""

    model: str
    status: str
    restarts: int
    device: str
    """cpu, cuda or cuda:N"""
    gpu_name: str | None
    fallback_reason: str | None
    """Why the CPU is used although the machine has an NVIDIA GPU."""
    dtype: str
    kv_cache_dtype: str | UnsetType = UNSET
    """Absent for an image model."""
    max_batch_tokens: int
    max_sequences: int
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
    kernels: str | UnsetType = UNSET
    """The kernels of a language model's next step: numba, cpu (torch's operations) or triton."""
    modality: Modality | UnsetType = UNSET
    """image; absent for text"""
    image: EngineReport | UnsetType = UNSET
    """The engine of the image model beside that of the language model."""


class PlanRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Adapters to plan for; absent budgets are those of this server."""

    adapters: int
    rank: int | list[int] | None = None
    """One rank, or several that the adapters take in turn."""
    like: list[str] | None = None
    """Instead of rank and targets: adapters of this server whose sizes are taken in turn."""
    targets: str | list[str] | None = None
    """q,k,v,o, attention, mlp, all or any projections; absent: attention."""
    zipf: float | None = None
    """Zipf exponent of their popularity; 0: all equal; absent: 1."""
    device_memory: int | str | None = None
    """Bytes, or text such as 8GiB."""
    host_memory: int | str | None = None
    disk_space: int | str | None = None
    kv_tokens: int | None = None
    """Tokens of KV cache to reserve."""


class TokenizeRequest(Struct, kw_only=True):
    """A body with either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """For a prompt; absent: true."""
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
    """Number of restarts of the engine."""
    running: int
    waiting: int
    checks: dict[str, float] | UnsetType = UNSET
    """Durations in seconds of the parts of a deep check."""
    failure: str | UnsetType = UNSET
    """Why a deep check failed."""
    models: dict[str, HealthReport] | UnsetType = UNSET
    """On a server with an image model: the health of each model, text and image."""


class Liveness(Struct, kw_only=True):
    status: Literal["live"] = "live"


class VersionReport(Struct, kw_only=True):
    version: str


class ReceiptList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class RunRequest(GenerationBody, kw_only=True):
    """A run: the sampling fields of the other routes, and `artifact` or `adapters`."""

    artifact: str | None = None
    """tenant/name with optional @version or @alias, a content id, a name from --lora-modules, or a
    sum of these such as `a+0.3*b`."""
    input: str
    raw: bool | None = None
    """Use the input as the prompt; otherwise it becomes a user message in the chat template."""


class RunAnswer(Struct, kw_only=True):
    id: str
    object: Literal["run"] = "run"
    artifact: str
    """The resolved name with its version; of a sum, all names with their weights."""
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
    """Set in the last chunk."""
    serving: Receipt | UnsetType = UNSET
