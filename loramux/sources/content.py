"""Checks fetched files: first bytes before the rest is fetched, then sizes and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from loramux.adapters.peft.config import CONFIG_NAME, MAX_CONFIG_BYTES
from loramux.adapters.peft.safetensors import (
    LENGTH_BYTES,
    LFS_MAGIC,
    MAX_HEADER_BYTES,
    PICKLE_MAGICS,
)
from loramux.adapters.peft.tokenizer_files import MAX_BYTES, TEMPLATE_NAME
from loramux.errors import SourceFailed, SourceRefused
from loramux.sources.origins.base import Checksum, RemoteFile
from loramux.sources.refusals import SourceCode, archive_refused, pickle_refused, too_large

# Enough to contain the magic number of a tar archive.
HEAD_BYTES = 512
CHUNK_BYTES = 2**20
TAR_MAGIC, TAR_POSITION = b"ustar", 257
ARCHIVES = (
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ\x00",
    b"(\xb5/\xfd",
    b"7z\xbc\xaf",
)


def check_start(name: str, head: bytes, size_bytes: int | None) -> None:
    """Refuses files of a wrong kind; `head` has the first HEAD_BYTES, or all bytes of the file."""
    if head.startswith(LFS_MAGIC):
        raise SourceRefused(
            SourceCode.LFS_POINTER,
            f"{name} is a git-lfs pointer, not the file.",
            fix="Upload the file itself.",
        )
    if name == TEMPLATE_NAME:
        check_template_start(name, head)
    elif name == CONFIG_NAME or name in MAX_BYTES:
        check_config_start(name, head)
    else:
        check_weights_start(name, head, size_bytes)


def check_config_start(name: str, head: bytes) -> None:
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        raise SourceRefused(
            SourceCode.NOT_AN_ADAPTER,
            f"{name} is not JSON.",
            fix="Check that the source returns the file itself, not a web page about it.",
        )


def check_template_start(name: str, head: bytes) -> None:
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")) or b"\0" in head:
        raise SourceRefused(
            SourceCode.NOT_AN_ADAPTER,
            f"{name} is not a chat template.",
            fix="Check that the source returns the file itself, not a web page about it.",
        )


def check_weights_start(name: str, head: bytes, size_bytes: int | None) -> None:
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    is_safetensors = head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
    fits = size_bytes is None or LENGTH_BYTES + length <= size_bytes
    if is_safetensors and length <= MAX_HEADER_BYTES and fits:
        return
    if head.startswith(PICKLE_MAGICS):
        raise pickle_refused(name)
    if head.startswith(ARCHIVES) or head[TAR_POSITION:].startswith(TAR_MAGIC):
        raise archive_refused(name)
    if is_safetensors and length > MAX_HEADER_BYTES:
        raise SourceRefused(
            SourceCode.OVERSIZED_HEADER,
            f"{name} says that its header has {length} bytes; at most {MAX_HEADER_BYTES} are "
            "allowed.",
            fix="Save the adapter again.",
        )
    raise SourceRefused(
        SourceCode.NOT_AN_ADAPTER,
        f"{name} is not a safetensors file, or is truncated.",
        fix="Check that the source returns the file itself, and save the adapter again.",
    )


def max_bytes_of(name: str, max_file_bytes: int) -> int:
    limit = MAX_CONFIG_BYTES if name == CONFIG_NAME else MAX_BYTES.get(name, max_file_bytes)
    return min(max_file_bytes, limit)


def check_sizes(
    files: Mapping[str, RemoteFile], *, max_file_bytes: int, max_total_bytes: int
) -> None:
    """Check the sizes that the source reports, before files are fetched."""
    for name, file in files.items():
        allowed_bytes = max_bytes_of(name, max_file_bytes)
        if (file.size_bytes or 0) > allowed_bytes:
            raise too_large(name, file.size_bytes or 0, allowed_bytes)
    total_bytes = sum(file.size_bytes or 0 for file in files.values())
    if total_bytes > max_total_bytes:
        raise too_large("The adapter", total_bytes, max_total_bytes)


def check_file(path: Path, file: RemoteFile, expected_sha256: str | None) -> str:
    """Check a complete file against its source's checksum; return its SHA-256."""
    size_bytes = path.stat().st_size
    sha256, second = hashlib.sha256(), second_hash(file.checksum, size_bytes)
    with path.open("rb") as reader:
        check_start(path.name, reader.read(HEAD_BYTES), size_bytes)
        reader.seek(0)
        while chunk := reader.read(CHUNK_BYTES):
            sha256.update(chunk)
            if second is not None:
                second.update(chunk)
    found = sha256.hexdigest()
    said = found if second is None else second.hexdigest()
    if file.checksum is not None and said != file.checksum.hexadecimal:
        raise mismatch(path.name, f"its source reports ({file.checksum.algorithm})")
    if expected_sha256 not in (None, found):
        raise mismatch(path.name, "was expected (sha256)")
    return found


def second_hash(checksum: Checksum | None, size_bytes: int) -> hashlib._Hash | None:
    """Return the hash for a checksum other than SHA-256, which is always computed."""
    if checksum is None or checksum.algorithm == "sha256":
        return None
    if checksum.algorithm == "git":
        return hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)
    return hashlib.new(checksum.algorithm, usedforsecurity=False)


def mismatch(name: str, promised: str) -> SourceFailed:
    return SourceFailed(
        f"The content of {name} does not match the digest that {promised}; it was discarded. Fetch "
        "it again; if that fails too, upload the file again.",
        is_temporary=False,
    )
