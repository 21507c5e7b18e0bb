"""Where routers keep the adapters that every replica should have."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import msgspec

from loramux.errors import InvalidRequest
from loramux.types.desired import Desired, DesiredAdapter, DesiredConflict, DesiredState

MAX_GONE = 1000


class DesiredStore(Protocol):
    """Blocks; a registry's DesiredRecords is one."""

    is_shared: bool
    """Whether other routers may write to it."""

    def revision(self) -> int: ...

    def read(self) -> Desired: ...

    def write(self, adapter: DesiredAdapter, *, if_revision: int) -> DesiredAdapter:
        """Record an adapter; raises DesiredConflict if its revision is another one (0: absent)."""
        ...


class MemoryDesired:
    """Ends with its router."""

    is_shared = False

    def __init__(self) -> None:
        self._desired = Desired()

    def revision(self) -> int:
        return self._desired.revision

    def read(self) -> Desired:
        return self._desired

    def write(self, adapter: DesiredAdapter, *, if_revision: int) -> DesiredAdapter:
        self._desired, changed = changed_desired(self._desired, adapter, if_revision)
        return changed


class FileDesired:
    """A file that several routers may share."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """Raise InvalidRequest for a file that cannot be read or written."""
        self._path = path
        try:
            with self._locked():
                self._read()
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"The file {path} of --adapters-file cannot be used: {error}."
            ) from error

    def revision(self) -> int:
        return self._read().revision

    def read(self) -> Desired:
        return self._read()

    def write(self, adapter: DesiredAdapter, *, if_revision: int) -> DesiredAdapter:
        with self._locked():
            desired, changed = changed_desired(self._read(), adapter, if_revision)
            told = {
                "revision": desired.revision,
                "adapters": [asdict(one) for one in desired.adapters.values()],
            }
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with temporary.open("w") as file:
                json.dump(told, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        return changed

    def _read(self) -> Desired:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return Desired()
        told = msgspec.json.decode(text, type=_Stored)
        return Desired(told.revision, {one.name: one for one in told.adapters})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._path.with_name(f"{self._path.name}.lock")
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Stored(msgspec.Struct):
    revision: int
    adapters: list[DesiredAdapter]


def changed_desired(
    desired: Desired, adapter: DesiredAdapter, if_revision: int
) -> tuple[Desired, DesiredAdapter]:
    """Return the adapters after a change; raise DesiredConflict."""
    current = desired.adapters.get(adapter.name)
    if (0 if current is None else current.revision) != if_revision:
        raise DesiredConflict(adapter.name)
    changed = replace(adapter, revision=desired.revision + 1, changed_at=time.time())
    adapters = {**desired.adapters, adapter.name: changed}
    gone = [one for one in adapters.values() if one.state is DesiredState.GONE]
    for one in sorted(gone, key=lambda one: one.revision)[: max(0, len(gone) - MAX_GONE)]:
        del adapters[one.name]
    return Desired(changed.revision, adapters), changed
