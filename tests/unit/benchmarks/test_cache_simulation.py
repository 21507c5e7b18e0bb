from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.studies.cache_model import POLICIES
from benchmarks.studies.cache_simulation import all_workloads, arrivals_of, run_all, simulate

ROOT = Path(__file__).resolve().parents[3]


def test_a_workload_runs_with_every_policy_and_on_every_size() -> None:
    small = [workload for workload in all_workloads(40) if workload.num_adapters != 1000]
    cells = run_all(small, num_requests=40, seeds=[1], step_s=0.006)
    assert len(cells) == sum(len(workload.shares) for workload in small) * len(POLICIES)
    assert len({(cell.row, cell.policy) for cell in cells}) == len(cells)


def test_sizes_cover_adapters_that_no_request_names_and_their_order_tells_nothing() -> None:
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


def test_two_processes_find_what_one_does_in_the_same_order() -> None:
    chosen = [workload for workload in all_workloads(40) if "Punica" in workload.name]
    one, two = (
        run_all(chosen, num_requests=40, seeds=[1], step_s=0.006, num_processes=count)
        for count in (1, 2)
    )
    assert one == two


def test_a_run_may_be_of_some_workloads_only_and_none_is_an_error() -> None:
    def program(only: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.studies.cache_simulation", "--only", only]
        return subprocess.run(
            [*command, "--requests", "40", "--seeds", "2"], cwd=ROOT, capture_output=True, text=True
        )

    report = program("Punica un").stdout
    assert "of 3 rows" in report and "Punica uniform, 10%" in report
    assert "40 with each of the seeds 301 to 302" in report
    refusal = program("no such thing")
    assert refusal.returncode == 2 and "'no such thing'" in refusal.stderr


def test_the_program_needs_no_torch() -> None:
    code = "import sys, benchmarks.studies.cache_simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
