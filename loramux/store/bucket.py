"""The remote tier that keeps adapters in a bucket of S3, Google Cloud or Azure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loramux.base.progress import SILENT, ByteSink
from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound
from loramux.sources.config import SourceConfig
from loramux.sources.origins.base import CHUNK_BYTES
from loramux.sources.origins.bucket import open_store, store_errors, translated
from loramux.sources.parse import parse_bucket_url
from loramux.sources.retry import SYSTEM_TIMING, Deadline, Timing, retrying

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    size_bytes: int
    modified_at: float
    """Seconds since 1970 by the clock of the bucket."""


class ObjectTier:
    """A RemoteTier in a bucket.

    A bucket that cannot be reached raises an error, while an absent key does not: otherwise a push
    would seem to be stored, or an adapter to be missing.
    """

    def __init__(
        self,
        url: str,
        config: SourceConfig,
        *,
        timing: Timing = SYSTEM_TIMING,
        sink: ByteSink = SILENT,
    ) -> None:
        """Take a URL such as `s3://bucket/folder`, `gs://…` or `az://…`."""
        place = parse_bucket_url(url)
        self._prefix = place.folder
        self._bucket = f"{place.kind}://{place.place}"
        self._limits = config.limits
        self._timing = timing
        self._sink = sink
        self._store = open_store(place.kind, place.place, config, config.limits)
        self.num_failures = 0

    def __repr__(self) -> str:
        return f"ObjectTier({'/'.join((self._bucket, *self._prefix))})"

    def has(self, key: str) -> bool:
        import obstore

        def look() -> bool:
            with store_errors(self._show(key)):
                obstore.head(self._store, self._path(key))
            return True

        try:
            return self._retrying(look)
        except SourceNotFound:
            return False

    def get(self, key: str, destination: Path, *, max_bytes: int) -> bool:
        """Download an object; return False if it is absent or larger than max_bytes."""
        try:
            return self._retrying(lambda: self._download(key, destination, max_bytes))
        except SourceNotFound:
            return False

    def put(self, key: str, source: Path) -> None:
        import obstore

        def upload() -> bool:
            size = source.stat().st_size
            self._sink.begin(f"Uploading to {self._bucket}", size)
            with store_errors(self._show(key)):
                obstore.put(self._store, self._path(key), source)
            self._sink.add(size)
            return True

        self._retrying(upload)

    def objects(self) -> list[StoredObject]:
        """List all objects in the folder, also those that other programs wrote."""
        import obstore

        folder = "/".join(self._prefix)
        num_skipped = len(folder) + 1 if folder else 0

        def look() -> list[StoredObject]:
            with store_errors(self._show("")):
                pages = list(obstore.list(self._store, folder or None, chunk_size=1000))
            return [
                StoredObject(
                    found["path"][num_skipped:], found["size"], found["last_modified"].timestamp()
                )
                for page in pages
                for found in page
            ]

        return self._retrying(look)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; keys that do not exist are ignored."""
        import obstore

        def remove() -> None:
            with store_errors(self._show("")):
                obstore.delete(self._store, [self._path(key) for key in keys])

        if keys:
            self._retrying(remove)

    def _download(self, key: str, destination: Path, max_bytes: int) -> bool:
        import obstore

        what = self._show(key)
        with store_errors(what):
            found = obstore.get(self._store, self._path(key))
        left_bytes = found.meta["size"]
        if left_bytes > max_bytes:
            return False
        self._sink.begin(f"Downloading from {self._bucket}", left_bytes)
        with destination.open("wb") as writer:
            for chunk in translated(found.stream(min_chunk_size=CHUNK_BYTES), what):
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    break
                writer.write(chunk)
                self._sink.add(len(chunk))
        if left_bytes != 0:
            raise SourceFailed(f"{what} has a different size than its bucket reports. Try again.")
        return True

    def _retrying(self, action: Callable[[], T]) -> T:
        deadline = Deadline(self._limits.timeout_s, self._timing)
        try:
            return retrying(action, deadline, max_attempts=self._limits.max_attempts)
        except (SourceFailed, SourceForbidden):
            self.num_failures += 1
            raise

    def _path(self, key: str) -> str:
        return "/".join((*self._prefix, key))

    def _show(self, key: str) -> str:
        return f"{self._bucket}/{self._path(key)}"
