"""What stands behind the local store: a shared cache, a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loramux.backend import StoreTierStats


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


class CountedTier:
    """A tier that knows how often it had what was asked for."""

    def __init__(self, name: str, tier: FailingTier) -> None:
        self._name = name
        self._tier = tier
        self._num_hits = 0
        self._num_misses = 0

    @property
    def stats(self) -> StoreTierStats:
        return StoreTierStats(
            tier=self._name,
            hits=self._num_hits,
            misses=self._num_misses,
            failures=self._tier.num_failures,
        )

    def __repr__(self) -> str:
        return repr(self._tier)

    def has(self, key: str) -> bool:
        return self._tier.has(key)

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        is_hit = self._tier.get(key, destination, max_bytes=max_bytes)
        self._num_hits += is_hit
        self._num_misses += not is_hit
        return is_hit

    def put(self, key: str, source: Path) -> None:
        self._tier.put(key, source)


class FailingTier(RemoteTier, Protocol):
    @property
    def num_failures(self) -> int: ...


def blob_key(sha256: str) -> str:
    return f"blobs/{sha256}"


def record_key(digest: str) -> str:
    return f"records/{digest}"
