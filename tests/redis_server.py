"""A real Redis for tests, on a socket in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class RedisServer:
    """Runs while its folder exists; `start` after `stop` begins with an empty Redis."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._socket = folder / "socket"
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        settings = {"port": "0", "unixsocket": str(self._socket), "save": "", "appendonly": "no"}
        arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
        process = self._process = subprocess.Popen(
            [self._program, *arguments], cwd=self._folder, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "ready to accept connections" in line.lower():
                break

    def stop(self) -> None:
        """Kills the server."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed. Run: apt-get install redis-server")
    folder = Path(tempfile.mkdtemp(prefix="redis-", dir="/tmp"))
    server = RedisServer(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_redis() as server:
        yield server.url
