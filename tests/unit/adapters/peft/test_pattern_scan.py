from __future__ import annotations

import json
import subprocess
import sys

from loramux.adapters.peft import pattern_scan
from loramux.adapters.peft.pattern_scan import scan

KEYS = ["layers.0.q_proj", "layers.12.v_proj", "norm"]


def test_the_first_pattern_that_matches_wins() -> None:
    assert scan([".*q", "layers"], KEYS, whole=False) == [(0, None), (1, None), None]


def test_a_whole_match_needs_the_whole_key() -> None:
    assert scan(["layers", ".*v_proj"], KEYS, whole=True) == [None, (1, None), None]


def test_the_group_idx_is_handed_out() -> None:
    hits = scan([r"layers\.(?P<idx>\d+)\."], KEYS, whole=False)
    assert hits == [(0, "0"), (0, "12"), None]


def test_it_runs_alone_as_a_script() -> None:
    task = {"patterns": [".*q"], "keys": KEYS, "whole": False}
    command = [sys.executable, "-I", "-S", pattern_scan.__file__]
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[0, None], None, None]
