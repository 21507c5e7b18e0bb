"""An adapter's life from the command line alone, on a fresh data folder, while streams run.

LORAMUX_STREAMS sets how many (32 for the full run).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.registry_scene import Scene, ask, client_of
from tests.serve_factory import RunningServer

NUM_STREAMS = int(os.environ.get("LORAMUX_STREAMS", "8"))
NAME = "alice/flagger"
FIRST, SECOND = f"{NAME}@1.0.0", f"{NAME}@1.1.0"
# A server looks at SQLite every half second.
DEADLINE_S = 60.0


class CommandLine:
    def __init__(self, data: Path) -> None:
        self._data = data
        unset = {"LORAMUX_REGISTRY": "", "LORAMUX_DATA": ""}
        self._environment = {**os.environ, **unset, "COLUMNS": "240"}

    def run(self, *arguments: object) -> str:
        words = [str(argument) for argument in (*arguments, "--data", self._data)]
        done = subprocess.run(
            [sys.executable, "-m", "loramux.cli.main", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def ask_until(client: httpx2.Client, cid: str) -> dict[str, Any]:
    """Return the first receipt that names it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        receipt = ask(client, NAME)
        if receipt["adapter_cid"] == cid:
            return receipt
    raise AssertionError(f"{cid} is not served; the last receipt: {receipt}")


def keep_streaming(server: RunningServer, cids: list[str], is_over: threading.Event) -> None:
    """One stream after another; notes the CID in the receipt of each."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with client_of(server) as client:
        while not is_over.is_set():
            answer = client.post("/v1/completions", json=body)
            events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            assert events[-1] == "[DONE]", f"a stream was broken: {events[-1]}"
            told = json.loads(events[-2])["serving"]
            assert (told["status"], told["completion_tokens"]) == ("completed", 100)
            cids.append(told["adapter_cid"])


def move_under_streams(
    server: RunningServer, cli: CommandLine, first: str, second: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Promotes and rolls back while streams run; the receipts after each."""
    is_over, streamed = threading.Event(), list[str]()
    with ThreadPoolExecutor(NUM_STREAMS) as pool, client_of(server) as client:
        try:
            streams = [
                pool.submit(keep_streaming, server, streamed, is_over) for _ in range(NUM_STREAMS)
            ]
            deadline = time.monotonic() + DEADLINE_S
            while first not in streamed and time.monotonic() < deadline:
                ask(client, NAME)
            cli.run("promote", SECOND)
            moved = ask_until(client, second)
            deadline = time.monotonic() + DEADLINE_S
            while second not in streamed and time.monotonic() < deadline:
                ask(client, NAME)
            cli.run("rollback", NAME)
            rolled_back = ask_until(client, first)
        finally:
            is_over.set()
        for stream in streams:
            stream.result()
    assert set(streamed) == {first, second}
    return moved, rolled_back


@pytest.mark.slow
def test_push_promote_ask_and_roll_back_from_the_command_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first, second = (scene.make_adapter(f"v{number}", seed=number) for number in range(2))
    cli = CommandLine(scene.data)
    cli.run("push", scene.adapters / "v0", FIRST)
    cli.run("push", scene.adapters / "v1", SECOND)
    cli.run("promote", FIRST)
    with scene.serving("cli") as server:
        with client_of(server) as client:
            promoted = ask(client, NAME)
        assert promoted["adapter_cid"] == first, "prod wins over the highest version"
        assert promoted["adapters"][0]["alias"] == "prod"
        receipts = (promoted, *move_under_streams(server, cli, first, second))
    versions = [receipt["adapters"][0]["version"] for receipt in receipts]
    assert versions == ["1.0.0", "1.1.0", "1.0.0"]
    # Kept when the server has stopped, and told by the same command line.
    told = json.loads(cli.run("receipts", "--json", "--limit", 10_000, "--adapter", NAME))
    kept = {receipt["id"]: receipt for receipt in told["receipts"]}
    assert all(kept[receipt["id"]] == receipt for receipt in receipts)
    assert {receipt["adapter_cid"] for receipt in kept.values()} == {first, second}
