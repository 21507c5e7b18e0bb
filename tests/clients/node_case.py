"""Runs a case of tests/clients/node in a process of Node."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.clients.live import REPOSITORY, Live

FOLDER = REPOSITORY / "tests" / "clients" / "node"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").is_dir(),
    reason="Node is not installed: apt-get install nodejs npm, then make test-clients",
)


def run_case(live: Live, file: str, case: str) -> None:
    command = ["node", str(FOLDER / file), case, live.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout == f"passed {case}\n", done.stdout + done.stderr
