"""The Codex CLI, whose only API is a stream of POST /v1/responses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.live import QUESTION, Live
from tests.clients.node_case import FOLDER

CLIENT = "@openai/codex"
shows = pytest.mark.shows
# The answer to Codex is as long as the model makes it.
TIMEOUT_S = 900
PROGRAM = FOLDER / "node_modules" / ".bin" / "codex"
pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(
        not PROGRAM.exists(), reason="Codex is not installed: apt-get install nodejs npm"
    ),
]
# Its own instructions are longer than the context of the default model, and `web_search` is a tool
# that OpenAI runs.
CONFIGURATION = """
model = "shout"
model_provider = "loramux"
model_instructions_file = "{folder}/instructions.md"
web_search = "disabled"
[model_providers.loramux]
name = "loramux"
base_url = "{url}"
wire_api = "responses"
env_key = "LORAMUX_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def run_codex(live: Live, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    (folder / "instructions.md").write_text("You are a coding agent.")
    (folder / "config.toml").write_text(CONFIGURATION.format(folder=folder, url=live.v1))
    done = subprocess.run(
        [str(PROGRAM), "exec", "--json", "--skip-git-repo-check", *arguments, QUESTION],
        env={**os.environ, "CODEX_HOME": str(folder), "LORAMUX_KEY": "none"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@shows("text", "stream", "responses", "adapters")
def test_a_turn(live: Live, tmp_path: Path) -> None:
    """With all functions of Codex, some in a namespace, as its tools."""
    before = live.generated_tokens("shout")
    events = run_codex(live, tmp_path)
    (completed,) = [event for event in events if event["type"] == "turn.completed"]
    assert completed["usage"]["input_tokens"] > 1000
    kinds = {event["item"]["type"] for event in events if event["type"] == "item.completed"}
    assert kinds & {"agent_message", "command_execution"}, events
    assert live.generated_tokens("shout") - before >= completed["usage"]["output_tokens"] > 0


@shows("errors")
def test_an_unknown_model(live: Live, tmp_path: Path) -> None:
    events = run_codex(live, tmp_path, "--model", "no-such-model")
    (failed,) = [event for event in events if event["type"] == "turn.failed"]
    assert "no-such-model" in failed["error"]["message"]
