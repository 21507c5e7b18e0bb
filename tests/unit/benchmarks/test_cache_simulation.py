"""The eviction study: its workloads, and the comparison of policies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.report import section_lines
from benchmarks.studies.cache_model import POLICIES, Outcome
from benchmarks.studies.cache_simulation import (
    Cell,
    all_workloads,
    arrivals_of,
    compare,
    hit_rate,
    p99,
    report,
    run_all,
    simulate,
)

ROOT = Path(__file__).resolve().parents[3]


def test_a_workload_runs_with_every_policy_and_on_every_size() -> None:
    small = [workload for workload in all_workloads(40) if workload.num_adapters != 1000]
    cells = run_all(small, num_requests=40, seeds=[1], step_s=0.006)
    assert len(cells) == sum(len(workload.shares) for workload in small) * len(POLICIES)
    assert len({(cell.row, cell.policy) for cell in cells}) == len(cells)


def test_sizes_cover_all_adapters_in_a_random_order() -> None:
    workload = all_workloads(40)[0]
    arrivals, sizes = arrivals_of(workload, 40, seed=1)
    assert len(arrivals) == 40 and len(sizes) == 1000
    assert list(sizes) != sorted(sizes)


def test_a_frequency_policy_beats_recency_on_a_skewed_trace() -> None:
    workload = next(w for w in all_workloads(3000) if w.name == "S-LoRA α=0.3 cv=1")
    arrivals, sizes = arrivals_of(workload, 3000, seed=1)
    hits = {
        policy: simulate(policy, arrivals, sizes, share=0.1).found["device"]
        for policy in ("LRU", "LFU", "loramux")
    }
    assert hits["loramux"] > hits["LFU"] > hits["LRU"]


def test_two_processes_give_the_result_of_one() -> None:
    chosen = [workload for workload in all_workloads(40) if "Punica" in workload.name]
    one, two = (
        run_all(chosen, num_requests=40, seeds=[1], step_s=0.006, num_processes=count)
        for count in (1, 2)
    )
    assert one == two


def test_a_run_of_some_workloads_writes_a_report_and_of_none_is_an_error(tmp_path: Path) -> None:
    def program(only: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.studies.cache_simulation", "--only", only]
        command += ["--out", str(tmp_path), "--name", "found"]
        return subprocess.run(
            [*command, "--requests", "40", "--seeds", "2"], cwd=ROOT, capture_output=True, text=True
        )

    text = program("Punica un").stdout
    assert "of 3 rows" in text and "Punica uniform, 10%" in text
    assert "40 with each of the seeds 301 to 302" in text
    assert (tmp_path / "found.json").is_file()
    refusal = program("no such thing")
    assert refusal.returncode == 2 and "'no such thing'" in refusal.stderr


def test_the_program_needs_no_torch() -> None:
    code = "import sys, benchmarks.studies.cache_simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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


def test_p99_of_a_hundred_values_is_the_largest() -> None:
    assert p99([float(value) for value in range(100)]) == 99.0
    assert p99([1.0]) == 1.0


def test_figures_are_means_over_the_seeds() -> None:
    made = cell("LRU", outcome(50, 50, 0, wait_s=0.001), outcome(70, 30, 0, wait_s=0.003))
    assert made.device_hits == pytest.approx(60.0)
    assert made.mean_wait_ms == pytest.approx(4.0)
    assert made.moved_gb["host"] == pytest.approx(1.0)


def test_ours_is_compared_with_the_best_other_policy_of_each_figure() -> None:
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
    text = "\n".join(
        line for section in report(cells, ours="ours") for line in section_lines(section)
    )
    assert "on 0 of 1 rows; not on: some trace, 5%." in text
    assert "Mean wait: best or within 1% of the best on 1 of 1 rows." in text
    assert "**-10.0**" in text and "| -50.0% |" in text


def test_zero_waits_are_not_divided_by() -> None:
    cells = [cell(name, outcome(100, 0, 0, wait_s=0.0)) for name in ("other", "ours")]
    (comparison,) = compare(cells, "ours")
    assert comparison.wait_holds and comparison.wait_change == 0


def test_the_margin_of_a_change_comes_from_the_differences_per_seed() -> None:
    """Seeds differ far more than policies do: they must not widen the interval."""
    others = [outcome(50, 50, 0, wait_s=wait_s) for wait_s in (0.001, 0.1)]
    ours = [outcome(50, 50, 0, wait_s=wait_s + 0.001) for wait_s in (0.001, 0.1)]
    (comparison,) = compare([cell("other", *others), cell("ours", *ours)], "ours")
    assert comparison.wait_change == pytest.approx(0.001 / 0.0505)
    assert comparison.wait_margin == pytest.approx(0.0, abs=1e-9)
    (noisy,) = compare([cell("other", *others), cell("ours", *reversed(ours))], "ours")
    assert noisy.wait_margin > 1
