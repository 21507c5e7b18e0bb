"""Files that are either whole or absent, whatever happens to the process or the machine."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.identity import FileDigest
from loramux.errors import AdapterRefused, StoreFull
from loramux.progress import SILENT, ByteSink

CHUNK_BYTES = 2**20
READ_ONLY = 0o444
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What a file system answers that cannot link, or not this file once more.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


def copy_hashed(
    source: Path, destination: Path, *, max_bytes: int, sink: ByteSink = SILENT
) -> FileDigest:
    """The digest is of the bytes that were written; they are on the disk when this returns."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, reporting_full_disk(), destination.open("xb") as writer:
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
    with reporting_full_disk(), destination.open("xb") as writer:
        writer.write(content)
        writer.flush()
        seal(writer.fileno())


def seal(descriptor: int) -> None:
    """Read-only, since the same bytes may be linked into many folders, and on the disk."""
    os.fchmod(descriptor, READ_ONLY)
    os.fsync(descriptor)


def hash_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(digest.hexdigest(), os.fstat(file.fileno()).st_size)


def sync_folder(folder: Path) -> None:
    """Puts renames into the folder, and removals from it, on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
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
