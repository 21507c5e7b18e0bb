"""Keeps each log message on one line: text of requests and files may hold control characters."""

from __future__ import annotations

import logging


class OneLineRecord(logging.LogRecord):
    """A record whose message shows control characters as escapes."""

    def getMessage(self) -> str:  # noqa: N802
        return escaped(super().getMessage())


def escaped(text: str) -> str:
    """Replaces what a terminal or a reader of lines would act on by its escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def use_one_line_records() -> None:
    """Applies to all loggers of this process."""
    logging.setLogRecordFactory(OneLineRecord)
