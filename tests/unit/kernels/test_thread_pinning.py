"""In processes of their own: what is pinned stays so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="no numba on this machine")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux only"),
    pytest.mark.slow,
]

SHOW = """
import os, sys
from loramux.kernels.cpu_jit.runtime import pin_workers, use_threads
num_threads = int(sys.argv[1])
use_threads(num_threads)
before = set(os.listdir("/proc/self/task"))
print(pin_workers(num_threads))
print(len(os.sched_getaffinity(0)))
for task in sorted(set(os.listdir("/proc/self/task")) - before, key=int):
    print(*os.sched_getaffinity(int(task)))
"""


def show(num_threads: int, **environment: str) -> list[str]:
    command = [sys.executable, "-c", SHOW, str(num_threads)]
    settings = {**os.environ, **environment}
    return subprocess.run(
        command, env=settings, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_each_worker_has_a_core_of_its_own_and_the_caller_may_go_anywhere() -> None:
    cores = sorted(os.sched_getaffinity(0))
    is_pinned, num_own, *others = show(len(cores))
    assert (is_pinned, int(num_own)) == ("True", len(cores))
    assert {core for core in others if " " not in core} == {str(core) for core in cores[1:]}


@pytest.mark.parametrize(
    ("num_threads", "environment"),
    [(1, {}), (10**6, {}), (len(os.sched_getaffinity(0)), {"OMP_PROC_BIND": "false"})],
)
def test_with_other_threads_or_a_choice_of_somebody_elses_nothing_is_pinned(
    num_threads: int, environment: dict[str, str]
) -> None:
    is_pinned, num_own, *others = show(num_threads, **environment)
    assert (is_pinned, int(num_own)) == ("False", len(os.sched_getaffinity(0)))
    assert all(len(cores.split()) == int(num_own) for cores in others)
