"""Creates folders and files that only this user may read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.errors import LoramuxError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600


def make_private_folder(folder: Path) -> None:
    """Make the folder and its missing parents; one that exists keeps its mode."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folder(folder.parent)
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


@contextmanager
def explaining(folder: Path, setting: str) -> Iterator[None]:
    """Turn errors of the file system into one that names the folder and the setting."""
    try:
        yield
    except OSError as error:
        raise LoramuxError(
            f"{folder} cannot be used: {error.strerror or error}. Name a folder that this user may "
            f"write to: {setting}."
        ) from error


def private_opener(path: str, flags: int) -> int:
    """Is an `opener` for open(): a new file is private."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)
