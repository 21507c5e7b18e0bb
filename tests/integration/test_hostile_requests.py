"""Requests by seed that no sane client sends, on all routes: no 500, no hang, no growth.

LORAMUX_HOSTILE sets how many (10,000 for the full run), LORAMUX_HOSTILE_SEED where chance begins.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from loramux.registry.access import AccessRecords
from loramux.registry.keys import KeyRights
from loramux.registry.registry import Registry
from loramux.types.access import KeyScope
from tests.hostile_requests import HostileRequest, HostileRequests
from tests.registry_scene import Scene, push
from tests.serve_factory import RunningServer

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("LORAMUX_HOSTILE_SEED", "1"))
NUM_FULL = int(os.environ.get("LORAMUX_HOSTILE", "10000"))
NUM_CLIENTS = 3
TIMEOUT_S = 60.0
OPERATOR = "operator-key"
MAX_GROWTH_MIB = 64
MAX_BLOCKED_S = 0.1
SETTLE_S = 30.0


@dataclass(frozen=True)
class Target:
    server: RunningServer
    keys: tuple[str, ...]
    """Valid and invalid keys that requests send; empty: the server needs none."""


@contextmanager
def target_in(folder: Path, *, has_keys: bool) -> Iterator[Target]:
    scene = Scene(folder)
    scene.make_adapter("a0", seed=1)
    flags = ["--allow-runtime-lora-updating", "--registry", str(folder / "registry.db")]
    keys: tuple[str, ...] = ()
    if has_keys:
        flags += ["--api-key", OPERATOR]
        with Registry(folder / "registry.db") as registry:
            keys = (OPERATOR, OPERATOR, *made_keys(registry.access), "lmx_0_x", "é", "")
    with scene.serving("hostile", *flags) as server:
        headers = {"authorization": f"Bearer {OPERATOR}"} if has_keys else {}
        with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S, headers=headers) as client:
            push(client, "acme/sql@1.0.0", "a0")
        yield Target(server, keys)


def made_keys(access: AccessRecords) -> Iterator[str]:
    """Keys of two tenants with some scopes, of one adapter, and one that was revoked."""
    for tenant, scopes in (("acme", list(KeyScope)), ("acme", ["infer"]), ("globex", ["push"])):
        rights = KeyRights(tenant=tenant, scopes=frozenset(map(KeyScope, scopes)))
        yield access.create_key(rights).text
    narrow = KeyRights(tenant="acme", adapters=("acme/sql*",), may_use_base=False)
    yield access.create_key(narrow).text
    revoked = access.create_key(narrow)
    access.revoke_key(revoked.record.key_id)
    yield revoked.text


@dataclass
class Seen:
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    version_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    """Computing time of the server during each GET /version; other programs took the rest."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: HostileRequest, status: int, text: str, seconds: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.slowest = max(self.slowest, (seconds, str(request)))
            if status >= 500 and not is_expected(status):
                self.faults.append(f"{request} -> {status} {text[:300]}")


def is_expected(status: int) -> bool:
    """Return a source that does not answer is 502."""
    return status == 502


def send_all(url: str, requests: Iterator[HostileRequest], seen: Seen) -> None:
    lock = threading.Lock()

    def work() -> None:
        with httpx2.Client(base_url=url, timeout=TIMEOUT_S) as client:
            while True:
                with lock:
                    request = next(requests, None)
                if request is None:
                    return
                began = time.monotonic()
                try:
                    answer = client.request(
                        request.method,
                        request.path,
                        content=request.content,
                        headers=request.raw_headers,
                    )
                except (httpx2.InvalidURL, httpx2.LocalProtocolError, ValueError):
                    continue  # The client itself refuses to send it.
                except httpx2.HTTPError as error:
                    with seen.lock:
                        seen.faults.append(f"{request} -> {error!r}")
                    continue
                seen.add(request, answer.status_code, answer.text, time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def asking_version(server: RunningServer, seen: Seen) -> Iterator[None]:
    """Measures GET /version all the time."""
    is_over = threading.Event()

    def work() -> None:
        with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            while not is_over.wait(0.01):
                began, computed_s = time.monotonic(), cpu_seconds(server.process.pid)
                assert client.get("/version").status_code == 200
                elapsed_s = time.monotonic() - began
                computed_s = cpu_seconds(server.process.pid) - computed_s
                seen.version_s.append(elapsed_s)
                seen.blocked_s.append(min(elapsed_s, computed_s))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def cpu_seconds(pid: int) -> float:
    """Return the time that all threads of the process have computed."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # It has ended meanwhile.
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def growth(pids: list[int], before: list[float]) -> list[float]:
    """Return the growth of each process in MiB, once what is open has been freed."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        grown = [rss_mib(pid) - old for pid, old in zip(pids, before, strict=True)]
        if max(grown) < MAX_GROWTH_MIB or time.monotonic() > deadline:
            return grown
        time.sleep(0.2)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "has_keys"),
    [
        (300, True),
        pytest.param(NUM_FULL, True, marks=pytest.mark.slow),
        pytest.param(NUM_FULL, False, marks=pytest.mark.slow),
    ],
)
def test_no_request_breaks_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, has_keys: bool
) -> None:
    with target_in(tmp_path, has_keys=has_keys) as target:
        told = attack(target, number)
    if number == NUM_FULL:
        with capsys.disabled():
            print(told)


def attack(target: Target, number: int) -> str:
    """Send the requests, check what they left, and returns a report."""
    server, seen = target.server, Seen()
    requests = HostileRequests(SEED, target.keys).draw(number)
    send_all(server.url, (next(requests) for _ in range(number // 5)), Seen())
    pids = [server.process.pid, *server.engine_pids]
    before = [rss_mib(pid) for pid in pids]
    with asking_version(server, seen):
        send_all(server.url, requests, seen)
    grown = growth(pids, before)
    assert not seen.faults, "\n".join(seen.faults[:20])
    headers = {"authorization": f"Bearer {OPERATOR}"} if target.keys else {}
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S, headers=headers) as client:
        assert client.get("/health").json()["restarts"] == 0
        assert client.get("/health", params={"deep": "1"}).status_code == 200
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    slowest_s, slowest = seen.slowest
    seen.version_s.sort()
    seen.blocked_s.sort()
    told = (
        f"\n{dict(sorted(seen.statuses.items()))}; slowest {slowest_s:.2f} s: {slowest[:300]}\n"
        f"GET /version: median {seen.version_s[len(seen.version_s) // 2] * 1e3:.1f} ms, longest "
        + " ".join(f"{one * 1e3:.0f}" for one in seen.version_s[-5:])
        + " ms, of which the server computed "
        + " ".join(f"{one * 1e3:.0f}" for one in seen.blocked_s[-5:])
        + f" ms; server and engine grew by {[round(one) for one in grown]} MiB"
    )
    assert max(grown) < MAX_GROWTH_MIB, told
    assert number < NUM_FULL or seen.blocked_s[-1] < MAX_BLOCKED_S, told
    return told
