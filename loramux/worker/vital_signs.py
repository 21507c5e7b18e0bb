"""Decides whether an engine process is well, only slow, or dead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from loramux.worker.process_view import NOT_SEEN, Doing, Look
from loramux.worker.pulse import Counts

# Without a heartbeat for so long, new requests are refused, and nothing is killed.
QUIET_S = 4.0
# The heartbeat thread wakes twice a second. If for so long no thread of the process ran, wanted a
# core or waited for the disk, none will.
DEADLOCK_S = 15.0
# A process that others keep from running is killed after this time without a heartbeat.
LAST_LIMIT_S = 60.0
# Silence of a process that is not ready yet: it imports libraries and reads weights.
START_LIMIT_S = 600.0
# A look costs some system calls: there is none while the counters move.
_LOOK_AFTER_S = 1.0


class KillCause(StrEnum):
    """Why the server kills an engine; values of the label of loramux:engine_kills_total."""

    START = "start"
    HUNG_STEP = "hung_step"
    DEADLOCK = "deadlock"
    SILENT = "silent"
    REPLY = "reply"


@dataclass(frozen=True, slots=True)
class Death:
    """Why a process is to be killed."""

    cause: KillCause
    text: str


class VitalSigns:
    """Follows the counters of a process; `observe` is called at short intervals."""

    def __init__(self, step_limit_s: float, look: Callable[[], Look]) -> None:
        self._step_limit_s = step_limit_s
        self._look = look
        self._counts = Counts(0, 0)
        self._silent_s = 0.0
        self._asleep_s = 0.0
        self._still_s = 0.0
        """Since the last beginning or end of a step."""
        self._hung_s = 0.0
        """The part of it inside a step in which nothing kept the main thread from running."""
        self._seen = NOT_SEEN
        self.is_ready = False

    @property
    def silent_s(self) -> float:
        return self._silent_s

    @property
    def is_quiet(self) -> bool:
        return self._silent_s >= QUIET_S

    @property
    def doing(self) -> Doing:
        return self._seen.process

    @property
    def place(self) -> str:
        """Where the step loop is."""
        counts = self._counts
        return f"in step {counts.num_steps}" if counts.is_in_step else "between steps"

    def observe(self, counts: Counts, elapsed_s: float) -> Death | None:
        """Take the counters `elapsed_s` after the last ones; return why the process is dead."""
        before, self._counts = self._counts, counts
        has_marked, has_beaten = counts.marks != before.marks, counts.beats != before.beats
        self._silent_s = 0.0 if has_beaten or has_marked else self._silent_s + elapsed_s
        self._still_s = 0.0 if has_marked else self._still_s + elapsed_s
        if not self.is_ready:
            return self._death_at_start()
        is_suspicious = max(self._silent_s, self._still_s * counts.is_in_step) > _LOOK_AFTER_S
        self._seen = self._look() if is_suspicious else NOT_SEEN
        is_asleep = self._silent_s > 0 and self._seen.process is Doing.SLEEPS
        self._asleep_s = self._asleep_s + elapsed_s if is_asleep else 0.0
        if has_marked or not counts.is_in_step:
            self._hung_s = 0.0
        elif not self._seen.main_thread.is_slow:
            self._hung_s += elapsed_s
        return self._death()

    def _death_at_start(self) -> Death | None:
        if self._silent_s < START_LIMIT_S:
            return None
        return Death(KillCause.START, f"gave no sign of life for {self._silent_s:.0f} s")

    def _death(self) -> Death | None:
        if self._hung_s >= self._step_limit_s:
            return Death(KillCause.HUNG_STEP, f"hung {self.place} for {self._hung_s:.0f} s")
        if self._asleep_s >= DEADLOCK_S:
            text = f"slept {self.place} with all threads for {self._silent_s:.0f} s"
            return Death(KillCause.DEADLOCK, text)
        if self._silent_s >= LAST_LIMIT_S:
            text = f"gave no sign of life {self.place} for {self._silent_s:.0f} s; it {self.doing}"
            return Death(KillCause.SILENT, text)
        return None
