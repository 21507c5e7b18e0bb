"""A real server in its own process, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOTHING: Mapping[str, str] = {}
OF_THE_USER = ("XDG_DATA_HOME", "LORAMUX_API_KEY", "VLLM_API_KEY")
STARTED = re.compile(r"listening on (https?)://([\d.]+):(\d+)", re.IGNORECASE)


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    @property
    def engine_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [
            int(pid)
            for pid in children.split()
            if b"loramux.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]


@contextmanager
def running_server(
    log: Path, *flags: str, timeout_s: float = 240, environment: Mapping[str, str] = NOTHING
) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "loramux.cli.main", "serve", "--port", "0", *flags]
    environment = {
        # Hides adapters that the user running the tests has pushed.
        "XDG_DATA_HOME": str(log.parent / "user-data"),
        **{name: value for name, value in os.environ.items() if name not in OF_THE_USER},
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        **environment,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield RunningServer(process, log, wait_for_url(process, log, timeout_s))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_url(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := STARTED.search(log.read_text(errors="replace")):
            return f"{found[1]}://{found[2]}:{found[3]}"
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')}")
