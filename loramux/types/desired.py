"""The adapters that every server of a fleet should have, as its routers record them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DesiredState(StrEnum):
    WANTED = "wanted"
    CHANGING = "changing"
    """A router loads it; should that router end, the one before is wanted again."""
    GONE = "gone"
    """It was unloaded, and a server that still has it unloads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredAdapter:
    name: str
    state: DesiredState
    source: str = ""
    cid: str = ""
    """What the servers found in the source when it was loaded."""
    previous_source: str = ""
    """What is wanted if a change fails; empty: nothing."""
    previous_cid: str = ""
    revision: int = 0
    changed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Desired:
    """All of them at one revision."""

    revision: int = 0
    adapters: Mapping[str, DesiredAdapter] = field(default_factory=dict)


class DesiredConflict(Exception):
    """Another router has changed the adapter meanwhile."""
