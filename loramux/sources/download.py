"""Downloads one file in parallel parts, and resumes each part after a failure."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.errors import InvalidRequest, SourceChanged, SourceFailed, StoreFull
from loramux.sources.config import FetchLimits
from loramux.sources.content import HEAD_BYTES, check_start
from loramux.sources.origins.base import Origin, RemoteFile
from loramux.sources.refusals import too_large
from loramux.sources.retry import Backoff, Deadline

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOCK_TRIES = 100


@dataclass(slots=True)
class Part:
    """A range of a file that one thread at a time fills from its start."""

    start: int
    end: int | None
    """None if the size of the file is not known."""
    done_bytes: int = 0

    @property
    def position(self) -> int:
        return self.start + self.done_bytes

    @property
    def is_complete(self) -> bool:
        return self.end is not None and self.position >= self.end


class PartialFile:
    def __init__(self, path: Path, state_path: Path, state: dict[str, Any]) -> None:
        self.path = path
        self._state_path = state_path
        self._state = state
        self.parts = read_parts(path, state_path, state)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def start_over(self, part_bytes: int | None, size_bytes: int | None) -> None:
        os.ftruncate(self._descriptor, 0)
        self._state_path.unlink(missing_ok=True)
        self.parts = split_parts(part_bytes, size_bytes)

    def write(self, part: Part, chunk: bytes) -> None:
        view = memoryview(chunk)
        with reporting_full_disk():
            while view:
                num_written = os.pwrite(self._descriptor, view, part.position)
                part.done_bytes += num_written
                view = view[num_written:]

    def rewind(self, part: Part) -> None:
        """Restarts the only part of a file whose origin does not support ranges."""
        os.ftruncate(self._descriptor, part.start)
        part.done_bytes = 0

    def head(self, num_bytes: int) -> bytes:
        return os.pread(self._descriptor, num_bytes, 0)

    def save(self) -> None:
        """Sync the data to disk, then write the state that describes it."""
        if self._state["validator"] is None:
            return
        parts = [[part.start, part.end, part.done_bytes] for part in self.parts]
        with reporting_full_disk():
            os.fdatasync(self._descriptor)
            written = self._state_path.with_suffix(".new")
            written.write_text(json.dumps({**self._state, "parts": parts}))
            written.replace(self._state_path)

    def finish(self) -> None:
        with reporting_full_disk():
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def split_parts(part_bytes: int | None, size_bytes: int | None) -> list[Part]:
    """Split a file into parts; without part_bytes, the file is one part."""
    if part_bytes is None or size_bytes is None:
        return [Part(0, size_bytes)]
    starts = range(0, max(size_bytes, 1), part_bytes)
    return [Part(start, min(start + part_bytes, size_bytes)) for start in starts]


def read_parts(path: Path, state_path: Path, state: dict[str, Any]) -> list[Part]:
    """Return the parts of an earlier attempt at the same content, or none."""
    try:
        found = json.loads(state_path.read_bytes())
        parts = [Part(*entry) for entry in found.pop("parts")]
        has_bytes = path.stat().st_size >= max(part.position for part in parts if part.done_bytes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    is_same = found == state and state["validator"] is not None
    return parts if is_same and has_bytes else []


class Staging:
    """The folder beside the target where a fetch collects its files; one process holds it."""

    def __init__(self, folder: Path) -> None:
        self.target = folder
        self._root = folder.parent / f".{folder.name}.partial"
        self._files = self._root / "files"
        self._states = self._root / "states"

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.target.is_symlink() or (self.target.exists() and any_entry(self.target)):
            raise InvalidRequest(f"{self.target} exists already. Fetch into a new folder.")
        if self._root.is_symlink():
            raise InvalidRequest(f"{self._root} is a link. Remove it.")
        descriptor = self._lock()
        try:
            for folder in (self._files, self._states):
                folder.mkdir(exist_ok=True)
            yield
        finally:
            os.close(descriptor)

    def open(self, name: str, file: RemoteFile, *, source: str) -> PartialFile:
        state = {"source": source, "validator": file.validator, "size_bytes": file.size_bytes}
        return PartialFile(self._files / name, self._states / f"{name}.json", state)

    def path_of(self, name: str) -> Path:
        return self._files / name

    @property
    def has_progress(self) -> bool:
        return self._states.exists() and any_entry(self._states)

    def clear(self) -> None:
        for folder in (self._files, self._states):
            shutil.rmtree(folder)
            folder.mkdir()

    def commit(self, names: frozenset[str]) -> None:
        """Rename the staging folder to the target with exactly these files."""
        for path in self._files.iterdir():
            if path.name not in names:
                path.unlink()
        sync_folder(self._files)
        try:
            self._files.rename(self.target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise InvalidRequest(
                f"{self.target} exists already; another process fetched it first."
            ) from error
        finally:
            self.discard()
        sync_folder(self.target.parent)

    def discard(self) -> None:
        if self._root.exists():
            shutil.rmtree(self._root)

    def _lock(self) -> int:
        for _ in range(LOCK_TRIES):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._root / "lock"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                # Its last holder has just removed the folder.
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                break
            if is_still_at(descriptor, path):
                return descriptor
            os.close(descriptor)
        raise SourceFailed(f"{self.target} is being fetched by another process. Try again later.")


def is_still_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def any_entry(path: Path) -> bool:
    """Return whether the path is a non-empty folder, or not a folder."""
    return not path.is_dir() or next(path.iterdir(), None) is not None


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reporting_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise StoreFull(
            "The disk that adapters are fetched to is full. Make room, or fetch elsewhere."
        ) from error


@dataclass(frozen=True, slots=True)
class Progress:
    received_bytes: int
    """The bytes of all files, including those of an earlier attempt."""
    total_bytes: int | None
    """None if the source does not report it."""


class Meter:
    """Sums the bytes of all threads and serializes the progress reports."""

    def __init__(self, total_bytes: int | None, report: Callable[[Progress], None] | None) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._received_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._received_bytes += num_bytes
            if self._report is not None:
                self._report(Progress(self._received_bytes, self._total_bytes))


class Download:
    def __init__(
        self,
        origin: Origin,
        file: RemoteFile,
        partial: PartialFile,
        *,
        limits: FetchLimits,
        deadline: Deadline,
        meter: Meter,
    ) -> None:
        self._origin = origin
        self._file = file
        self._partial = partial
        self._limits = limits
        self._deadline = deadline
        self._meter = meter
        self._has_stopped = threading.Event()
        self._save_lock = threading.Lock()
        self._is_start_checked = False

    def run(self, *, max_bytes: int) -> None:
        """Download the file; after an exception, a later call resumes it."""
        if not self._partial.parts:
            part_bytes = self._limits.part_bytes if self._file.can_seek else None
            self._partial.start_over(part_bytes, self._file.size_bytes)
        self._meter.add(sum(part.done_bytes for part in self._partial.parts))
        first, *rest = self._partial.parts
        try:
            # The first part comes alone, because its first bytes decide whether to continue.
            self._fill(first, max_bytes)
            if rest:
                self._partial.save()
            self._fill_all([part for part in rest if not part.is_complete], max_bytes)
        finally:
            if any(part.done_bytes for part in self._partial.parts):
                self._partial.save()
        self._partial.finish()

    def _fill_all(self, parts: list[Part], max_bytes: int) -> None:
        if not parts:
            return
        num_workers = min(self._limits.num_workers, len(parts))
        with ThreadPoolExecutor(num_workers, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._fill_or_stop, part, max_bytes) for part in parts]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._has_stopped.set()
                raise

    def _fill_or_stop(self, part: Part, max_bytes: int) -> None:
        if self._has_stopped.is_set():
            return
        try:
            self._fill(part, max_bytes)
        except BaseException:
            self._has_stopped.set()
            raise
        with self._save_lock:
            self._partial.save()

    def _fill(self, part: Part, max_bytes: int) -> None:
        backoff = Backoff(self._deadline, max_attempts=self._limits.max_attempts)
        while not part.is_complete and not self._has_stopped.is_set():
            before_bytes = part.done_bytes
            try:
                if self._read_on(part, max_bytes):
                    return
            except SourceChanged:
                raise
            except SourceFailed as error:
                if part.done_bytes > before_bytes and self._file.can_seek:
                    backoff.reset()
                if not self._file.can_seek:
                    self._meter.add(-part.done_bytes)
                    self._partial.rewind(part)
                backoff.wait(error)

    def _read_on(self, part: Part, max_bytes: int) -> bool:
        """Read until the part is complete; return False if the download was stopped."""
        with self._origin.read(self._file, part.position, part.end) as chunks:
            for chunk in chunks:
                self._deadline.check()
                if self._has_stopped.is_set():
                    return False
                self._take(part, chunk, max_bytes)
                if part.is_complete:
                    return True
        if part.end is not None and not part.is_complete:
            raise SourceFailed(
                f"{self._file.path} broke off after {part.done_bytes} of "
                f"{part.end - part.start} bytes. Try again."
            )
        return True

    def _take(self, part: Part, chunk: bytes, max_bytes: int) -> None:
        if part.end is not None:
            chunk = chunk[: part.end - part.position]
        elif part.position + len(chunk) > max_bytes:
            raise too_large(self._partial.path.name, part.position + len(chunk), max_bytes)
        self._partial.write(part, chunk)
        self._meter.add(len(chunk))
        is_start = part.start == 0 and not self._is_start_checked
        if is_start and (part.done_bytes >= HEAD_BYTES or part.is_complete):
            self._is_start_checked = True
            head = self._partial.head(HEAD_BYTES)
            check_start(self._partial.path.name, head, self._file.size_bytes)
