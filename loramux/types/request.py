"""Requests to the engine and the token events and outputs that answer them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from loramux.errors import InvalidRequest
from loramux.types.sampling import SamplingParams

# A request's adapters as (CID, weight), in the order asked for; empty means the base model.
Selection = tuple[tuple[str, float], ...]
BASE_SELECTION: Selection = ()


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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
    tenant_share: float = 1.0
    adapter_share: float = 1.0
    """Shares under fair scheduling; these have nothing to do with the selection's weights."""
    cache_salt: str = ""
    """Requests of different salts never share cached prefixes."""
    timeout_s: float | None = None
    """From arrival to the last token; then the request ends with an error."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


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
