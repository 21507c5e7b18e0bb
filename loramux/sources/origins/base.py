"""What every kind of source can do: find a file, and read a range of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from loramux.errors import SourceFailed, SourceNotFound
from loramux.sources.refusals import pickle_refused
from loramux.sources.source_id import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME, SourceId

# What a break loses at most of each transfer.
CHUNK_BYTES = 64 * 2**10
MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True, slots=True)
class Checksum:
    algorithm: str
    """`sha256`, `md5`, or `git` for the SHA-1 of a git blob."""
    hexadecimal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    path: str
    """As the origin knows it."""
    size_bytes: int | None
    validator: str | None
    """Equal as long as the bytes are; None: a transfer that broke off cannot be gone on with."""
    can_seek: bool = True
    checksum: Checksum | None = None


class Origin(Protocol):
    """May be used by several threads. Raises the Source errors alone, without secrets."""

    @property
    def revision(self) -> str | None:
        """Of what was found: a commit, or the weights' ETag."""
        ...

    def find(self, name: str) -> RemoteFile | None: ...

    def read(
        self, file: RemoteFile, start: int, end: int | None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes from start to before end (None: to the file's), in chunks."""
        ...

    def close(self) -> None: ...


class SourceChanged(SourceFailed):
    """The file is another than the one that was found; what is there of it is of no use."""


def changed(path: str) -> SourceChanged:
    return SourceChanged(f"{path} changed at its source while it was read. Try again.")


def find_adapter(source: SourceId, origin: Origin) -> dict[str, RemoteFile]:
    """The files to fetch under the names that they get. The config comes first."""
    weights_name = source.weights_name or WEIGHTS_NAME
    weights = origin.find(weights_name)
    if weights is None:
        raise explain_missing(source, origin, weights_name)
    config = origin.find(CONFIG_NAME)
    if config is not None:
        return {CONFIG_NAME: config, WEIGHTS_NAME: weights}
    if source.weights_name is None:
        raise SourceNotFound(
            f"{source} has no {CONFIG_NAME}. Give the folder that PEFT's save_pretrained wrote."
        )
    return {WEIGHTS_NAME: weights}


def explain_missing(source: SourceId, origin: Origin, weights_name: str) -> Exception:
    if source.weights_name is None:
        for name in PICKLE_NAMES:
            if origin.find(name) is not None:
                return pickle_refused(f"{source} has no safetensors; its {name}")
    return SourceNotFound(
        f"{source} has no {weights_name}. Check the spelling, and that this server's credentials "
        "may read it."
    )
