"""Spawns an engine process; a light module, since the server imports the rest meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from loramux.base.process_environment import child_environment
from loramux.worker.pulse import Pulse

TEXT_ENGINE = "loramux.engine.worker"


@dataclass(frozen=True, slots=True)
class SpawnedWorker:
    """An engine process that imports torch and then waits for its first message."""

    popen: subprocess.Popen[bytes]
    connection: socket.socket
    """The server's end of the connection."""
    pulse: Pulse

    def close(self) -> None:
        """End a process that was not given to a server."""
        self.connection.close()
        self.popen.kill()
        self.popen.wait()


def spawn_worker(module: str = TEXT_ENGINE) -> SpawnedWorker:
    """Take the `module` that the process runs, with descriptors of its socket and pulse as
    arguments.
    """
    pulse, shared = Pulse.create()
    try:
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), shared]
        try:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, inherited)],
                pass_fds=inherited,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
    finally:
        os.close(shared)
    return SpawnedWorker(popen, ours, pulse)
