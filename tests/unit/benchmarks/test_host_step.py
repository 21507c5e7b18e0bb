"""The host's step, on a small batch: what is timed, and that every run plans the same."""

from __future__ import annotations

import pytest

from benchmarks.host_step import make_parser, measure, run_once

SMALL = ["--sequences", "6", "--pages", "300", "--batch-tokens", "64", "--warm-up", "40"]


@pytest.mark.parametrize("num_adapters", [0, 12])
def test_runs_of_the_same_traffic_plan_the_same(num_adapters: int) -> None:
    """Catches a digest that differs by itself: it could not tell a changed scheduler."""
    options = make_parser().parse_args([*SMALL, "--steps", "30"])
    digests = {run_once(options, num_adapters)[1] for _ in range(2)}
    assert len(digests) == 1


def test_every_part_of_a_step_is_timed() -> None:
    options = make_parser().parse_args([*SMALL, "--steps", "5", "--runs", "1"])
    row = measure(options, 3)
    parts = ["(make_room)", "(commit)", "add", "plan", "apply", "launched", "items"]
    assert list(row) == ["adapters", *parts, "all", "p99", "plans"]
    assert float(str(row["plan"])) > 0
