"""Files of a folder under an allowed root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loramux.errors import SourceFailed
from loramux.sources.origins.base import CHUNK_BYTES, RemoteFile, changed
from loramux.sources.origins.local_paths import open_under_root, real_path, root_of
from loramux.sources.source_id import SourceId


class LocalOrigin:
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
        raise SourceFailed(
            f"{name} cannot be read: {error.strerror}. Check that this server's user may read it.",
            is_temporary=False,
        ) from None
