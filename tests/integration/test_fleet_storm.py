"""A short storm over a fleet; `python -m tests.fleet_storm` runs the long one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.fleet_storm import run_storm

SECONDS = float(os.environ.get("LORAMUX_FLEET_STORM_S", "60"))
SEED = int(os.environ.get("LORAMUX_FLEET_STORM_SEED", "7"))


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_load_is_lost_in_a_storm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = asyncio.run(run_storm(tmp_path, seed=SEED, seconds=SECONDS))
    with capsys.disabled():
        print(f"\n{report}")
    assert not report.wrong
    assert report.outcomes["complete"] > 20 and report.changes["load 200"]
