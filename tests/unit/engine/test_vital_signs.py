from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loramux.worker.process_view import Doing, Look, ProcessView
from loramux.worker.pulse import Counts, Pulse
from loramux.worker.vital_signs import (
    DEADLOCK_S,
    LAST_LIMIT_S,
    QUIET_S,
    START_LIMIT_S,
    Death,
    KillCause,
    VitalSigns,
)

STEP_LIMIT_S = 120.0
TICK_S = 0.5
IN_STEP, BETWEEN = Counts(10, 7), Counts(10, 8)


class Scene:
    """Signs of a process that does one thing all the time."""

    def __init__(self, doing: Doing, *, is_ready: bool = True) -> None:
        self.signs = VitalSigns(STEP_LIMIT_S, lambda: Look(doing, doing))
        self.signs.is_ready = is_ready
        self.beats = 10

    def watch(
        self, seconds: float, marks: int, *, beats: bool = False
    ) -> tuple[Death | None, float]:
        """Return why the process was found dead, and after how many seconds."""
        self.signs.observe(Counts(self.beats, marks), TICK_S)
        for tick in range(int(seconds / TICK_S)):
            self.beats += beats
            death = self.signs.observe(Counts(self.beats, marks), TICK_S)
            if death is not None:
                return death, (tick + 1) * TICK_S
        return None, seconds


@pytest.mark.parametrize("doing", [d for d in Doing if d is not Doing.SLEEPS])
@pytest.mark.parametrize("marks", [7, 8])
def test_a_process_that_may_be_slow_lives_until_the_last_limit(doing: Doing, marks: int) -> None:
    """It was killed after 4 s, also when it was stopped for 5 s or waited for the disk."""
    scene = Scene(doing)
    death, after_s = scene.watch(2 * LAST_LIMIT_S, marks)
    assert death is not None and death.cause is KillCause.SILENT
    assert after_s == LAST_LIMIT_S >= 60
    assert str(doing) in death.text
    assert ("in step 4" if marks == 7 else "between steps") in death.text


def test_new_requests_are_refused_while_a_process_is_quiet() -> None:
    scene = Scene(Doing.STOPPED)
    scene.watch(QUIET_S - TICK_S, 7)
    assert not scene.signs.is_quiet
    scene.signs.observe(Counts(scene.beats, 7), TICK_S)
    assert scene.signs.is_quiet
    scene.signs.observe(Counts(scene.beats + 1, 7), TICK_S)
    assert not scene.signs.is_quiet


@pytest.mark.parametrize("marks", [7, 8])
def test_a_process_whose_threads_all_sleep_is_dead_soon(marks: int) -> None:
    death, after_s = Scene(Doing.SLEEPS).watch(LAST_LIMIT_S, marks)
    assert death is not None and death.cause is KillCause.DEADLOCK
    assert DEADLOCK_S <= after_s <= DEADLOCK_S + 2


@pytest.mark.parametrize("doing", [Doing.SLEEPS, Doing.RUNS, Doing.UNKNOWN])
def test_a_step_that_nothing_keeps_from_running_has_a_limit(doing: Doing) -> None:
    death, after_s = Scene(doing).watch(2 * STEP_LIMIT_S, 7, beats=True)
    assert death is not None and death.cause is KillCause.HUNG_STEP and "in step 4" in death.text
    assert after_s <= STEP_LIMIT_S


@pytest.mark.parametrize("doing", [Doing.STOPPED, Doing.WAITS_FOR_DISK, Doing.WAITS_FOR_CORE])
def test_time_in_which_a_step_could_not_run_does_not_count(doing: Doing) -> None:
    death, _ = Scene(doing).watch(2 * STEP_LIMIT_S, 7, beats=True)
    assert death is None


def test_an_idle_engine_may_idle() -> None:
    death, _ = Scene(Doing.SLEEPS).watch(10 * STEP_LIMIT_S, 8, beats=True)
    assert death is None


@pytest.mark.parametrize("doing", list(Doing))
def test_only_the_start_limit_counts_before_the_process_is_ready(doing: Doing) -> None:
    death, after_s = Scene(doing, is_ready=False).watch(2 * START_LIMIT_S, 0)
    assert death is not None and death.cause is KillCause.START and after_s == START_LIMIT_S


def test_the_counters_cross_into_another_process() -> None:
    pulse, number = Pulse.create()
    code = (
        "import sys; from loramux.worker.pulse import Pulse; pulse = Pulse(int(sys.argv[1]));"
        "pulse.beat(); pulse.beat(); pulse.begin_step()"
    )
    subprocess.run([sys.executable, "-c", code, str(number)], pass_fds=[number], check=True)
    os.close(number)
    assert pulse.counts == Counts(beats=2, marks=1)
    assert pulse.counts.is_in_step and pulse.counts.num_steps == 1


@contextmanager
def running(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def seen(view: ProcessView, wanted: Doing) -> bool:
    """Whether the process is seen doing this before long: the machine of a test may be busy."""
    view.look()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if view.look().process is wanted:
            return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_real_processes_are_seen_to_sleep_to_run_and_to_be_stopped() -> None:
    with running("import time; print(1, flush=True); time.sleep(600)") as pid:
        view = ProcessView(pid)
        assert view.look().process is Doing.UNKNOWN, "nothing to compare with"
        assert seen(view, Doing.SLEEPS)
        os.kill(pid, signal.SIGSTOP)
        assert seen(view, Doing.STOPPED)
    with running("print(1, flush=True)\nwhile True: pass") as pid:
        assert seen(ProcessView(pid), Doing.RUNS)


def test_a_machine_without_proc_shows_nothing(tmp_path: Path) -> None:
    assert ProcessView(os.getpid(), root=tmp_path).look().process is Doing.UNKNOWN


@pytest.mark.parametrize(
    ("states", "run_ticks", "expected"),
    [
        ("SSD", 0, Doing.WAITS_FOR_DISK),
        ("SR", 0, Doing.WAITS_FOR_CORE),
        ("ST", 0, Doing.STOPPED),
        ("SS", 0, Doing.SLEEPS),
        ("SR", 10_000_000, Doing.RUNS),
    ],
)
def test_states_of_threads_are_read_without_schedstat_too(
    tmp_path: Path, states: str, run_ticks: int, expected: Doing
) -> None:
    def write(ticks: int) -> None:
        for number, state in enumerate(states):
            task = tmp_path / "1" / "task" / str(number + 1)
            task.mkdir(parents=True, exist_ok=True)
            fields = [state, *["0"] * 10, str(ticks), "0"]
            (task / "stat").write_text(f"{number + 1} (a ) b) {' '.join(fields)}\n")

    view = ProcessView(1, root=tmp_path)
    write(0)
    view.look()
    write(run_ticks)
    assert view.look().process is expected
