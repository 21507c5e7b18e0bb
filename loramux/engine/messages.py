"""Messages between the server and the engine process of a language model."""

from __future__ import annotations

from typing import Any

from loramux.backend.host import EngineStats
from loramux.backend.text import ModelCard
from loramux.types.adapter import AdapterCard
from loramux.types.request import Request, TokenEvent
from loramux.worker.messages import (
    Abort,
    Adopt,
    Answer,
    Examine,
    Failed,
    ListUses,
    Message,
    Pin,
    Prewarm,
    Progress,
    Ready,
    Refused,
    Register,
    RegisterMany,
    Remove,
    ResidencyUpdate,
    Shutdown,
    Verify,
)


class Start(Message):
    model: str
    settings: dict[str, Any]
    """Fields of EngineConfig."""


class Add(Message):
    request: Request


class Finish(Message):
    request_id: str
    index: int


class Identify(Message):
    """Reads, hashes, checks and packs an adapter before its first use; answers its card.

    The packed image is kept in host memory, so that the load that follows is a copy.
    """

    call_id: int
    path: str


class ListPages(Message):
    """Asks for the kind of each page's owner."""

    call_id: int


Command = (
    Start
    | Add
    | Abort
    | Finish
    | Register
    | RegisterMany
    | Identify
    | Adopt[AdapterCard]
    | Verify
    | Examine
    | Remove
    | Pin
    | Prewarm
    | ListUses
    | ListPages
    | Shutdown
)


class Events(Message):
    """Token events of one step, and the engine's statistics if an update is due."""

    events: list[TokenEvent]
    stats: EngineStats | None = None
    """`resident_adapters` is empty here: `residency` has the changes."""
    residency: ResidencyUpdate | None = None


Reply = Progress | Ready[ModelCard] | Failed | Events | Refused | Answer[AdapterCard]
