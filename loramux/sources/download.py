"""One file from an origin: in parts side by side, each gone on with where it broke off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loramux.errors import SourceFailed
from loramux.sources.config import FetchLimits
from loramux.sources.content import HEAD_BYTES, check_start
from loramux.sources.origins.base import Origin, RemoteFile, SourceChanged
from loramux.sources.partial import Part, PartialFile
from loramux.sources.refusals import too_large
from loramux.sources.retry import Backoff, Deadline


@dataclass(frozen=True, slots=True)
class Progress:
    received_bytes: int
    """Of all files, with what an earlier try had left."""
    total_bytes: int | None
    """None: the source does not say."""


class Meter:
    """Reports one at a time, whichever thread the bytes came from."""

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
        """What is there when this raises can be gone on with."""
        if not self._partial.parts:
            part_bytes = self._limits.part_bytes if self._file.can_seek else None
            self._partial.start_over(part_bytes, self._file.size_bytes)
        self._meter.add(sum(part.done_bytes for part in self._partial.parts))
        first, *rest = self._partial.parts
        try:
            # Alone, since its first bytes tell whether the others are wanted.
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
        """True: the part is whole; False: it was told to stop."""
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
