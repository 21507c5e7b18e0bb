"""Bytes on their way, told to whoever shows them."""

from __future__ import annotations

from typing import Protocol


class ByteSink(Protocol):
    def begin(self, what: str, total_bytes: int | None) -> None:
        """The bytes that follow belong to this; None: nobody knows how many."""
        ...

    def add(self, num_bytes: int) -> None: ...


class SilentSink:
    def begin(self, what: str, total_bytes: int | None) -> None:
        pass

    def add(self, num_bytes: int) -> None:
        pass


SILENT = SilentSink()
