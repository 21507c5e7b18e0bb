"""Real servers behind a real router, each in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.s3_server import free_ports
from tests.serve_factory import RunningServer, running_server

READY_S = 240


class RunningReplica:
    """A server that keeps its port when it starts again."""

    def __init__(self, name: str, port: int, folder: Path, flags: list[str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._flags = [*flags, "--port", str(port), "--pool-id", name]
        self._folder = folder
        self._num_starts = 0
        self._stack = ExitStack()
        self.server: RunningServer

    def start(self) -> None:
        self._num_starts += 1
        log = self._folder / f"{self.name}-{self._num_starts}.log"
        self.server = self._stack.enter_context(
            running_server(log, *self._flags, timeout_s=READY_S)
        )

    def signal(self, number: signal.Signals) -> None:
        """Also stops or continues the engine, as a machine that is paused."""
        pids = [self.server.process.pid]
        if number in (signal.SIGSTOP, signal.SIGCONT):
            pids += self.server.engine_pids
        for pid in pids:
            os.kill(pid, number)

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def close(self) -> None:
        self._stack.close()


@dataclass
class RunningFleet:
    url: str
    replicas: list[RunningReplica]

    def states(self) -> dict[str, str]:
        told = replicas_of(self.url)
        return {one["url"]: one["state"] for one in told}

    def wait_until_ready(self, count: int) -> None:
        deadline = time.monotonic() + READY_S
        while list(self.states().values()).count("ready") < count:
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.1)


def replicas_of(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx2.get(f"{url}/v1/replicas", timeout=10).json()["data"]
    return found


@dataclass
class RouterOptions:
    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def running_fleet(
    folder: Path, count: int, flags: list[str], router: RouterOptions | None = None
) -> Iterator[RunningFleet]:
    *ports, router_port = free_ports(count + 1)
    with ExitStack() as stack:
        replicas = [
            RunningReplica(f"r{number}", port, folder, flags) for number, port in enumerate(ports)
        ]
        for replica in replicas:
            stack.callback(replica.close)
        with ThreadPoolExecutor(count) as starts:
            list(starts.map(lambda replica: replica.start(), replicas))
        urls = [replica.url for replica in replicas]
        url = stack.enter_context(running_router(folder, router_port, urls, router))
        fleet = RunningFleet(url, replicas)
        fleet.wait_until_ready(count)
        yield fleet


class RunningRouter:
    """A router that keeps its port when it starts again."""

    def __init__(
        self, folder: Path, port: int, urls: list[str], options: RouterOptions | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._options = options or RouterOptions()
        self._command = [sys.executable, "-m", "loramux.cli.main", "router", "--port", str(port)]
        self._command += ["--open-status", *self._options.flags]
        for url in urls:
            self._command += ["--replicas", url]
        self._log = folder / f"router-{port}.log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with self._log.open("ab") as output:
            environment = {**os.environ, **self._options.environment}
            self.process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=environment
            )
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            try:
                if httpx2.get(f"{self.url}/live", timeout=5).status_code == 200:
                    return
            except httpx2.HTTPError:
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def running_router(
    folder: Path, port: int, urls: list[str], options: RouterOptions | None = None
) -> Iterator[str]:
    router = RunningRouter(folder, port, urls, options)
    try:
        router.start()
        yield router.url
    finally:
        router.close()
