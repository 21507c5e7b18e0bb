"""A place for each replica of a machine: a port and a folder that its successor takes over.

Routers hash the address of a replica, so that one that is started again has the adapters of the
one before. The operating system frees a place when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from loramux.errors import LoramuxError
from loramux.private_files import make_private_folder

MAX_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Slot:
    port: int
    folder: Path
    """Belongs to this slot alone."""
    lock: int
    """Descriptor of the file that is locked while the slot is taken."""

    def free(self) -> None:
        os.close(self.lock)


def take_slot(host: str, first_port: int, *, root: Path | None = None) -> Slot:
    """Takes the first place whose port is free on this machine; raises LoramuxError."""
    root = root or Path(tempfile.gettempdir()) / f"loramux-deploy-{os.getuid()}"
    make_private_folder(root)
    if root.stat().st_uid != os.getuid():
        raise LoramuxError(f"{root} belongs to another user. Remove it.")
    for port in range(first_port, first_port + MAX_SLOTS):
        folder = root / str(port)
        make_private_folder(folder)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_free(host, port):
                return Slot(port, folder, lock)
        except BlockingIOError:
            pass
        os.close(lock)
    raise LoramuxError(
        f"No port from {first_port} to {first_port + MAX_SLOTS - 1} is free on {host}. "
        "Set fleet.engine_port."
    )


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: connections that ended a moment ago are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
