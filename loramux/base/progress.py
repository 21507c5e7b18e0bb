"""The interface for reporting the progress of transfers, and the text of a size."""

from __future__ import annotations

from typing import Protocol


class ByteSink(Protocol):
    """Receives the number of bytes as they are transferred."""

    def begin(self, what: str, total_bytes: int | None) -> None:
        """Start a transfer; `total_bytes` is None if its size is not known."""
        ...

    def add(self, num_bytes: int) -> None:
        """Add bytes to the transfer that was started last."""
        ...


class SilentSink:
    """A sink that ignores its input."""

    def begin(self, what: str, total_bytes: int | None) -> None:
        pass

    def add(self, num_bytes: int) -> None:
        pass


SILENT = SilentSink()


def size_text(num_bytes: int) -> str:
    """Return a size in its largest unit: 1.5 GiB."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}" if unit != "bytes" else f"{num_bytes} bytes"
