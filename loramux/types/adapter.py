"""The description of an adapter that an engine has registered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """A registered adapter: its CID, its folder, and its size and rank in the packed form.

    Its identity is the CID; the engine knows no names.
    """

    cid: str
    path: str
    rank: int
    num_bytes: int
    num_elements: int = 0
    warnings: tuple[str, ...] = ()
