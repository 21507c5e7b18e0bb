"""Deadlines and retries with exponential backoff."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from loramux.errors import SourceFailed

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock and the random numbers, which tests replace."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random
    """Returns a number in [0, 1) for the jitter of the delay."""


SYSTEM_TIMING = Timing()


class Deadline:
    def __init__(self, timeout_s: float, timing: Timing = SYSTEM_TIMING) -> None:
        self.timing = timing
        self._timeout_s = timeout_s
        self._end_s = timing.clock() + timeout_s

    @property
    def left_s(self) -> float:
        return self._end_s - self.timing.clock()

    def check(self) -> None:
        if self.left_s <= 0:
            raise SourceFailed(
                f"The source took longer than {self._timeout_s:g} s. Try again, or allow more time."
            )


class Backoff:
    """Waits longer after each consecutive failure, and raises the last one when it gives up."""

    def __init__(self, deadline: Deadline, *, max_attempts: int) -> None:
        self._deadline = deadline
        self._max_attempts = max_attempts
        self._num_failures = 0

    def reset(self) -> None:
        self._num_failures = 0

    def wait(self, error: SourceFailed) -> None:
        self._num_failures += 1
        delay_s = self._delay_s(error)
        is_over = self._num_failures >= self._max_attempts or delay_s >= self._deadline.left_s
        if is_over or not error.is_temporary:
            raise error
        _log.info("Trying again in %.1f s: %s", delay_s, error)
        self._deadline.timing.sleep(delay_s)

    def _delay_s(self, error: SourceFailed) -> float:
        grown_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._num_failures - 1, 16))
        jittered_s = grown_s * (1 + self._deadline.timing.draw()) / 2
        return max(jittered_s, error.retry_after_s or 0.0)


def retrying(action: Callable[[], T], deadline: Deadline, *, max_attempts: int) -> T:
    backoff = Backoff(deadline, max_attempts=max_attempts)
    while True:
        deadline.check()
        try:
            return action()
        except SourceFailed as error:
            backoff.wait(error)


def parse_retry_after(text: str | None, clock: Callable[[], float] = time.time) -> float | None:
    """Parse a Retry-After header, which is a number of seconds or a date; else None."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - clock()
        except ValueError:
            return None
    return seconds if 0 < seconds < float("inf") else None
