"""Answers with their receipt under `serving`, which OpenAI's clients pass over."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.receipts.receipt import Receipt
from loramux.server.wire import ChatChunk, ChatCompletion, Completion, GenerationRequest, Usage


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


class RunRequest(GenerationRequest, kw_only=True):
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
