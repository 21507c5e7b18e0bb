"""Locks between processes that the kernel releases when their holder dies."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StoreLock:
    """Held by one thread of one process at a time, for renames and removals only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        # A descriptor of its own each time, so that threads exclude each other too.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class StagingArea:
    """Folders for work in progress; those of dead processes can be told and are swept."""

    def __init__(self, parent: Path, *, prefix: str, lock: StoreLock) -> None:
        self._parent = parent
        self._prefix = prefix
        self._lock = lock

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Gone after the block, with what is still in it."""
        with self._lock.held():
            path = self._parent / f"{self._prefix}{secrets.token_hex(8)}"
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path)
            os.close(descriptor)

    def sweep(self) -> int:
        """Removes what dead processes left; call it with the lock held."""
        leftovers = [path for path in self._parent.glob(f"{self._prefix}*") if is_abandoned(path)]
        for path in leftovers:
            shutil.rmtree(path)
        return len(leftovers)


def is_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    # Its owner may have removed it since it was opened, and ended.
    return folder.exists()
