from __future__ import annotations

import logging

import pytest

from loramux.base.log_lines import OneLineRecord, RepeatedLines, escaped, use_one_line_records


def test_a_message_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    use_one_line_records()
    try:
        logging.getLogger("loramux.test").warning("adapter %s", "a\nERROR b\x1b[2J\u202e")
    finally:
        logging.setLogRecordFactory(before)
    (record,) = caplog.records
    assert isinstance(record, OneLineRecord)
    assert record.getMessage() == r"adapter a\nERROR b\x1b[2J\u202e"


def test_text_stays_as_it_is() -> None:
    assert escaped("Grüße 1,5 €") == "Grüße 1,5 €"


def test_equal_messages_pass_once_in_a_time_and_errors_always() -> None:
    now, lines = [0.0], RepeatedLines(10, clock=lambda: now[0])

    def passed(level: int, message: str, *given: object) -> str | None:
        record = logging.LogRecord("a", level, "", 0, message, given, None)
        return record.getMessage() if lines.filter(record) else None

    assert passed(logging.WARNING, "refused %s", 1) == "refused 1"
    assert [passed(logging.WARNING, "refused %s", one) for one in (2, 3)] == [None, None]
    assert passed(logging.WARNING, "another") == "another"
    assert passed(logging.ERROR, "refused %s", 4) == "refused 4"
    now[0] = 10.0
    assert passed(logging.WARNING, "refused %s", 5) == "refused 5 (and 2 more like it)"
    now[0] = 30.0
    assert passed(logging.WARNING, "refused %s", 6) == "refused 6"
