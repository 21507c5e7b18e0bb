"""Fetches the files of an adapter from its source into a new folder, all or none."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loramux.errors import LoramuxError, SourceChanged, SourceFailed, SourceNotFound
from loramux.sources.config import FetchLimits, SourceConfig, scrub_error
from loramux.sources.content import check_file, check_sizes, max_bytes_of
from loramux.sources.download import Download, Meter, Progress, Staging, is_still_at
from loramux.sources.origins.base import Origin, RemoteFile, find_adapter
from loramux.sources.origins.bucket import ObjectOrigin
from loramux.sources.origins.http import HttpOrigin
from loramux.sources.origins.hub import HubOrigin
from loramux.sources.origins.local import LocalOrigin
from loramux.sources.retry import SYSTEM_TIMING, Backoff, Deadline, Timing, retrying
from loramux.sources.source_id import SourceId, SourceKind

_log = logging.getLogger(__name__)
# Partial downloads that are not resumed are removed after this time.
ABANDONED_S = 7 * 86_400.0
LOCK_NAME = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    folder: Path
    files: tuple[str, ...]
    revision: str | None
    """The commit, or the ETag of the weights; None if the source has neither."""
    digests: dict[str, str]
    """The SHA-256 of each file."""
    size_bytes: int


class Fetcher:
    """Fetches adapters; several threads may use it."""

    def __init__(self, config: SourceConfig, *, timing: Timing = SYSTEM_TIMING) -> None:
        self._config = config
        self._timing = timing

    def fetch(
        self,
        source: SourceId,
        folder: Path,
        *,
        limits: FetchLimits | None = None,
        progress: Callable[[Progress], None] | None = None,
        expected_sha256: Mapping[str, str] | None = None,
    ) -> Fetched:
        """Fetch a source into a new folder.

        Raises the Source errors, InvalidRequest if the folder exists, and StoreFull. After a
        temporary failure the partial files stay beside the folder, and the next fetch of the same
        source into the same folder resumes them. `progress` may be called in other threads; an
        exception of it ends the fetch.
        """
        used = limits or self._config.limits
        job = FetchJob(
            source=source,
            limits=used,
            deadline=Deadline(used.timeout_s, self._timing),
            progress=progress,
            expected_sha256=expected_sha256 or {},
        )
        staging = Staging(folder)
        try:
            with closing(open_origin(source, self._config, used)) as origin, staging.held():
                return job.run(origin, staging)
        except LoramuxError as error:
            scrub_error(error, self._config.secrets)
            raise


def open_origin(source: SourceId, config: SourceConfig, limits: FetchLimits) -> Origin:
    if source.kind is SourceKind.LOCAL:
        return LocalOrigin(source)
    if source.kind is SourceKind.HUB:
        return HubOrigin(source, config.hub, limits)
    if source.kind is SourceKind.HTTP:
        return HttpOrigin(source, config.http, limits)
    return ObjectOrigin(source, config, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJob:
    source: SourceId
    limits: FetchLimits
    deadline: Deadline
    progress: Callable[[Progress], None] | None
    expected_sha256: Mapping[str, str]

    def run(self, origin: Origin, staging: Staging) -> Fetched:
        try:
            digests = self._fetch_unchanged(origin, staging)
            size_bytes = sum(staging.path_of(name).stat().st_size for name in digests)
            staging.commit(frozenset(digests))
        except BaseException as error:
            if not (staging.has_progress and may_succeed_later(error)):
                staging.discard()
            raise
        _log.info("Fetched %s: %d bytes", self.source, size_bytes)
        return Fetched(
            folder=staging.target,
            files=tuple(digests),
            revision=origin.revision,
            digests=digests,
            size_bytes=size_bytes,
        )

    def _fetch_unchanged(self, origin: Origin, staging: Staging) -> dict[str, str]:
        """Fetch the files, and starts again if the source changes during the fetch."""
        backoff = Backoff(self.deadline, max_attempts=self.limits.max_attempts)
        while True:
            try:
                return self._fetch_files(origin, staging)
            except SourceChanged as error:
                staging.clear()
                backoff.wait(error)

    def _fetch_files(self, origin: Origin, staging: Staging) -> dict[str, str]:
        """Download and check all files in the staging folder; return their SHA-256."""
        files = retrying(
            lambda: find_adapter(self.source, origin),
            self.deadline,
            max_attempts=self.limits.max_attempts,
        )
        self._check_expected(files)
        check_sizes(
            files,
            max_file_bytes=self.limits.max_file_bytes,
            max_total_bytes=self.limits.max_total_bytes,
        )
        sizes = [file.size_bytes for file in files.values()]
        meter = Meter(None if None in sizes else sum(filter(None, sizes)), self.progress)
        left_bytes = self.limits.max_total_bytes
        digests: dict[str, str] = {}
        for name, file in files.items():
            with closing(staging.open(name, file, source=str(self.source))) as partial:
                Download(
                    origin,
                    file,
                    partial,
                    limits=self.limits,
                    deadline=self.deadline,
                    meter=meter,
                ).run(max_bytes=min(left_bytes, max_bytes_of(name, self.limits.max_file_bytes)))
            path = staging.path_of(name)
            left_bytes -= path.stat().st_size
            digests[name] = check_file(path, file, self.expected_sha256.get(name))
        return digests

    def _check_expected(self, files: Mapping[str, RemoteFile]) -> None:
        missing = sorted(set(self.expected_sha256) - set(files))
        if missing:
            raise SourceNotFound(
                f"{self.source} does not have {', '.join(missing)}, for which a digest was given."
            )


def may_succeed_later(error: BaseException) -> bool:
    """Return whether a later attempt may succeed and resume the download."""
    if isinstance(error, SourceFailed):
        return error.is_temporary
    return not isinstance(error, LoramuxError)


@contextmanager
def fetched(
    fetcher: Fetcher,
    source: SourceId,
    area: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Path]:
    """Yield a folder with the files of the source, which exists inside the context."""
    area.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(area, older_than=time.time() - ABANDONED_S)
    with held(area / source.slug) as place, fetching(place, area) as folder:
        yield fetcher.fetch(source, folder / "adapter", progress=progress).folder


@contextmanager
def fetching(place: Path | None, area: Path) -> Iterator[Path]:
    if place is None:
        # Another process fetches the same source now, so this fetch cannot be resumed later.
        with tempfile.TemporaryDirectory(prefix="once-", dir=area) as folder:
            yield Path(folder)
        return
    shutil.rmtree(place / "adapter", ignore_errors=True)
    try:
        yield place
    except BaseException:
        # A fetch that cannot be resumed leaves the lock alone.
        if [entry.name for entry in place.iterdir()] == [LOCK_NAME]:
            shutil.rmtree(place)
        raise
    shutil.rmtree(place)


@contextmanager
def held(place: Path) -> Iterator[Path | None]:
    """Yield the folder, locked for this process, or None if another process has it."""
    place.mkdir(mode=0o700, exist_ok=True)
    path = place / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield place if is_ours(descriptor, path) else None
    finally:
        os.close(descriptor)


def is_ours(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Its last holder may have removed it since it was opened.
    return is_still_at(descriptor, path)


def sweep(area: Path, *, older_than: float) -> None:
    for place in area.iterdir():
        try:
            is_old = place.stat().st_mtime < older_than
        except FileNotFoundError:
            continue
        if is_old:
            with held(place) as free:
                if free is not None:
                    shutil.rmtree(free)
