"""One HTTP request on its way through the server: its caller, and what its answer tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from loramux.errors import EngineBusy, LoramuxError
from loramux.server.errors import ErrorShape, error_response
from loramux.types.caller import ANONYMOUS, UNKNOWN, Caller
from loramux.types.residency import Tier

if TYPE_CHECKING:
    from loramux.server.http.table import Entry

_FACTS = "loramux.call"


class Bodies:
    """The memory of all bodies that arrive now; small ones are always accepted."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self._left:
            raise EngineBusy(
                "The server receives too many large bodies: send smaller ones, or try again later."
            )
        self._left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._left += num_bytes


@dataclass(slots=True)
class CallFacts:
    """What middleware and handlers tell each other about one request."""

    bodies: Bodies
    request_id: str | None = None
    from_trusted_proxy: bool = False
    caller: Caller | LoramuxError = ANONYMOUS
    """The error of an invalid key or tenant header on an open route."""
    entry: Entry | None = None
    """The route; None: the server has none for the path and the method."""
    shape: ErrorShape = error_response
    """Errors have the shape of the API that was called."""
    body: bytes | None = None
    """Read, or put in the place of what the client sent."""
    body_bytes: int = 0
    """Size of the body that was read."""
    receipt_id: str | None = None
    tiers: Sequence[tuple[str, Tier]] | None = None
    """CIDs of the adapters that answer, with the tiers in which they were found."""
    limits: Callable[[], Mapping[str, str]] | None = None
    """Returns the headers that tell what is left of the caller's limits."""
    tool_notes: str | None = None
    """Why the schemas of tools are enforced in part only."""
    warnings: list[str] = field(default_factory=list)
    """What of the request was not followed, or may not be meant."""


NO_LIMIT = Bodies(2**63)


def begin_call(scope: Scope, bodies: Bodies) -> None:
    """Begin the facts of a request that enters the server."""
    scope[_FACTS] = CallFacts(bodies)


def facts_of(scope: Scope) -> CallFacts:
    facts: CallFacts | None = scope.get(_FACTS)
    if facts is None:
        begin_call(scope, NO_LIMIT)
        facts = scope[_FACTS]
    return facts


class Call(Request):
    """A request as handlers get it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.facts = facts_of(scope)

    @property
    def caller(self) -> Caller:
        """The caller; raises the error of its key or tenant header on open routes."""
        caller = self.facts.caller
        if isinstance(caller, Caller):
            return caller
        raise caller

    @property
    def known_caller(self) -> Caller:
        """The caller, or one without rights if its key or tenant header is invalid."""
        caller = self.facts.caller
        return caller if isinstance(caller, Caller) else UNKNOWN

    def warn(self, text: str) -> None:
        """Add a warning to the headers of the answer, also of a stream."""
        if text not in self.facts.warnings:
            self.facts.warnings.append(text)
