"""Opens the files of an adapter folder, and knows the layout of the Hugging Face cache."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loramux.adapters.peft.refusals import RefusalCode
from loramux.errors import AdapterNotFound, AdapterRefused, machine_error

# models--owner--name/snapshots/<commit>, the folder of a repository in the Hugging Face cache.
HUB_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?(?P<name>[^/]+)/snapshots(?:/|$)")

# O_PATH needs no right to list the folder.
_FOLDER_FLAGS = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(folder: Path) -> Path:
    """Return the real path of an adapter folder; raise AdapterNotFound if there is none."""
    if not folder.is_dir():
        raise AdapterNotFound(
            f"No adapter folder at {folder}. Give the folder that holds adapter_config.json."
        )
    return folder.resolve()


def open_real(path: Path) -> BinaryIO:
    """Open a file by its real path and follow no link: none of its folders was replaced by one.

    A path that was checked stays checked, although files are opened after the check.
    """
    if not hasattr(os, "O_PATH"):
        return path.open("rb")
    folder = os.open("/", _FOLDER_FLAGS)
    try:
        for name in path.parts[1:-1]:
            inner = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    return os.fdopen(file, "rb")


def find_file(folder: Path, name: str) -> Path | None:
    """Return the real path of a file of the folder, or None if the folder has no such entry.

    `folder` is a real path. Refuses links that lead out of the folder, except links into the
    Hugging Face cache's blobs.
    """
    entry = folder / name
    try:
        mode = entry.lstat().st_mode
    except OSError:
        # An entry that exists and cannot be examined is reported by resolve().
        mode = 0
    if stat.S_ISREG(mode):
        return entry
    if not mode and not entry.exists():
        return None
    with refusing_os_errors(entry):
        path = entry.resolve(strict=True)
    if not path.is_relative_to(folder) and not is_hub_blob(folder, path):
        raise AdapterRefused(
            RefusalCode.LINK_OUTSIDE,
            f"{name} is a link to a file outside the adapter's folder.",
            fix="Copy the file itself into the folder.",
        )
    if not path.is_file():
        raise AdapterRefused(
            RefusalCode.UNREADABLE,
            f"{name} is not a regular file.",
            fix="Put the file that PEFT's save_pretrained wrote in its place.",
        )
    return path


def is_hub_blob(folder: Path, path: Path) -> bool:
    """Return whether the path is a blob of the Hugging Face cache that the folder is part of."""
    return any(
        parent.name == "snapshots"
        and parent.parent.name.startswith("models--")
        and path.parent == parent.parent / "blobs"
        for parent in folder.parents
    )


def short_base_name(name: str) -> str:
    """Return the name of a base model without its owner and folders, in lower case.

    Takes a repository id, a path, or a folder or file of the Hugging Face cache.
    """
    path = name.replace("\\", "/").rstrip("/")
    cached = HUB_SNAPSHOT.search(path)
    return (cached["name"] if cached else path.rsplit("/", 1)[-1]).lower()


@contextmanager
def refusing_os_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors into a refusal of the adapter, unless the machine is their cause."""
    try:
        yield
    # resolve() reports a loop of links as RuntimeError before Python 3.13.
    except (OSError, RuntimeError) as error:
        cause = machine_error(error) if isinstance(error, OSError) else None
        if cause is not None:
            raise cause from error
        detail = getattr(error, "strerror", None) or error
        raise AdapterRefused(
            RefusalCode.UNREADABLE,
            f"{path.name} cannot be read: {detail}.",
            fix="Check that the file exists and that the server's user may read it.",
        ) from error
