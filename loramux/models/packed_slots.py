"""Slots that take the parts of a quantised module instead of its dequantised weight."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from loramux.models.quantised.checkpoint import PackedRead


@runtime_checkable
class PackedSlot(Protocol):
    """The destination of a weight that is kept in the format of the checkpoint."""

    def fill_packed(self, read: PackedRead) -> None:
        """Copy codes and scales; raise UnsupportedModel if they do not fit."""
        ...
