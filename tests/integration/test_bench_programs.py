"""Each program of `loramux bench` that needs no GPU, run small: it ends with a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = {
    "engine": "--requests 4 --input 8 --output 4 --adapters 1 2",
    "images": "--batches 1,2 --size 32 --steps 2 --rounds 1",
    "many-adapters": "--few 2 --many 6 --rounds 1 --streams 2 --tokens 4 --kills 1",
    "router": "--seconds 2 --rounds 1",
    "routing": "--replicas 4 --adapters 50 --requests 200",
    "structured": "--batch 4 --tokens 8 --rounds 1 --adapters 1",
    "cache-simulation": "--seeds 1 --requests 200",
    "connection-storm": "--streams 2 --output 8 --rounds 1 --idle 20 --slow 5 --endless 3",
    "fairness": "--seconds 4 --tokens 4",
    "guard-overhead": "--requests 4 --output 4 --blocks 1 --rounds 2",
    "load-interference": "--loads 3 --streams 2 --steps 4 --repeats 1 --pool 256",
    "merge-mode": "--ranks 4 --batches 1 --context 8 --steps 2",
    "page-cost": "--pages 2 --requests 4 --output 4 --rounds 2 --idle 1",
    "receipt-overhead": "--requests 4 --output 4 --blocks 1 --rounds 2",
    "slow-streams": "--streams 100 --rounds 1 --hold 1",
    "tier-trace": "--adapters 20 --minutes 0.1 --pool 4",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_with_a_report(name: str, tmp_path: Path) -> None:
    words = [*PROGRAMS[name].split(), "--out", str(tmp_path), "--name", "found"]
    command = [sys.executable, "-m", "loramux.cli.main", "bench", name, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((tmp_path / "found.json").read_text())
    assert (tmp_path / "found.md").is_file()
    rows = [row for section in record.get("sections", [record]) for row in section["rows"]]
    assert rows
