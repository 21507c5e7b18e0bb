"""A bucket on a clock of the test."""

from __future__ import annotations

import math

import pytest

from loramux.base.token_bucket import TokenBucket
from tests.registry_factory import FakeClock


def test_a_bucket_holds_a_minute_and_refills_at_a_constant_rate() -> None:
    clock = FakeClock()
    bucket = TokenBucket(60, 1, clock)
    bucket.take(60)
    assert (bucket.level, bucket.wait_s(1), bucket.wait_s(60)) == (0, 1, 60)
    clock.advance(30)
    assert bucket.level == pytest.approx(30)
    clock.advance(3600)
    assert bucket.level == 60


def test_it_gives_what_it_holds_and_no_more() -> None:
    bucket = TokenBucket(2, 1, FakeClock())
    assert [bucket.try_take() for _ in range(4)] == [True, True, False, False]
    assert bucket.wait_s(3) == math.inf


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = TokenBucket(10, 1, FakeClock())
    bucket.take(4)
    bucket.resize(100, 10)
    assert (bucket.level, bucket.capacity) == (96, 100)
    bucket.resize(2, 1)
    assert bucket.level == -2
