"""`loramux chat` as a program: piped lines, and a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loramux.cli.main import app
from tests.scripted_server import (
    DONE,
    Received,
    Scripted,
    ScriptedServer,
    chat_chunk,
    event,
    model_list,
    reply_events,
    scripted_server,
)

ROOT = Path(__file__).resolve().parents[3]


def respond(request: Received) -> Scripted:
    if request.path == "/v1/models":
        return model_list("smol", ["pirate"])
    name = request.fields.get("model") or "smol"
    if request.fields["messages"][-1]["content"] == "forever":
        return reply_events(event(chat_chunk("blah ", model=name)), endless=True)
    return reply_events(event(chat_chunk(f"I am {name}.", "stop", model=name)), DONE)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        server.answer = respond
        yield server


def invoke(server: ScriptedServer, *options: str, lines: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *options], input=lines)


def test_piped_lines_are_answered(server: ScriptedServer) -> None:
    result = invoke(server, lines="hello\n/adapter pirate\nhello\n")
    assert result.exit_code == 0, result.output
    assert result.output == "smol: I am smol.\npirate answers from now on.\npirate: I am pirate.\n"


def test_options_reach_the_server(server: ScriptedServer) -> None:
    options = ("--model", "pirate", "--system", "Be brief.", "--temperature", "0")
    result = invoke(server, *options, "--max-tokens", "5", "--api-key", "k", lines="hello")
    assert result.exit_code == 0, result.output
    sent = server.received[-1]
    assert sent.headers["authorization"] == "Bearer k"
    assert (sent.fields["model"], sent.fields["temperature"]) == ("pirate", 0)
    assert sent.fields["max_tokens"] == 5
    assert sent.fields["messages"][0] == {"role": "system", "content": "Be brief."}


def test_bytes_that_are_no_text_do_not_end_the_chat(server: ScriptedServer) -> None:
    result = invoke(server, lines=b"caf\xff\nhello\n")
    assert result.output.count("I am smol.") == 2


def test_a_script_sees_what_was_not_answered(server: ScriptedServer) -> None:
    assert invoke(server, "--model", "pirat", lines="hello\n").exit_code == 1
    assert invoke(server, lines="/nothing\nhello\n").exit_code == 1
    assert invoke(server, "--url", "localhost", lines="").exit_code == 2


def read_until(terminal: int, words: str) -> str:
    seen = ""
    while words not in seen:
        assert select.select([terminal], [], [], 30)[0], f"{words!r} did not come after {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


def test_a_terminal_gets_history_completion_and_ctrl_c(server: ScriptedServer) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "loramux.cli.main", "chat", "--url", server.url]
    program = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True
    )
    os.close(theirs)
    try:
        assert "Adapters: pirate" in re.sub(r"\x1b\[[0-9;]*m", "", read_until(mine, "base> "))
        os.write(mine, b"/adapter p\t\n")
        read_until(mine, "pirate> ")
        os.write(mine, b"hello\n")
        assert "I am pirate." in read_until(mine, "pirate> ")
        os.write(mine, b"\x1b[A\n")
        assert "I am pirate." in read_until(mine, "pirate> ")
        os.write(mine, b"forever\n")
        read_until(mine, "blah blah")
        os.kill(program.pid, signal.SIGINT)
        assert "(stopped)" in read_until(mine, "pirate> ")
        # Between the prompt and readline's first look at the keys a signal is lost: press again.
        for _ in range(10):
            os.kill(program.pid, signal.SIGINT)
            if select.select([mine], [], [], 3)[0]:
                break
        # Not before readline has the terminal again: until then Ctrl-D is not a key.
        assert "ends the chat." in read_until(mine, "pirate> ")
        os.write(mine, b"\x04")
        assert program.wait(20) == 0
    finally:
        program.kill()
        program.wait()
        os.close(mine)
    assert [request.fields["messages"][-1]["content"] for request in server.received[2:]] == [
        "hello",
        "hello",
        "forever",
    ]
