"""Reads files of local folders, which must stay under the allowed roots."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.origins.base import CHUNK_BYTES, RemoteFile, changed
from loramux.sources.refusals import SourceCode
from loramux.sources.source_id import SourceId

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a named pipe would block.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def find_under_roots(path: Path, roots: Sequence[Path]) -> tuple[Path, Path]:
    """Return the real paths of the root and the path; searches a relative path in all roots."""
    if not roots:
        raise SourceForbidden(
            SourceCode.NOT_ALLOWED,
            "No local folder may be read: no root is allowed.",
            fix="Name the folder that holds your adapters as an allowed root.",
        )
    for root in roots:
        if os.path.lexists(root / path):
            found = real_path(root / path)
            return root_of(found, roots, given=path), found
    # The reply may reveal what exists only under a root.
    root_of(real_path(roots[0] / path), roots, given=path)
    raise SourceNotFound(
        f"There is no {path} under the allowed roots. Check the path; "
        "an adapter of the Hugging Face hub is written hf:owner/name."
    )


def root_of(found: Path, roots: Sequence[Path], *, given: Path) -> Path:
    for root in roots:
        real_root = real_path(root)
        if found.is_relative_to(real_root):
            return real_root
    raise SourceForbidden(
        SourceCode.NOT_ALLOWED,
        f"{given} is outside the allowed roots, or links outside.",
        fix="Copy the adapter under an allowed root, or allow the folder that it is in.",
    )


def real_path(path: Path) -> Path:
    try:
        return path.resolve()
    # Before Python 3.13, a loop of links raises RuntimeError. A NUL raises ValueError.
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceRefused(
            SourceCode.LINK_OUTSIDE,
            f"The links of {path.name} cannot be resolved.",
            fix="Copy the files themselves into the folder.",
        ) from error


def open_under_root(root: Path, path: Path) -> BinaryIO:
    """Open a real path folder by folder, so that links created meanwhile are not followed."""
    folder = os.open(root, FOLDER_FLAGS)
    try:
        for name in path.relative_to(root).parts[:-1]:
            inner = os.open(name, FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(path.name, FILE_FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise SourceRefused(
            SourceCode.NOT_AN_ADAPTER,
            f"{path.name} is not a regular file.",
            fix="Put the file that PEFT's save_pretrained wrote in its place.",
        )
    return os.fdopen(file, "rb", buffering=0)


class LocalOrigin:
    """The origin of adapters in local folders."""

    def __init__(self, source: SourceId) -> None:
        self._root = Path(source.place)
        self._folder = self._root.joinpath(*source.folder)

    @property
    def revision(self) -> str | None:
        return None

    def find(self, name: str) -> RemoteFile | None:
        entry = self._folder / name
        if not os.path.lexists(entry):
            return None
        path = real_path(entry)
        root_of(path, (self._root,), given=Path(name))
        with reading(name), open_under_root(self._root, path) as file:
            status = os.fstat(file.fileno())
        return RemoteFile(path=str(path), size_bytes=status.st_size, validator=version_of(status))

    def file_names(self) -> Sequence[str]:
        with reading(self._folder.name):
            return [entry.name for entry in self._folder.iterdir()]

    @contextmanager
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        path = Path(file.path)
        with reading(path.name):
            reader = open_under_root(self._root, path)
        with reader:
            if version_of(os.fstat(reader.fileno())) != file.validator:
                raise changed(path.name)
            reader.seek(start)
            yield read_chunks(reader, path.name)

    def close(self) -> None:
        pass


def version_of(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def read_chunks(reader: BinaryIO, name: str) -> Iterator[bytes]:
    with reading(name):
        while chunk := reader.read(CHUNK_BYTES):
            yield chunk


@contextmanager
def reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise SourceNotFound(
                f"{name} cannot be read: {error.strerror}. It was removed or replaced meanwhile."
            ) from None
        raise SourceFailed(
            f"{name} cannot be read: {error.strerror}. Check that this server's user may read it.",
            is_temporary=False,
        ) from None
