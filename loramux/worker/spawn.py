"""Spawns an engine process; a light module, since the server imports the rest meanwhile."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass

from loramux.process_environment import child_environment

TEXT_ENGINE = "loramux.engine.worker"


@dataclass(frozen=True, slots=True)
class SpawnedWorker:
    """An engine process that imports torch and then waits for its first message."""

    popen: subprocess.Popen[bytes]
    connection: socket.socket
    """The server's end of the connection."""

    def close(self) -> None:
        """End a process that was not given to a server."""
        self.connection.close()
        self.popen.kill()
        self.popen.wait()


def spawn_worker(module: str = TEXT_ENGINE) -> SpawnedWorker:
    """`module`: what the process runs, with the file descriptor of its socket as argument."""
    ours, theirs = socket.socketpair()
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return SpawnedWorker(popen, ours)
