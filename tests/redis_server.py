"""A real Redis for tests, on a socket in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

START_TIMEOUT_S = 30.0


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("Redis is not installed. Run: apt-get install redis-server")
    folder = Path(tempfile.mkdtemp(prefix="redis-", dir="/tmp"))
    socket = folder / "socket"
    settings = {"port": "0", "unixsocket": str(socket), "save": "", "appendonly": "no"}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
    process = subprocess.Popen([program, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line or "ready to accept connections" in line:
                break
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(folder)
