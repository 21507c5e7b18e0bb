"""`loramux serve --model org/name` against a hub: interrupted, resumed, then offline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.engine_factory import save_model_with_tokenizer
from tests.fault_server import Fault
from tests.hub_server import HubRepository, HubServer
from tests.serve_factory import running_server

NAME = "acme/tiny"
# The client writes pieces of 10 MiB.
PIECE_BYTES = 10 * 2**20
FLAGS = ("--model", NAME, "--dtype", "float32", "--device", "cpu", "--device-memory", "16MiB")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "model"
    save_model_with_tokenizer(folder, hidden_size=512, intermediate_size=2048)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files["model.safetensors"]) > 2 * PIECE_BYTES
    with HubServer() as server:
        server.repositories[NAME] = HubRepository({"main": files})
        yield server


def interrupt_after_one_piece(hub: HubServer, environment: dict[str, str], log: Path) -> None:
    """Start a server whose download stands still after the first piece, and presses Ctrl-C."""
    hub.storage.faults += [Fault(cut_at=PIECE_BYTES), Fault(is_silent=True)]
    command = [sys.executable, "-m", "loramux.cli.main", "serve", "--port", "0", *FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        assert hub.storage.wait_for_silence(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()


def ask(url: str) -> str:
    body = {"model": NAME, "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_a_model_is_fetched_resumed_and_then_served_offline(hub: HubServer, tmp_path: Path) -> None:
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    log = tmp_path / "log"
    interrupt_after_one_piece(hub, environment, log)
    assert "Stopped. The download resumes at the next start." in log.read_text()
    parts = list((tmp_path / "home").rglob("*.incomplete"))
    assert [part.stat().st_size for part in parts] == [PIECE_BYTES]
    hub.storage.seen.clear()
    with running_server(log, *FLAGS, environment=environment) as server:
        text = ask(server.url)
    assert hub.storage.requests("GET")[0].headers["range"] == f"bytes={PIECE_BYTES}-"
    assert f"Downloading {NAME} (" in log.read_text()
    hub.seen.clear()
    with running_server(log, *FLAGS, environment={**environment, "HF_HUB_OFFLINE": "1"}) as server:
        assert ask(server.url) == text
    assert hub.seen == []
