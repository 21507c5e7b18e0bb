from __future__ import annotations

import pytest

from loramux.client import errors
from loramux.client.errors import (
    ClientError,
    Retryable,
    TimedOut,
    error_for_status,
    read_error,
)
from loramux.errors import LoramuxError


def test_one_except_catches_every_kind() -> None:
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value is not LoramuxError
    ]
    assert len(kinds) >= 12
    assert all(issubclass(kind, ClientError) for kind in kinds)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ('{"error": {"message": "bad", "param": "n"}}', "bad", "n"),
        ('{"error": {"message": "bad"}}', "bad", None),
        ('{"error": "bad"}', "bad", None),
        ('{"detail": "Not Found"}', "Not Found", None),
        ('{"detail": [{"msg": "x"}]}', "[{'msg': 'x'}]", None),
        ('{"message": "bad", "param": "n"}', "bad", "n"),
        ("Bad Gateway", "Bad Gateway", None),
        ("[1]", "[1]", None),
        ("", "", None),
    ],
)
def test_the_message_is_found_in_every_shape(body: str, message: str, param: str | None) -> None:
    assert read_error(body) == (message, param)


def test_an_empty_body_is_reported_by_its_status() -> None:
    assert str(error_for_status(502, "")) == "HTTP status 502."


def test_a_request_that_ran_out_of_its_own_time_is_not_sent_again() -> None:
    error = error_for_status(408, '{"error": {"message": "Too late."}}')
    assert isinstance(error, TimedOut) and not isinstance(error, Retryable)
    assert (str(error), error.status) == ("Too late.", 408)
