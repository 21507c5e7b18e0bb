from __future__ import annotations

import pytest

from loramux.errors import SourceFailed
from loramux.sources.retry import Backoff, Deadline, parse_retry_after, retrying
from tests.unit.sources.source_factory import FakeTime


def failing(times: list[SourceFailed], answer: str = "done"):  # type: ignore[no-untyped-def]
    left = list(times)

    def action() -> str:
        if left:
            raise left.pop(0)
        return answer

    return action


def test_waits_grow_and_are_spread() -> None:
    time = FakeTime()
    deadline = Deadline(100.0, time.timing)
    action = failing([SourceFailed("x")] * 4)
    assert retrying(action, deadline, max_attempts=5) == "done"
    assert time.sleeps_s == [0.375, 0.75, 1.5, 3.0]


def test_the_last_failure_is_what_the_caller_sees() -> None:
    time = FakeTime()
    errors = [SourceFailed(str(index)) for index in range(5)]
    with pytest.raises(SourceFailed, match="2"):
        retrying(failing(errors), Deadline(100.0, time.timing), max_attempts=3)
    assert len(time.sleeps_s) == 2


def test_what_will_not_pass_is_not_tried_again() -> None:
    time = FakeTime()
    with pytest.raises(SourceFailed):
        retrying(
            failing([SourceFailed("no", is_temporary=False)]),
            Deadline(100.0, time.timing),
            max_attempts=9,
        )
    assert time.sleeps_s == []


def test_a_wait_that_the_source_asks_for_is_kept() -> None:
    time = FakeTime()
    action = failing([SourceFailed("busy", retry_after_s=7.0)])
    retrying(action, Deadline(100.0, time.timing), max_attempts=2)
    assert time.sleeps_s == [7.0]


def test_no_wait_exceeds_the_deadline() -> None:
    time = FakeTime()
    with pytest.raises(SourceFailed, match="busy"):
        retrying(
            failing([SourceFailed("busy", retry_after_s=3600.0)]),
            Deadline(100.0, time.timing),
            max_attempts=2,
        )
    assert time.sleeps_s == []


def test_after_the_deadline_nothing_is_tried() -> None:
    time = FakeTime()
    deadline = Deadline(10.0, time.timing)
    time.now_s = 10.0
    with pytest.raises(SourceFailed, match="longer than 10 s"):
        retrying(failing([]), deadline, max_attempts=2)


def test_progress_starts_the_count_anew() -> None:
    time = FakeTime()
    backoff = Backoff(Deadline(1000.0, time.timing), max_attempts=2)
    for _ in range(5):
        backoff.reset()
        backoff.wait(SourceFailed("x"))
    with pytest.raises(SourceFailed):
        backoff.wait(SourceFailed("x"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("-3", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, clock=lambda: 60.0) == seconds
