"""Crash-safe file operations, the folder layout of the store, its lock and its staging area."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loramux.adapters.identity import CID_PREFIX, FileDigest, is_digest, parse_cid
from loramux.base.private_files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    make_private_folder,
    private_opener,
)
from loramux.base.progress import SILENT, ByteSink
from loramux.errors import AdapterRefused, StoreDamaged, StoreFull
from loramux.store.record import Record, decode_record

CHUNK_BYTES = 2**20
READ_ONLY = 0o400
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Errors of file systems that cannot hard-link, or that reached the limit of links of a file.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


def copy_hashed(
    source: Path, destination: Path, *, max_bytes: int, sink: ByteSink = SILENT
) -> FileDigest:
    """Copy a file and return the digest of the written bytes, which are synced to disk."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, reporting_full_disk(), _create(destination) as writer:
        while chunk := reader.read(CHUNK_BYTES):
            size += len(chunk)
            if size > max_bytes:
                raise too_large(source.name, max_bytes)
            digest.update(chunk)
            writer.write(chunk)
            sink.add(len(chunk))
        seal(writer.fileno())
    return FileDigest(digest.hexdigest(), size)


def write_file(destination: Path, content: bytes) -> None:
    with reporting_full_disk(), _create(destination) as writer:
        writer.write(content)
        writer.flush()
        seal(writer.fileno())


def _create(path: Path) -> BinaryIO:
    return open(path, "xb", opener=private_opener)  # noqa: SIM115


def seal(descriptor: int) -> None:
    """Make a file read-only, because many folders may link to it, and syncs it to disk."""
    os.fchmod(descriptor, READ_ONLY)
    os.fsync(descriptor)


def hash_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(digest.hexdigest(), os.fstat(file.fileno()).st_size)


def sync_folder(folder: Path) -> None:
    """Sync the folder's entries to disk: renames into it and removals from it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        make_private_folder(folder)
        sync_folder(folder.parent)


def move_into_place(source: Path, destination: Path) -> None:
    make_folder(destination.parent)
    source.replace(destination)
    sync_folder(destination.parent)


def link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with reporting_full_disk():
            shutil.copyfile(source, destination)


def too_large(name: str, max_bytes: int) -> AdapterRefused:
    return AdapterRefused(
        "too_large",
        f"{name} is larger than {max_bytes} bytes.",
        fix="Save the adapter in a smaller dtype or rank, or raise the store's limit.",
    )


@contextmanager
def reporting_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise StoreFull(
            "The disk of the adapter store is full. Remove versions and run gc, or make room."
        ) from error


class StoreLayout:
    """The paths inside a store.

    blobs/ab/<sha256>, records/<digest>, views/<digest>/<file>, staging/<work in progress>.
    """

    def __init__(self, root: Path) -> None:
        self.lock = root / "lock"
        self.blobs = root / "blobs"
        self.records = root / "records"
        self.views = root / "views"
        self.staging = root / "staging"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.blobs, self.records, self.views, self.staging)

    def blob(self, digest: FileDigest) -> Path:
        return self.blobs / digest.sha256[:2] / digest.sha256

    def record(self, cid: str) -> Path:
        return self.records / parse_cid(cid)

    def view(self, cid: str) -> Path:
        return self.views / parse_cid(cid)

    def all_blobs(self) -> Iterator[Path]:
        return self.blobs.glob("*/*")

    def cids(self) -> list[str]:
        return sorted(CID_PREFIX + path.name for path in self.records.iterdir())

    def read_record(self, cid: str) -> Record | None:
        """Return None if the store has no such adapter; raise StoreDamaged."""
        try:
            content = self.record(cid).read_bytes()
        except FileNotFoundError:
            return None
        return decode_record(content, cid)

    def size_bytes(self) -> int:
        return sum(size_of(path) for path in self.all_blobs())

    def is_whole(self, record: Record) -> bool:
        """Return whether the view of the adapter has all files in their full size."""
        view = self.view(record.cid)
        return all(
            size_of(view / name, absent=-1) == digest.size for name, digest in record.files.items()
        )


def find_record(folder: Path) -> Record | None:
    """Return the record of an adapter folder that a store has made (a view), else None.

    The record names the CID, the config and the size and digest of each file. The store hashed the
    files when it made the view; this function only compares their sizes, so it reads no weights and
    needs no torch. None also stands for a damaged record or view: the caller then hashes the files.
    """
    view = folder.resolve()
    layout = StoreLayout(view.parent.parent)
    if view.parent != layout.views or not is_digest(view.name) or not layout.lock.exists():
        return None
    try:
        record = layout.read_record(CID_PREFIX + view.name)
    except (StoreDamaged, OSError):
        return None
    return record if record is not None and layout.is_whole(record) else None


def size_of(path: Path, *, absent: int = 0) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return absent


class StoreLock:
    """A lock across threads and processes, held only for renames and removals."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        # Each holder opens its own descriptor, so that the lock excludes threads too.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class StagingArea:
    """Temporary folders; each is locked by its process, so that those of dead ones can be swept."""

    def __init__(self, parent: Path, *, prefix: str, lock: StoreLock) -> None:
        self._parent = parent
        self._prefix = prefix
        self._lock = lock

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a new folder and remove it with its content after the block."""
        with self._lock.held():
            path = self._parent / f"{self._prefix}{secrets.token_hex(8)}"
            path.mkdir(mode=PRIVATE_FOLDER)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            # What is left when the folder became read-only is swept later.
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)

    def sweep(self) -> int:
        """Remove the folders of dead processes; the caller holds the lock."""
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
    # Its owner may have removed it and exited since it was opened.
    return folder.exists()
