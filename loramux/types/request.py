"""Requests to the engine, and the token events and outputs that answer them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from loramux.errors import InvalidRequest
from loramux.types.pooling import ModelPooling, Pooling
from loramux.types.sampling import SamplingParams

# The adapters of a request as (CID, weight) pairs, sorted by CID; empty: the base model.
Selection = tuple[tuple[str, float], ...]
BASE_SELECTION: Selection = ()
_MAX_SEED = 2**63 - 1
NOT_GENERATIVE = (
    "The model generates no text: it has no output head over its vocabulary, and gives embeddings "
    "or scores."
)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Selects an adapter for `LLM.generate` by the path of its PEFT folder."""

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
    """One tokenized prompt with its resolved adapters; it does not change while it runs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    selection: Selection = BASE_SELECTION
    adapter_start: int = 0
    """Position in the prompt from which on the selection acts; tokens before it are the base's.
    The engine sets it for an aLoRA."""
    tenant: str = ""
    """Requests without a tenant share the empty one."""
    tenant_share: float = 1.0
    adapter_share: float = 1.0
    """Shares under fair scheduling; they are unrelated to the weights of the selection."""
    cache_salt: str = ""
    """Requests with different salts never share cached prefixes."""
    timeout_s: float | None = None
    """Limit from arrival to the last token; a request that exceeds it ends with an error."""
    pooling: Pooling | None = None
    """Returns a vector of the prompt; max_tokens is then 0. None: it generates."""
    seed: int = 0
    """Root of the request's randomness. `for_engine` sets it."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the model. `for_engine` sets them."""

    @property
    def cids(self) -> tuple[str, ...]:
        return tuple(cid for cid, _ in self.selection)

    @property
    def num_tokens(self) -> int:
        """Upper bound of the tokens that the request needs: all choices, prompt and answer."""
        return self.params.n * (len(self.prompt_token_ids) + self.params.max_tokens)

    def for_engine(self, eos_token_ids: Sequence[int]) -> Request:
        """Return a copy with the model's end-of-sequence ids and the seed.

        The seed is that of the sampling parameters, or random if they have none.
        """
        seed = self.params.seed
        return msgspec.structs.replace(
            self,
            seed=secrets.randbits(63) if seed is None else seed & _MAX_SEED,
            eos_token_ids=tuple(eos_token_ids),
        )


def pooled_request(
    request_id: str, token_ids: Sequence[int], pooling: Pooling, **fields: Any
) -> Request:
    """Make a request for a vector of a prompt; `fields` are others of Request."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(max_tokens=0, seed=0),
        pooling=pooling,
        **fields,
    )


def check_pooling(request: Request, model: ModelPooling) -> None:
    """Raise InvalidRequest if the model cannot compute what the request asks for."""
    if request.pooling is None:
        if not model.generates:
            raise InvalidRequest(NOT_GENERATIVE, param="model")
        return
    if (request.pooling is Pooling.HEAD) != (model.pooling is Pooling.HEAD):
        raise InvalidRequest(
            "The model has no classification head."
            if request.pooling is Pooling.HEAD
            else "The model is a sequence classifier: it has scores, and no embeddings."
        )
    params = request.params
    if params.max_tokens or params.n != 1 or params.prompt_logprobs is not None:
        raise InvalidRequest("A request with pooling generates no tokens: max_tokens must be 0.")


def find_last(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Return the position of the last occurrence of a run of tokens; None if there is none."""
    size = len(wanted)
    for start in range(len(tokens) - size, -1, -1):
        if tokens[start] == wanted[0] and tuple(tokens[start : start + size]) == tuple(wanted):
            return start
    return None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class RequestFacts(msgspec.Struct, frozen=True, array_like=True):
    """Adapter residency and queueing of a request up to its first token, for its receipt."""

    tier_found: str | None
    """Slowest tier of its adapters at arrival: device, host, disk or source; None: base only."""
    load_s: float
    """Seconds that the loads of its adapters took; 0 if they were resident."""
    queue_depth: int
    """Number of waiting requests at arrival."""
    queue_s: float
    """Seconds from arrival to the first step."""
    num_distinct: int
    """Number of distinct adapters in the batch of its first token."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A new token, or the end, of one choice of a request."""

    request_id: str
    index: int
    """Index of the choice, below the request's n."""
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    error_code: str | None = None
    """timeout: the time limit was exceeded; adapter: an adapter cannot be loaded; memory: the
    request can never fit; numeric: the logits are NaN or infinite; invalid: it was refused after
    its arrival; grammar: its grammar failed."""
    num_reused: int = 0
    """Set in the choice's first event: prompt tokens found in the prefix cache."""
    started_s: float | None = None
    """Set in the choice's first event: time of its first step by the engine's clock."""
    facts: RequestFacts | None = None
    """Set in the request's first event."""
    pooled: bytes | None = None
    """The vector of a request with pooling: little-endian float32. See `vector_of`."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a RequestOutput."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The complete result of one prompt of `LLM.generate`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None = None
    lora_request: LoRARequest | Mapping[LoRARequest, float] | None = None
    selection: Selection = BASE_SELECTION
    pooled: bytes | None = None
    """The vector of a request with pooling; see `vector_of`."""

    @property
    def adapter_cid(self) -> str | None:
        """Returns the CID of the adapter, or of the first one of a sum; None: the base."""
        return self.selection[0][0] if self.selection else None


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt of `LLM.embed`."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
