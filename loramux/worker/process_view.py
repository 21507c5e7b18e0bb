"""What the threads of another process do, as Linux shows it under /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# Part of the time since the last look that counts as running at all.
_LEAST_RUN_SHARE = 0.01
# A thread that wants a core and gets less of it waits for it.
_STARVED_SHARE = 0.25
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12


class Doing(StrEnum):
    """The values complete the sentence "the process ..."."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    STOPPED = "is stopped by a signal or a debugger"
    WAITS_FOR_DISK = "waits for the disk"
    WAITS_FOR_CORE = "waits for a core"
    UNKNOWN = "cannot be looked at"

    @property
    def is_slow(self) -> bool:
        """Whether it would go on by itself, as soon as others let it."""
        return self in (Doing.STOPPED, Doing.WAITS_FOR_DISK, Doing.WAITS_FOR_CORE)


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen since the last look."""

    process: Doing
    """What all threads do together."""
    main_thread: Doing
    """The same without the disk reads of other threads."""


NOT_SEEN = Look(Doing.UNKNOWN, Doing.UNKNOWN)


@dataclass(frozen=True, slots=True)
class _Thread:
    state: str
    run_s: float


class ProcessView:
    """Compares a process with itself at the last look."""

    def __init__(self, pid: int, *, root: Path = Path("/proc")) -> None:
        self._pid = pid
        self._tasks = root / str(pid) / "task"
        self._run_s: float | None = None
        self._looked_s = 0.0

    def look(self) -> Look:
        """Return what the threads do; what they ran is unknown at the first look."""
        now = time.monotonic()
        try:
            threads = {int(path.name): _read(path) for path in self._tasks.iterdir()}
        except (OSError, ValueError, IndexError):  # Not Linux; a process or thread that ended.
            self._run_s = None
            return NOT_SEEN
        total_s = sum(thread.run_s for thread in threads.values())
        before_s, elapsed_s = self._run_s, now - self._looked_s
        self._run_s, self._looked_s = total_s, now
        if before_s is None or not elapsed_s or self._pid not in threads:
            return NOT_SEEN
        share = (total_s - before_s) / elapsed_s
        states = [thread.state for thread in threads.values()]
        main = threads[self._pid].state
        computing = [state for state in states if state != "D"]
        return Look(_doing(states, share), _doing([main, *computing], share))


def _doing(states: Iterable[str], run_share: float) -> Doing:
    found = set(states)
    if found & {"T", "t"}:
        return Doing.STOPPED
    if "D" in found:
        return Doing.WAITS_FOR_DISK
    if "R" in found and run_share < _STARVED_SHARE:
        return Doing.WAITS_FOR_CORE
    return Doing.RUNS if run_share > _LEAST_RUN_SHARE else Doing.SLEEPS


def _read(task: Path) -> _Thread:
    fields = (task / "stat").read_text().rpartition(") ")[2].split()
    try:
        run_s = int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):  # Not in every kernel.
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        run_s = ticks / os.sysconf("SC_CLK_TCK")
    return _Thread(fields[_STATE], run_s)
