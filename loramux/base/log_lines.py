"""Keeps log messages on one line each, and clients from filling the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable


class OneLineRecord(logging.LogRecord):
    """A record that shows control characters, which requests and files may hold, as escapes."""

    def getMessage(self) -> str:  # noqa: N802
        return escaped(super().getMessage())


def escaped(text: str) -> str:
    """Replace what a terminal or a reader of lines would act on by its escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def use_one_line_records() -> None:
    """Apply to all loggers of this process."""
    logging.setLogRecordFactory(OneLineRecord)


class RepeatedLines(logging.Filter):
    """Lets one of many equal messages below ERROR pass in a time, and counts the others."""

    def __init__(
        self, interval_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._passed_at: dict[str, float] = {}
        self._num_hidden: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        key, now = str(record.msg), self._clock()
        if now - self._passed_at.get(key, -math.inf) < self._interval_s:
            self._num_hidden[key] = self._num_hidden.get(key, 0) + 1
            return False
        self._passed_at[key] = now
        num_hidden = self._num_hidden.pop(key, 0)
        if num_hidden:
            record.msg = f"{record.msg} (and {num_hidden} more like it)"
        return True


def limit_repeated_lines(*names: str) -> None:
    """Limits repeated messages of these loggers, which clients can cause at will."""
    for name in names:
        logging.getLogger(name).addFilter(RepeatedLines())
