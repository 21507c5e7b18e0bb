"""The interface of an origin: find a file, and read a range of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from loramux.adapters.images.files import DIFFUSERS_NAME
from loramux.adapters.peft.config import CONFIG_NAME
from loramux.adapters.peft.safetensors import PICKLE_NAMES, WEIGHTS_NAME
from loramux.adapters.peft.tokenizer_files import MAIN_NAMES, MAX_BYTES
from loramux.errors import SourceChanged, SourceForbidden, SourceNotFound, SourceRefused
from loramux.sources.refusals import SourceCode, pickle_refused
from loramux.sources.source_id import WEIGHTS_SUFFIX, SourceId

# An interrupted transfer loses at most this many bytes.
CHUNK_BYTES = 64 * 2**10
MAX_SHOWN = 10
# Files of whole models.
WHOLE_MODEL = re.compile(r"(?:diffusion_pytorch_)?model(?:[-.].*)?\.safetensors|.*-of-\d+\..*")
MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True, slots=True)
class Checksum:
    algorithm: str
    """`sha256`, `md5`, or `git` for the SHA-1 of a git blob."""
    hexadecimal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    path: str
    """The path of the file at its origin."""
    size_bytes: int | None
    validator: str | None
    """Equal for equal content; None means that an interrupted transfer cannot be resumed."""
    can_seek: bool = True
    checksum: Checksum | None = None


class Origin(Protocol):
    """Access to the files of one source from several threads.

    It raises only Source errors, whose messages hold no secrets.
    """

    @property
    def revision(self) -> str | None:
        """The revision of the found files: a commit, or the ETag of the weights."""
        ...

    def find(self, name: str) -> RemoteFile | None: ...

    def file_names(self) -> Sequence[str]:
        """Return the names of the files in the folder; none if it cannot be listed."""
        ...

    def read(
        self, file: RemoteFile, start: int, end: int | None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Yield the bytes from start up to end, or to the end of the file, in chunks."""
        ...

    def close(self) -> None: ...


def changed(path: str) -> SourceChanged:
    return SourceChanged(f"{path} changed at its source while it was read. Try again.")


def find_adapter(source: SourceId, origin: Origin) -> dict[str, RemoteFile]:
    """Return the files to fetch by their local names, the config first."""
    weights_name = source.weights_name or WEIGHTS_NAME
    weights = origin.find(weights_name)
    if weights is None:
        image = None if source.weights_name is not None else find_image(source, origin)
        if image is None:
            raise explain_missing(source, origin, weights_name)
        return {DIFFUSERS_NAME: image}
    config = origin.find(CONFIG_NAME)
    if config is not None:
        return {CONFIG_NAME: config, WEIGHTS_NAME: weights, **find_tokenizer(origin)}
    if source.weights_name is None:
        raise SourceNotFound(
            f"{source} has no {CONFIG_NAME}. Give the folder that PEFT's save_pretrained wrote."
        )
    # Without a config beside it, it can only be for an image model.
    return {DIFFUSERS_NAME: weights}


def find_image(source: SourceId, origin: Origin) -> RemoteFile | None:
    """Return the file of an adapter of an image model: diffusers' name, else the only one.

    Raises SourceRefused with the names if there are several.
    """
    found = find_optional(origin, DIFFUSERS_NAME)
    if found is not None or find_optional(origin, CONFIG_NAME) is not None:
        return found
    names = sorted(
        name
        for name in origin.file_names()
        if name.endswith(WEIGHTS_SUFFIX) and WHOLE_MODEL.fullmatch(name) is None
    )
    if len(names) > 1:
        raise SourceRefused(
            SourceCode.NOT_AN_ADAPTER,
            f"{source} has {len(names)} {WEIGHTS_SUFFIX} files: {', '.join(names[:MAX_SHOWN])}"
            f"{' …' if len(names) > MAX_SHOWN else ''}.",
            fix=f"Name one of them, such as {source}:{names[0]}.",
        )
    return origin.find(names[0]) if names else None


def find_tokenizer(origin: Origin) -> dict[str, RemoteFile]:
    """Return the tokenizer files of an adapter, if it has any."""
    main = {name: file for name in MAIN_NAMES if (file := find_optional(origin, name)) is not None}
    if not main:
        return {}
    others = [name for name in MAX_BYTES if name not in MAIN_NAMES]
    return main | {
        name: file for name in others if (file := find_optional(origin, name)) is not None
    }


def find_optional(origin: Origin, name: str) -> RemoteFile | None:
    """Return a bucket that must not be listed forbids to read what it does not have."""
    try:
        return origin.find(name)
    except SourceForbidden:
        return None


def explain_missing(source: SourceId, origin: Origin, weights_name: str) -> Exception:
    if source.weights_name is None:
        for name in PICKLE_NAMES:
            if origin.find(name) is not None:
                return pickle_refused(f"{source} has no safetensors; its {name}")
    return SourceNotFound(
        f"{source} has no {weights_name}. Check the spelling, and that this server's credentials "
        "may read it."
    )
