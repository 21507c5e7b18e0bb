from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.timing import StepTime, drift_of, mean_of

COLD = StepTime(batch=4, step_s=1.0, graph_s=0.8, context=64.0, prompt_tokens_per_s=9.0)


def test_several_timings_have_a_mean() -> None:
    found = mean_of([COLD, replace(COLD, step_s=2.0, graph_s=1.2)])
    assert found.step_s == 1.5 and found.tokens_per_s == pytest.approx(4 / 1.5)
    assert found.graph_s == pytest.approx(1.0) and found.batch == 4


def test_without_graphs_there_is_no_mean_graph_time() -> None:
    alone = replace(COLD, graph_s=None)
    assert mean_of([alone, alone]).graph_s is None


def test_drift_compares_the_last_quarter_with_the_first() -> None:
    assert drift_of([0.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]) == 0.5
    assert drift_of([5.0, 6.0]) == 1.0
