"""`loramux top` against a real HTTP server: one frame, a live screen, and no server at all."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from loramux.cli.main import app
from loramux.cli.top import Frame, watch
from loramux.client.errors import ClientError, ConnectFailed
from loramux.client.replies import EngineInfo
from tests.scripted_server import (
    Received,
    Scripted,
    ScriptedServer,
    reply_error,
    reply_json,
    scripted_server,
)

ROOT = Path(__file__).resolve().parents[3]
STATS: dict[str, Any] = {
    "model": "smol",
    "status": "ready",
    "running": 3,
    "waiting": 2,
    "pages": 100,
    "free_pages": 25,
    "page_bytes": 2**20,
    "tiers": [{"tier": "device", "budget_bytes": 2**20, "hits": 9}, {"tier": "host", "hits": 1}],
}
PIRATE = {"id": "pirate", "cid": "c1", "rank": 8, "bytes": 2**20, "tier": "device", "waiting": 1}


def answer(request: Received) -> Scripted:
    if request.path == "/v1/stats":
        return reply_json(STATS)
    assert request.path.startswith("/v1/adapters?order=busiest&limit=")
    return reply_json({"object": "list", "data": [PIRATE], "total": 1})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        server.answer = answer
        yield server


def invoke(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["top", "--url", url, *options], env={"COLUMNS": "140"})


@pytest.mark.parametrize("options", [("--once",), ()])
def test_one_frame_shows_tiers_batch_queue_and_adapters(
    server: ScriptedServer, options: tuple[str, ...]
) -> None:
    """Without a terminal, as here, one frame is all there is."""
    result = invoke(server.url, "--adapters", "7", "--api-key", "k", *options)
    assert result.exit_code == 0, result.output
    for text in ("smol", "3 running", "2 waiting", "75% of 100 MiB", "90.0%", "pirate", "host"):
        assert text in result.output
    assert server.received[-1].path.endswith("limit=7")
    assert server.received[-1].headers["authorization"] == "Bearer k"


def test_no_server_is_one_clear_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = invoke(url, "--once")
    assert result.exit_code == 1
    assert f"No server answers at {url}" in result.output and "Traceback" not in result.output
    assert invoke("localhost:8000").exit_code == 2


def test_a_server_of_another_kind_is_reported(server: ScriptedServer) -> None:
    server.answer = lambda request: reply_error(404)
    result = invoke(server.url, "--once")
    assert result.exit_code == 1 and "is not loramux" in result.output


def test_while_the_engine_restarts_the_rest_is_still_shown(server: ScriptedServer) -> None:
    restarting = STATS | {"status": "restarting"}
    server.answer = lambda request: (
        reply_json(restarting) if request.path == "/v1/stats" else reply_error(503)
    )
    result = invoke(server.url, "--once")
    assert result.exit_code == 0 and "restarting" in result.output


def frame(**fields: Any) -> Frame:
    engine = EngineInfo(model="smol", status="ready", **fields)
    return Frame(url="u", engine=engine, adapters=(), taken_s=0.0, clock_s=0.0)


def watched(takes: list[Frame | ClientError], keys: list[str | type[KeyboardInterrupt]]) -> str:
    def take(last: Frame) -> Frame:
        taken = takes.pop(0)
        if isinstance(taken, ClientError):
            raise taken
        return taken

    def wait_for_key(timeout_s: float) -> str:
        key = keys.pop(0)
        if not isinstance(key, str):
            raise key
        return key

    shown: list[Any] = []
    watch(take, frame(running=1), shown.append, wait_for_key, 1.0)
    assert not keys and not takes
    texts = []
    for one in shown:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(one)
        texts.append(captured.get())
    return "\n=====\n".join(texts)


def test_q_and_ctrl_c_leave() -> None:
    assert watched([frame(running=5)], ["", "q"]).count("=====") == 1
    assert watched([], [KeyboardInterrupt]).count("=====") == 0


def test_an_unreachable_server_is_shown_and_polled_again() -> None:
    text = watched([ConnectFailed("nobody there"), frame(running=7)], ["", "x", "q"])
    first, second, third = text.split("=====")
    assert "No answer" not in first + third
    assert "No answer: nobody there" in second and "1 running" in second
    assert "7 running" in third


def read_until(terminal: int, words: str) -> str:
    seen = ""
    while words not in seen:
        assert select.select([terminal], [], [], 30)[0], f"{words!r} did not come after {seen!r}"
        seen += re.sub(r"\x1b\[[0-9;]*m", "", os.read(terminal, 65536).decode(errors="replace"))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("way_out", ["q", "ctrl-c"])
def test_a_terminal_is_left_as_it_was(server: ScriptedServer, way_out: str) -> None:
    mine, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "loramux.cli.main", "top", "--url", server.url]
    program = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
        env={**os.environ, "COLUMNS": "140", "LINES": "50", "TERM": "xterm"},
    )  # fmt: skip
    try:
        read_until(mine, "3 running")
        read_until(mine, "3 running")
        if way_out == "q":
            os.write(mine, b"q")
        else:
            os.kill(program.pid, signal.SIGINT)
        read_until(mine, "\x1b[?1049l")
        assert program.wait(20) == 0
        assert termios.tcgetattr(theirs)[3] == before[3]
    finally:
        program.kill()
        program.wait()
        os.close(theirs)
        os.close(mine)
