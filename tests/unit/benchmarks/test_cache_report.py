from __future__ import annotations

import pytest

from benchmarks.studies.cache_model import Outcome
from benchmarks.studies.cache_simulation import Cell, compare, hit_rate, p99, report


def outcome(device: int, host: int, disk: int, *, wait_s: float) -> Outcome:
    return Outcome(
        waits_s=[wait_s, 3 * wait_s],
        found={"device": device, "host": host, "disk": disk, "remote": 0},
        moved_bytes={"host": 10**9, "disk": 0, "remote": 0},
    )


def cell(policy: str, *outcomes: Outcome) -> Cell:
    return Cell.of("some trace, 5%", policy, outcomes)


def test_a_hit_rate_counts_the_requests_that_reached_the_tier() -> None:
    found = outcome(50, 30, 20, wait_s=0.0)
    rates = [hit_rate(found, tier) for tier in ("device", "host", "disk", "remote")]
    assert rates == [50.0, 60.0, 100.0, 100.0]


def test_p99_of_a_hundred_values_is_the_largest_but_none() -> None:
    assert p99([float(value) for value in range(100)]) == 99.0
    assert p99([1.0]) == 1.0


def test_figures_are_means_over_the_seeds() -> None:
    made = cell("LRU", outcome(50, 50, 0, wait_s=0.001), outcome(70, 30, 0, wait_s=0.003))
    assert made.device_hits == pytest.approx(60.0)
    assert made.mean_wait_ms == pytest.approx(4.0)
    assert made.moved_gb["host"] == pytest.approx(1.0)


def test_ours_is_compared_with_the_best_of_the_others_for_each_figure_by_itself() -> None:
    cells = [
        cell("hits", outcome(60, 40, 0, wait_s=0.004)),
        cell("waits", outcome(40, 60, 0, wait_s=0.002)),
        cell("ours", outcome(59, 41, 0, wait_s=0.0021)),
    ]
    (comparison,) = compare(cells, "ours")
    assert (comparison.most_hits.policy, comparison.least_wait.policy) == ("hits", "waits")
    assert comparison.points == pytest.approx(-1.0) and comparison.hits_hold
    assert comparison.wait_change == pytest.approx(0.05) and not comparison.wait_holds


def test_the_report_names_the_rows_where_ours_is_not_best() -> None:
    cells = [
        cell("other", outcome(60, 40, 0, wait_s=0.002)),
        cell("ours", outcome(50, 50, 0, wait_s=0.001)),
    ]
    text = report(cells, ours="ours", settings={"Command": "`run`"})
    assert "- Command: `run`" in text
    assert "on 0 of 1 rows; not on: some trace, 5%." in text
    assert "Mean wait: best or within 1% of the best on 1 of 1 rows." in text
    assert "**-10.0**" in text and "| -50.0% |" in text


def test_no_wait_at_all_is_not_a_division_by_zero() -> None:
    cells = [cell(name, outcome(100, 0, 0, wait_s=0.0)) for name in ("other", "ours")]
    (comparison,) = compare(cells, "ours")
    assert comparison.wait_holds and comparison.wait_change == 0


def test_the_margin_of_a_change_comes_from_the_differences_seed_by_seed() -> None:
    """Seeds differ far more than policies do: they must not widen the interval."""
    others = [outcome(50, 50, 0, wait_s=wait_s) for wait_s in (0.001, 0.1)]
    ours = [outcome(50, 50, 0, wait_s=wait_s + 0.001) for wait_s in (0.001, 0.1)]
    (comparison,) = compare([cell("other", *others), cell("ours", *ours)], "ours")
    assert comparison.wait_change == pytest.approx(0.001 / 0.0505)
    assert comparison.wait_margin == pytest.approx(0.0, abs=1e-9)
    (noisy,) = compare([cell("other", *others), cell("ours", *reversed(ours))], "ours")
    assert noisy.wait_margin > 1
