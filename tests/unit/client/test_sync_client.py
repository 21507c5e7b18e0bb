"""The synchronous client is the asynchronous one without await."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_synchronous_client_is_written_from_the_asynchronous_one() -> None:
    command = [sys.executable, "scripts/write_sync_client.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
