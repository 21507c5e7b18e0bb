"""Counts what the forwards of the denoiser had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loramux.types.request import Selection


@dataclass(slots=True)
class ForwardCounts:
    """How often a forward had a number of rows, and a number of distinct adapters."""

    rows: Counter[int] = field(default_factory=Counter)
    adapters: Counter[int] = field(default_factory=Counter)

    def add(self, selections: Sequence[Selection]) -> None:
        """Count a forward by the selections of its rows."""
        self.rows[len(selections)] += 1
        self.adapters[len({cid for selection in selections for cid, _ in selection})] += 1
