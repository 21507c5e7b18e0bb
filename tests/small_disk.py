"""A small file system of its own, which tests fill and make read-only; only root can mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 2**20


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk to the last byte."""
        filler = self.folder / "filler"
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                for num_bytes in (PIECE_BYTES, 1):
                    with suppress(OSError):
                        while file.write(bytes(num_bytes)):
                            pass
            yield
        finally:
            filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, *, size_mib: int) -> Iterator[SmallDisk | None]:
    """Mounts a tmpfs in the folder while the context lasts; None: this process may not mount."""
    folder.mkdir(parents=True)
    if not _mount("-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "tmpfs", str(folder)):
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily, as a process that is ending may still have files open.
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[bool]:
    """Make a folder read-only while the context lasts; False: this process cannot.

    Permissions do not bind root, which mounts the folder on itself instead.
    """
    if os.geteuid() != 0:
        with _without_write_permission(folder):
            yield True
        return
    if not _mount("--bind", str(folder), str(folder)):
        yield False
        return
    try:
        yield _mount("-o", "remount,bind,ro", str(folder))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def _without_write_permission(folder: Path) -> Iterator[None]:
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if path.is_dir()}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        yield
    finally:
        for path, mode in modes.items():
            with suppress(FileNotFoundError):
                path.chmod(mode)


def _mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
