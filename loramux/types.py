"""What the layers hand to each other, without torch. What may cross a process is a struct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from loramux.errors import InvalidRequest

# A request's adapters as (CID, weight), in the order asked for; empty means the base model.
Selection = tuple[tuple[str, float], ...]
BASE_SELECTION: Selection = ()

MAX_LOGPROBS = 64
MAX_CHOICES = 128


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Greedy when temperature is 0."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report beside each sampled token; 0: the sampled token alone."""
    prompt_logprobs: int | None = None
    """The same for every prompt token; what `echo` with `logprobs` needs."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name, value, allowed, says in self._limits():
            if not allowed:
                raise InvalidRequest(f"{name} must be {says}, got {value!r}.", param=name)

    def _limits(self) -> list[tuple[str, object, bool, str]]:
        return [
            ("n", self.n, 1 <= self.n <= MAX_CHOICES, f"between 1 and {MAX_CHOICES}"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, self.top_k >= -1, "-1, 0 (no limit) or a positive number"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "over 0",
            ),
            *(
                (name, value, -2 <= value <= 2, "in [-2, 2]")
                for name, value in (
                    ("frequency_penalty", self.frequency_penalty),
                    ("presence_penalty", self.presence_penalty),
                )
            ),
            (
                "logit_bias",
                self.logit_bias,
                all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
                "numbers in [-100, 100]",
            ),
            ("stop", self.stop, all(self.stop), "strings that are not empty"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 0, "0 or more"),
            *(
                (name, value, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
                for name, value in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
        ]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Names an adapter for `LLM.generate`: which one, and where its PEFT folder is."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise InvalidRequest("lora_name must not be empty.", param="lora_name")
        if self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id must be 1 or more (0 stands for the base), got {self.lora_int_id}.",
                param="lora_int_id",
            )
        if not self.lora_path:
            raise InvalidRequest(
                "lora_path must not be empty: give the folder that holds adapter_config.json.",
                param="lora_path",
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, tokenized and resolved; nothing in it changes while it runs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    selection: Selection = BASE_SELECTION
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Root of the request's randomness: params.seed, or drawn at arrival."""
    tenant: str = ""
    """Whose share of the machine it uses; the empty one is shared by all who gave no name."""
    tenant_weight: float = 1.0
    adapter_weight: float = 1.0
    """Shares under fair scheduling; these have nothing to do with the selection's weights."""
    cache_salt: str = ""
    """Requests of different salts never share cached prefixes."""
    timeout_s: float | None = None
    """From arrival to the last token; then the request ends with an error."""


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A linear layer of the base that an adapter may change."""

    path: str
    """As in the checkpoint: model.layers.3.self_attn.q_proj"""
    layer: int
    projection: str
    """q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj"""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What the adapter doctor must know of a base, without its weights."""

    name: str
    architecture: str
    num_layers: int
    targets: tuple[TargetModule, ...]


# Every step makes hundreds of chunks. A struct is made ten times as fast as a frozen dataclass,
# and none of these is ever part of a cycle.
class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """How to choose the token that follows a chunk."""

    params: SamplingParams
    seed: int
    """Already mixed with the choice index; the step's noise is a function of it and num_output."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


UNKNOWN_TOKEN = -1
"""The place of a token that a step still on the device will give."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The rows that one sequence adds to a step."""

    sequence_id: int
    token_ids: Sequence[int]
    """The last may be unknown: it is what the step before this one samples for the sequence."""
    start: int
    """Position of the first token."""
    page_ids: Sequence[int]
    """KV pages of the whole sequence so far, in order, this chunk's tokens included."""
    selection: Selection
    sample: SampleRow | None
    """None: the prompt goes on in a later step."""
    prompt_logprobs: int | None = None
    next_prompt_token_ids: Sequence[int] = ()
    """With prompt_logprobs: the token that follows each row (one fewer at the prompt's end)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class StepResult:
    token_ids: dict[int, int]
    """sequence_id -> sampled token, for each chunk that had a sample row."""
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class RequestFacts(msgspec.Struct, frozen=True, array_like=True):
    """How a request came to its first token; for its receipt."""

    tier_found: str | None
    """Where the slowest of its adapters was at arrival: device, host, disk, source; None: base."""
    load_s: float
    """Seconds that its adapters' loads took; 0 when they were there."""
    queue_depth: int
    """Requests that waited when it came."""
    queue_s: float
    """From arrival to a place in the batch."""
    num_distinct: int
    """Adapters in the batch of its first token."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One more token, or the end, of one choice of a request."""

    request_id: str
    index: int
    """Which of the request's n choices."""
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    error_code: str | None = None
    """timeout: its time is up; adapter: one cannot be loaded; memory: no room will ever come."""
    num_reused: int = 0
    """With the choice's first event: prompt tokens that came from the prefix cache."""
    started_s: float | None = None
    """With the choice's first event: when it got its place, by the engine's clock."""
    facts: RequestFacts | None = None
    """With the request's first event."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None = None
    lora_request: LoRARequest | None = None
    adapter_cid: str | None = None
