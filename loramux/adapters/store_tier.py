"""What stands behind the local store: a shared cache, a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class RemoteTier(Protocol):
    """Keeps files by key. A tier need not be trusted: the store checks what comes back.

    A key is `blobs/<sha256>` or `records/<digest of a CID>`: lower case, safe as a path. One key
    always has one meaning, so that a put over an existing key may be skipped.
    """

    def has(self, key: str) -> bool: ...

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        """Writes the file; False when the tier has no such key, or more than max_bytes under it."""
        ...

    def put(self, key: str, source: Path) -> None: ...


def blob_key(sha256: str) -> str:
    return f"blobs/{sha256}"


def record_key(digest: str) -> str:
    return f"records/{digest}"
