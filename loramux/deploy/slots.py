"""A place for each replica of a machine: a port and a folder that its successor takes over.

Routers hash the address of a replica, so that the successor of one that failed gets its adapters.
The operating system frees a place when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from loramux.base.private_files import make_private_folder
from loramux.errors import LoramuxError

MAX_SLOTS = 256
# A file in the folder of a place from when its replica is ready until it leaves. One that never was
# ready, as with a model that does not exist, has no adapters and no address that a successor needs.
_KEPT = "kept"
# The server of a failed replica is killed, but on a busy machine it may hold its port for seconds.
_LEFT_WAIT_S = 15.0


@dataclass(frozen=True, slots=True)
class Slot:
    port: int
    folder: Path
    """Belongs to this slot alone."""
    lock: int
    """Descriptor of the file that is locked while the slot is taken."""

    def keep(self) -> None:
        """Leaves the place to a successor, unless free() is called before the process ends."""
        (self.folder / _KEPT).touch(mode=0o600)

    def free(self) -> None:
        """Leaves the place as one that needs no successor."""
        (self.folder / _KEPT).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Lets another replica take the place, as the end of the process does."""
        os.close(self.lock)


def take_slot(host: str, first_port: int, *, root: Path | None = None) -> Slot:
    """Take the place of a replica that failed, else the first whose port is free.

    Raises LoramuxError.
    """
    root = root or Path(tempfile.gettempdir()) / f"loramux-deploy-{os.getuid()}"
    make_private_folder(root)
    if root.stat().st_uid != os.getuid():
        raise LoramuxError(f"{root} belongs to another user. Remove it.")
    ports = range(first_port, first_port + MAX_SLOTS)
    left = [port for port in ports if (root / str(port) / _KEPT).exists()]
    for places, wait_s in ((left, _LEFT_WAIT_S), (ports, 0.0)):
        for port in places:
            slot = _take(host, port, root / str(port), wait_s)
            if slot is not None:
                return slot
    raise LoramuxError(
        f"No port from {ports[0]} to {ports[-1]} is free on {host}. Set fleet.engine_port."
    )


def _take(host: str, port: int, folder: Path, wait_s: float) -> Slot | None:
    """Take a place, waiting `wait_s` for a port that is busy although no replica has it."""
    make_private_folder(folder)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        deadline = time.monotonic() + wait_s
        while not (is_free := _is_free(host, port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_free:
            return Slot(port, folder, lock)
        # Another program has it now.
        (folder / _KEPT).unlink(missing_ok=True)
    except BlockingIOError:
        pass
    os.close(lock)
    return None


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
