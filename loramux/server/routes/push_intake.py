"""Receives the files of a pushed adapter: from a body, or from the machine's shared memory."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loramux.adapters.peft.config import CONFIG_NAME
from loramux.adapters.peft.safetensors import WEIGHTS_NAME
from loramux.base.threads import FOLDER_READS
from loramux.errors import InvalidRequest
from loramux.server.errors import BodyTooLarge, NotJson
from loramux.server.http.body import decode, read_body
from loramux.server.http.call import Call
from loramux.server.images.openai import MAX_HEADER_BYTES, MULTIPART, boundary_of, media_type
from loramux.server.naming.pushed_folders import SHARED_MEMORY, PushedFolders

CONFIG_HEADER = "x-loramux-config"
OCTETS = "application/octet-stream"
CONFIG_PART, WEIGHTS_PART = "config", "weights"
MAX_CONFIG_BYTES = 2**20
_PIECE_BYTES = 4 * 2**20
_MAX_PARTS = 8
_SHM_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


class FromMemory(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of a push: a folder in /dev/shm with an adapter's two files."""

    shm: str


@dataclass(frozen=True, slots=True)
class Limits:
    file_bytes: int
    body_bytes: int
    """Limit of a JSON body."""


@asynccontextmanager
async def received(http: Call, folders: PushedFolders, limits: Limits) -> AsyncIterator[Path]:
    """Provide a staged folder with config and weights; what is left of it is removed."""
    kind = media_type(http.headers.get("content-type", ""))
    if kind == "application/json":
        asked = decode(await read_body(http, limits.body_bytes), FromMemory)
        source = _shared_folder(asked.shm)
        num_bytes = sum(_size_of(source / name, limits) for name in (CONFIG_NAME, WEIGHTS_NAME))
        folder = folders.stage(num_bytes)
    elif kind in (OCTETS, MULTIPART):
        folder = folders.stage(_declared_bytes(http, limits))
    else:
        raise NotJson(f"Send the adapter as {OCTETS}, {MULTIPART} or application/json.")
    try:
        if kind == "application/json":
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                await FOLDER_READS.run(_copy_private, source / name, folder / name, limits)
        elif kind == OCTETS:
            (folder / CONFIG_NAME).write_bytes(_config_of(http))
            await _write_body(http, folder / WEIGHTS_NAME, limits.file_bytes)
        else:
            body = folder / "body"
            await _write_body(http, body, limits.file_bytes + MAX_CONFIG_BYTES)
            boundary = boundary_of(http.headers["content-type"])
            await FOLDER_READS.run(_split_form, body, boundary, folder)
        yield folder
    finally:
        await FOLDER_READS.run(shutil.rmtree, folder, ignore_errors=True)


def _declared_bytes(http: Call, limits: Limits) -> int:
    declared = http.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    if size > limits.file_bytes + MAX_CONFIG_BYTES:
        raise _too_large(limits.file_bytes)
    # A form is split into its files.
    is_form = media_type(http.headers.get("content-type", "")) == MULTIPART
    return 2 * size if is_form else size


def _config_of(http: Call) -> bytes:
    text = http.headers.get(CONFIG_HEADER)
    if text is None:
        raise InvalidRequest(
            f"Send adapter_config.json as the header {CONFIG_HEADER}, on one line of ASCII, or as "
            f"the part {CONFIG_PART} of a form.",
            param=CONFIG_HEADER,
        )
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The header {CONFIG_HEADER} is no JSON: {error}.") from error
    return text.encode()


async def _write_body(http: Call, path: Path, max_bytes: int) -> None:
    """Write a body as it arrives; raises ClientDisconnect for one that is cut."""
    size, pieces, num_bytes = 0, list[bytes](), 0
    with path.open("wb", buffering=0) as file:
        async for piece in http.stream():
            size += len(piece)
            if size > max_bytes:
                raise _too_large(max_bytes)
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes >= _PIECE_BYTES:
                await asyncio.shield(FOLDER_READS.run(_write_all, file.fileno(), pieces))
                pieces, num_bytes = [], 0
        await asyncio.shield(FOLDER_READS.run(_write_all, file.fileno(), pieces))


def _write_all(file: int, pieces: list[bytes]) -> None:
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[os.write(file, left) :]


def _split_form(body: Path, boundary: bytes, folder: Path) -> None:
    """Write the parts `config` and `weights` of a form as the two files."""
    found = set()
    with body.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise InvalidRequest("The form is empty.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(boundary)
            for _ in range(_MAX_PARTS):
                head = at + len(boundary)
                start = content.find(b"\r\n\r\n", head, head + MAX_HEADER_BYTES) + 4
                stop = content.find(b"\r\n" + boundary, head)
                if content[head : head + 2] == b"--":
                    break
                if at < 0 or start < 4 or stop < start:  # noqa: PLR2004  (what find adds)
                    raise InvalidRequest("The form is incomplete: its last boundary is missing.")
                name = _part_name(content[head:start])
                if name is not None:
                    found.add(name)
                    with (folder / name).open("wb") as target, memoryview(content) as view:
                        target.write(view[start:stop])
                at = stop + 2
    body.unlink()
    for part, name in ((CONFIG_PART, CONFIG_NAME), (WEIGHTS_PART, WEIGHTS_NAME)):
        if name not in found:
            raise InvalidRequest(f"The form has no part `{part}`.", param=part)


def _part_name(head: bytes) -> str | None:
    if re.search(rb';\s*name="?config"?[;\s]', head):
        return CONFIG_NAME
    return WEIGHTS_NAME if re.search(rb';\s*name="?weights"?[;\s]', head) else None


def _shared_folder(name: str) -> Path:
    """Return a folder of shared memory that only this user could have written."""
    name = name.removeprefix("shm://")
    if not _SHM_NAME.fullmatch(name) or name.startswith("."):
        raise InvalidRequest(
            "shm is the name of a folder in /dev/shm: letters, digits, '.', '_' and '-'.",
            param="shm",
        )
    folder = SHARED_MEMORY / name
    try:
        found = folder.lstat()
    except OSError as error:
        raise InvalidRequest(f"/dev/shm has no folder {name}.", param="shm") from error
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{name} in /dev/shm is no folder.", param="shm")
    _check_owner(found, name)
    return folder


def _check_owner(found: os.stat_result, name: str) -> None:
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid != os.getuid() or is_open:
        raise InvalidRequest(
            f"{name} in /dev/shm must belong to the server's user, and be writable by it alone "
            "(chmod go-w).",
            param="shm",
        )


def _size_of(path: Path, limits: Limits) -> int:
    try:
        size = path.lstat().st_size
    except OSError as error:
        raise InvalidRequest(f"The folder has no {path.name}.", param="shm") from error
    if size > limits.file_bytes:
        raise _too_large(limits.file_bytes)
    return size


def _copy_private(source: Path, target: Path, limits: Limits) -> None:
    """Copy a regular file of this user, so that the trainer may write the next one at once."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequest(f"{source.name} cannot be opened.", param="shm") from error
    with os.fdopen(descriptor, "rb") as file, target.open("wb") as copy:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(f"{source.name} is no regular file.", param="shm")
        _check_owner(found, source.name)
        if found.st_size > limits.file_bytes:
            raise _too_large(limits.file_bytes)
        left = found.st_size
        while left and (sent := os.sendfile(copy.fileno(), file.fileno(), None, left)):
            left -= sent
    if left:
        raise InvalidRequest(f"{source.name} became shorter while it was read.", param="shm")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The adapter is larger than {max_bytes} bytes: save it in a smaller dtype or rank, or "
        "raise --max-adapter-size."
    )
