"""Storms of connections, and a lack of descriptors, on a real server with streams that run."""

from __future__ import annotations

import json
import os
import resource
import signal
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.certificates import Authority
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server
from tests.storm import num_descriptors, storm

FLAGS = ("--served-model-name", "base", "--dtype", "float32", "--device-memory", "64MiB")
NUM_STREAMS, NUM_TOKENS = 8, 1000
BODY: dict[str, Any] = {"model": "base", "prompt": "The", "temperature": 0, "ignore_eos": True}
MAX_GROWTH_BYTES = 256 * 2**20
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("storm")
    save_model_with_tokenizer(folder / "model", max_position_embeddings=2048)
    with running_server(folder / "log", "--model", str(folder / "model"), *FLAGS) as running:
        complete(running.url, 1)
        yield running


def complete(url: str, num_tokens: int) -> str:
    answer = httpx2.post(
        f"{url}/v1/completions", json={**BODY, "max_tokens": num_tokens}, timeout=DEADLINE_S
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def stream(url: str) -> str:
    """Return the text of a stream that ends as it should."""
    body = {**BODY, "max_tokens": NUM_TOKENS, "stream": True}
    texts = []
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        texts.append(choice["text"])
    assert choice["finish_reason"] == "length"
    return "".join(texts)


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/statm").read_text()
    return int(status.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(done: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def check_storm(server: RunningServer, idle: int, slow: int, endless: int) -> None:
    pid = server.process.pid
    before, rss_before = num_descriptors(pid), resident_bytes(pid)
    expected = complete(server.url, NUM_TOKENS)
    with storm(server.url, idle, slow, endless), ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = list(pool.map(stream, [server.url] * NUM_STREAMS))
        assert texts == [expected] * NUM_STREAMS
        assert num_descriptors(pid) <= before + idle + slow + endless + NUM_STREAMS + 50
        assert resident_bytes(pid) - rss_before < MAX_GROWTH_BYTES
        assert expected.startswith(complete(server.url, 4)[:2])
    wait_until(lambda: num_descriptors(pid) <= before + 10)
    assert server.log.stat().st_size < 2**20


@pytest.mark.slow
def test_streams_run_to_their_end_in_a_storm(server: RunningServer) -> None:
    check_storm(server, 200, 50, 20)


@pytest.mark.slow
def test_streams_run_to_their_end_in_a_full_storm(server: RunningServer) -> None:
    check_storm(server, 2000, 500, 200)


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Lets a process open nothing."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_the_server_serves_again_after_a_lack_of_descriptors_and_a_dead_engine(
    server: RunningServer,
) -> None:
    expected = complete(server.url, 8)
    (engine,) = server.engine_pids
    with no_descriptors(server.process.pid):
        os.kill(engine, signal.SIGKILL)
        # Connections wait in the kernel, and the supervisor fails to start an engine.
        with pytest.raises(httpx2.TimeoutException):
            httpx2.get(f"{server.url}/health", timeout=3)
    size = server.log.stat().st_size
    wait_until(lambda: httpx2.get(f"{server.url}/health", timeout=30).json()["status"] == "ready")
    assert complete(server.url, 8) == expected
    assert size < 2**20


@pytest.mark.slow
def test_https_in_a_real_server(server: RunningServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    model = str(server.log.parent / "model")
    with running_server(tmp_path / "log", "--model", model, *FLAGS, *flags) as secure:
        trusting = ssl.create_default_context(cafile=authority.certificate)
        with httpx2.Client(verify=trusting) as client:
            assert client.get(f"{secure.url}/version").status_code == 200
            refused = client.get(f"{secure.url}/version", headers={"host": "evil.example"})
            assert refused.status_code == 403 and "--allowed-hosts" in refused.text
