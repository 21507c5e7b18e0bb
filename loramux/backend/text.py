"""The interface between the server and an engine of a language model. It imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loramux.backend.host import AdapterHost, HostCard
from loramux.errors import (
    AdapterRefused,
    DoesNotFit,
    InvalidRequest,
    LoramuxError,
    RequestTimeout,
)
from loramux.types.model import BaseModelInfo, PackingKind
from loramux.types.pooling import ModelPooling
from loramux.types.request import FinishReason, Request, RequestFacts, Selection, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard(HostCard):
    """Describes a language model."""

    max_model_len: int
    vocab_size: int
    max_batch_tokens: int = 512
    tokenizer_folder: str = ""
    eos_token_ids: tuple[int, ...] = ()
    block_tokens: int = 16
    """Tokens of one KV page."""
    kv_cache_dtype: str = ""
    """Empty: that of the weights."""
    shapes: BaseModelInfo | None = None
    packing: PackingKind = "dense"
    """The layout of adapters on the device."""
    kept_formats: tuple[str, ...] = ()
    """Formats other than floating point in which weights of layers are kept."""
    pooling: ModelPooling = ModelPooling()
    compiles_kernels: bool = False
    """Whether steps are slower at first, until CPU kernels have been compiled."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one choice of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token; None for an end-of-sequence token."""
    stop_hit: bool = False
    """A stop string ended the choice, and the scheduler has not been told yet."""
    error: str | None = None
    error_code: str | None = None
    """One of TokenEvent's error codes."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Set in the choice's first delta if requested; the first prompt token has none."""
    num_reused: int | None = None
    """Set in the choice's first delta: prompt tokens found in the prefix cache."""
    facts: RequestFacts | None = None
    """Set in the request's first delta."""
    pooled: bytes | None = None
    """The vector of a request with pooling; see `vector_of`."""


def failure_of(delta: Delta) -> LoramuxError:
    """Return the error to raise for a choice that ended with FinishReason.ERROR."""
    message = delta.error or "The engine failed on this request."
    match delta.error_code:
        case "timeout":
            return RequestTimeout(message)
        case "adapter":
            return AdapterRefused("adapter_unavailable", message)
        case "numeric":
            return AdapterRefused("numeric", message)
        case "memory":
            return DoesNotFit(message)
        case "invalid":
            return InvalidRequest(message)
    return LoramuxError(message)


class TextCodec(Protocol):
    """The part of the tokenizer that a server uses."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool = True
    ) -> list[int]: ...

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


class TextBackend(AdapterHost, Protocol):
    """An adapter host that generates text."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def codec(self) -> TextCodec:
        """The tokenizer of the base."""
        ...

    async def page_kinds(self) -> bytes:
        """Return a letter for each page of the pool, in the order of their addresses.

        k: KV of a sequence; p: cached prefix; a: adapter; ".": free.
        """
        ...

    async def codec_for(self, selection: Selection) -> TextCodec:
        """Return the tokenizer of a selection: the adapter's own if it has one, else the base's.

        Raises AdapterNotFound, or AdapterRefused for a tokenizer that does not fit the base.
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the deltas of all choices until each has its finish_reason.

        The backend sets the request's seed and end-of-sequence ids. Closing the iterator early
        aborts the request. Raises InvalidRequest, DoesNotFit, AdapterNotFound, AdapterRefused (it
        cannot be loaded), EngineBusy (queue full), RequestTimeout or EngineStopped (the engine
        died: the answer is not complete).
        """
        ...
