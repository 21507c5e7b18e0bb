"""Messages between a server and any engine process, and the encoding of errors in them.

An engine adds its own messages and defines the unions of those that it takes and sends.
"""

from __future__ import annotations

import logging
from typing import Any, Generic, TypeVar

import msgspec

from loramux import errors
from loramux.backend.host import AdapterUse, HostCard
from loramux.types.adapter import AdapterCard, CheckLevel, InspectedCard

_log = logging.getLogger(__name__)

CardT = TypeVar("CardT", bound=HostCard)
AdapterT = TypeVar("AdapterT", bound=AdapterCard)


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages; the class name is the tag on the wire."""


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of loramux.errors as its class name and constructor arguments."""

    kind: str
    message: str
    param: str | None = None
    code: str = ""
    fix: str = ""


# Messages to the engine.


class Abort(Message):
    request_id: str


class Register(Message):
    """Checks an adapter's files; the Answer has `adapter`, or `inspected` if its CID is unknown."""

    call_id: int
    path: str
    check: CheckLevel = "full"


class RegisterMany(Message):
    """Checks several adapters; the Answer has a Registration for each, in order."""

    call_id: int
    paths: tuple[str, ...]
    check: CheckLevel = "header"


class Adopt(Message, Generic[AdapterT]):
    """Makes an adapter known by the card that an earlier engine process gave it.

    No file is read. A load reads and checks the files, and refuses bytes of another CID.
    """

    card: AdapterT


class Verify(Message):
    """Reads a registered adapter again from its files, as a cold load does."""

    call_id: int
    cid: str


class Examine(Message):
    """Reads an adapter for a report; the Answer has `report`, also of a refused adapter."""

    call_id: int
    path: str


class Remove(Message):
    """Frees an adapter once no request uses it."""

    cid: str


class Pin(Message):
    call_id: int
    cid: str
    is_pinned: bool


class Prewarm(Message):
    """Loads these adapters, then the busiest of earlier runs, while there is free memory."""

    cids: tuple[str, ...] = ()
    num_busiest: int = 0


class ListUses(Message):
    call_id: int


class Shutdown(Message):
    pass


# Messages from the engine.


class Progress(Message):
    what: str
    share: float


class Ready(Message, Generic[CardT]):
    """The engine accepts requests."""

    card: CardT


class Failed(Message):
    """The engine cannot start."""

    error: WireError


class ResidencyUpdate(msgspec.Struct, frozen=True, array_like=True):
    """The tiers of the adapters that moved since the last update."""

    tiers: tuple[tuple[str, int], ...]
    """By CID; 0: no tier has it."""
    is_full: bool
    """If true, `tiers` replaces all earlier ones."""


class Refused(Message):
    request_id: str
    error: WireError


class Registration(msgspec.Struct, Generic[AdapterT], frozen=True, kw_only=True):
    """The result for one adapter of RegisterMany; exactly one field is set."""

    adapter: AdapterT | None = None
    inspected: InspectedCard | None = None
    """Set instead of `adapter` if the CID is not known before the weights are read."""
    error: WireError | None = None


class Answer(Message, Generic[AdapterT]):
    """Answers each command that has a call id."""

    call_id: int
    adapter: AdapterT | None = None
    inspected: InspectedCard | None = None
    registrations: list[Registration[AdapterT]] | None = None
    uses: list[AdapterUse] | None = None
    pages: bytes | None = None
    report: dict[str, Any] | None = None
    error: WireError | None = None


def encode_error(error: Exception) -> WireError:
    """Errors of other kinds are logged, and clients do not see their text."""
    if not isinstance(error, errors.LoramuxError):
        _log.error("the engine failed", exc_info=error)
        known = errors.machine_error(error) if isinstance(error, OSError) else None
        error = known or errors.LoramuxError("The engine failed on this; its log has the reason.")
    kind, message = type(error).__name__, str(error)
    if isinstance(error, errors.AdapterRefused):
        return WireError(kind=kind, message=error.reason, code=error.code, fix=error.fix)
    param = error.param if isinstance(error, errors.InvalidRequest) else None
    return WireError(kind=kind, message=message, param=param)


def decode_error(error: WireError) -> errors.LoramuxError:
    if error.kind == "AdapterRefused":
        return errors.AdapterRefused(error.code, error.message, fix=error.fix)
    if error.kind == "InvalidRequest":
        return errors.InvalidRequest(error.message, param=error.param)
    made = getattr(errors, error.kind, errors.LoramuxError)(error.message)
    assert isinstance(made, errors.LoramuxError)
    return made
