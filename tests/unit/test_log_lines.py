from __future__ import annotations

import logging

import pytest

from loramux.log_lines import OneLineRecord, escaped, use_one_line_records


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
