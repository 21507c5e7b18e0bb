"""What the server and the engine process say to each other, and how errors cross over."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux import errors
from loramux.backend import AdapterUse, TierStats
from loramux.types.model import BaseModelInfo
from loramux.types.request import Request, TokenEvent


class Message(msgspec.Struct, tag=True, kw_only=True):
    pass


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    cid: str
    path: str
    rank: int
    num_bytes: int
    warnings: tuple[str, ...]


class ErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An error of loramux.errors, by class name and the arguments that make it again."""

    kind: str
    message: str
    param: str | None = None
    code: str = ""
    fix: str = ""


# To the engine.


class Start(Message):
    model: str
    settings: dict[str, Any]
    """Fields of EngineConfig."""


class Add(Message):
    request: Request


class Abort(Message):
    request_id: str


class Finish(Message):
    request_id: str
    index: int


class Register(Message):
    call_id: int
    path: str


class Verify(Message):
    """Read a known adapter again from its folder, as a load from cold would."""

    call_id: int
    cid: str


class Forget(Message):
    """Free what an adapter holds, once no sequence uses it."""

    cid: str


class Pin(Message):
    call_id: int
    cid: str
    is_pinned: bool


class Prewarm(Message):
    """Load these while there is room, and then the busiest of earlier runs."""

    cids: tuple[str, ...] = ()
    num_busiest: int = 0


class ListUses(Message):
    call_id: int


class Shutdown(Message):
    pass


Command = (
    Start | Add | Abort | Finish | Register | Verify | Forget | Pin | Prewarm | ListUses | Shutdown
)

# From the engine.


class Progress(Message):
    what: str
    share: float


class Ready(Message):
    name: str
    path: str
    folder: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    pool_bytes: int
    block_tokens: int = 16
    shapes: BaseModelInfo | None = None
    max_loras: int | None = None


class Failed(Message):
    """The engine could not start."""

    error: ErrorFacts


class Heartbeat(Message):
    step_age_s: float
    """How long the step now running has taken; 0 when idle."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_idle_pages: int
    num_preemptions: int
    num_adapter_loads: int
    num_adapter_evictions: int
    num_steps: int
    resident_adapters: tuple[str, ...]
    running_adapters: dict[str, int]
    waiting_adapters: dict[str, int]
    tiers: tuple[TierStats, ...]
    prefix_query_tokens: int
    prefix_hit_tokens: int
    step_loss_s: dict[str, int]
    step_loss_sum_s: float


class Events(Message):
    events: list[TokenEvent]
    snapshot: Snapshot


class Refused(Message):
    request_id: str
    error: ErrorFacts


class Answer(Message):
    """To Register, Verify, Pin or ListUses."""

    call_id: int
    adapter: AdapterFacts | None = None
    uses: list[AdapterUse] | None = None
    error: ErrorFacts | None = None


Reply = Progress | Ready | Failed | Heartbeat | Events | Refused | Answer


def describe_error(error: Exception) -> ErrorFacts:
    kind = type(error).__name__ if isinstance(error, errors.LoramuxError) else "LoramuxError"
    message = str(error) if isinstance(error, errors.LoramuxError) else repr(error)
    if isinstance(error, errors.AdapterRefused):
        return ErrorFacts(kind=kind, message=error.reason, code=error.code, fix=error.fix)
    param = error.param if isinstance(error, errors.InvalidRequest) else None
    return ErrorFacts(kind=kind, message=message, param=param)


def make_error(facts: ErrorFacts) -> errors.LoramuxError:
    if facts.kind == "AdapterRefused":
        return errors.AdapterRefused(facts.code, facts.message, fix=facts.fix)
    if facts.kind == "InvalidRequest":
        return errors.InvalidRequest(facts.message, param=facts.param)
    kind = getattr(errors, facts.kind, errors.LoramuxError)
    made = kind(facts.message)
    assert isinstance(made, errors.LoramuxError)
    return made
