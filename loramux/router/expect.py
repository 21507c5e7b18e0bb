"""What the routers' record allows to answer a request, which its server checks.

A server may still have, or get by a request that was delayed, a version that was replaced or
undone. Each request names the contents that are right by the record, and a server where a name
means another one refuses it. A router acts on a record of at most FRESH_S, and a change is told to
its client after that time, when no router can act on the record of before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from loramux.router.fleet import Replica
from loramux.types.desired import Desired, DesiredAdapter, DesiredState
from loramux.types.expected import OTHER_CONTENT_STATUS, Expected, expected_text

FRESH_S = 0.5
"""The age of the record up to which a router acts on it."""


class Record(Protocol):
    """The desired adapters as one router knows them."""

    async def fresh(self) -> Desired:
        """Return the record, no older than FRESH_S unless its store is away."""
        ...

    async def refresh(self) -> Desired:
        """Read the record again if it has changed."""
        ...

    def distrust(self, replica: Replica, names: frozenset[str]) -> None:
        """Send a replica no requests for these names until it was brought to the record."""
        ...


@dataclass(slots=True)
class Expectation:
    """The contents that may answer one request."""

    record: Record | None = None
    names: frozenset[str] = frozenset()
    """All that the request may name."""
    desired: Desired = field(default_factory=Desired)
    allowed: Expected = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read(self.desired)

    @property
    def header(self) -> str:
        return expected_text(self.allowed)

    @property
    def is_wanted(self) -> bool:
        """Whether an adapter that it names is served, so that a replica without it lacks it."""
        adapters = self.desired.adapters
        return any(name in adapters and _is_served(adapters[name]) for name in self.names)

    def may_change(self, status: int) -> bool:
        """Whether a replica, or the record as it was read, may be behind in what it says."""
        is_unknown = status == 404 and self.record is not None and not self.is_wanted
        return is_unknown or self.is_other_content(status)

    def is_other_content(self, status: int) -> bool:
        return bool(self.allowed) and status == OTHER_CONTENT_STATUS

    async def renew(self, replica: Replica, status: int) -> bool:
        """Read the record after a refusal; returns whether other contents are allowed now."""
        assert self.record is not None
        before = self.allowed
        self._read(await self.record.refresh())
        if self.allowed == before and self.is_other_content(status):
            self.record.distrust(replica, frozenset(before))
        return self.allowed != before

    def _read(self, desired: Desired) -> None:
        self.desired = desired
        found = {
            name: contents_of(desired.adapters[name])
            for name in self.names
            if name in desired.adapters
        }
        self.allowed = {name: cids for name, cids in found.items() if cids is not None}


async def expectation_of(record: Record, names: frozenset[str]) -> Expectation:
    return Expectation(record, names, await record.fresh()) if names else Expectation()


def contents_of(one: DesiredAdapter) -> frozenset[str] | None:
    """Return the CIDs that may answer to an adapter; None: any, as none was recorded."""
    if not _is_served(one):
        # What is loaded for the first time is seen once it is on all servers.
        return frozenset()
    return frozenset(filter(None, (one.cid, one.previous_cid))) or None


def _is_served(one: DesiredAdapter) -> bool:
    is_changed = one.state is DesiredState.CHANGING and bool(one.previous_source)
    return one.state is DesiredState.WANTED or is_changed
