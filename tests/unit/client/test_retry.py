from __future__ import annotations

import pytest

from loramux.client.errors import RateLimited
from loramux.client.retry import RetryPolicy, parse_retry_after


def busy(retry_after_s: float | None = None) -> RateLimited:
    error = RateLimited("busy", status=429)
    error.retry_after_s = retry_after_s
    return error


@pytest.mark.parametrize("luck", [0.0, 0.5, 0.999])
def test_delays_grow_and_stay_under_their_limit(luck: float) -> None:
    policy = RetryPolicy(max_retries=5000, draw=lambda: luck)
    delays = [policy.delay_s(failures, busy()) for failures in (1, 2, 3, 8, 5000)]
    assert all(delay is not None and 0 < delay <= policy.max_delay_s for delay in delays)
    assert delays == sorted(delays, key=lambda delay: delay or 0)


def test_jitter_spreads_clients() -> None:
    slow, fast = (RetryPolicy(draw=lambda luck=luck: luck).delay_s(1, busy()) for luck in (0.9, 0))
    assert slow is not None and fast is not None and slow > fast


@pytest.mark.parametrize("luck", [0.0, 0.999])
def test_no_retry_comes_before_the_requested_delay(luck: float) -> None:
    delay = RetryPolicy(draw=lambda: luck).delay_s(1, busy(4.0))
    assert delay is not None and 4.0 <= delay < 5.0


def test_the_last_failure_and_an_overlong_wait_end_it() -> None:
    policy = RetryPolicy(max_retries=2)
    assert policy.delay_s(2, busy()) is not None
    assert policy.delay_s(3, busy()) is None
    assert policy.delay_s(1, busy(policy.max_delay_s + 1)) is None
    assert RetryPolicy(max_retries=0).delay_s(1, busy()) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.25", 0.25),
        ("-5", 0.0),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, clock=lambda: 60.0) == seconds
