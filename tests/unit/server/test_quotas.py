"""Token buckets and admissions of tenants and keys, on a clock of the test."""

from __future__ import annotations

import random

import pytest

from loramux.errors import RateLimited
from loramux.registry.records import RecentUse
from loramux.server.auth.quotas import (
    Admission,
    QuotaTable,
    duration_text,
)
from loramux.types.limits import Limits, TenantSettings
from tests.registry_factory import FakeClock

KEY = "k1"


def make_table(
    clock: FakeClock, tenant: Limits | None = None, key: Limits | None = None
) -> QuotaTable:
    table = QuotaTable(clock=clock)
    set_limits(table, tenant, key)
    return table


def set_limits(table: QuotaTable, tenant: Limits | None, key: Limits | None = None) -> None:
    tenants = {} if tenant is None else {"acme": TenantSettings(limits=tenant)}
    table.replace(tenants, {} if key is None else {KEY: key})


def admit(table: QuotaTable, num_tokens: int = 1, *, key: str | None = KEY) -> Admission:
    admission = table.open("acme", key)
    assert admission is not None
    admission.begin(num_tokens)
    return admission


def refusal(table: QuotaTable, num_tokens: int = 1, *, key: str | None = KEY) -> RateLimited:
    with pytest.raises(RateLimited) as raised:
        admit(table, num_tokens, key=key)
    return raised.value


@pytest.mark.parametrize("seed", range(5))
def test_no_minute_admits_more_than_a_full_bucket_and_its_refill(seed: int) -> None:
    clock, rng, limit = FakeClock(), random.Random(seed), 50
    table = make_table(clock, Limits(requests_per_minute=limit))
    admitted: list[float] = []
    for _ in range(1000):
        clock.advance(rng.expovariate(2))
        try:
            admit(table).end(1)
            admitted.append(clock.now)
        except RateLimited as error:
            assert error.retry_after_s is not None
    for start in admitted:
        num = sum(start <= at < start + 60 for at in admitted)
        assert num <= 2 * limit
    elapsed_min = (clock.now - admitted[0]) / 60
    assert len(admitted) <= limit * (elapsed_min + 1) + 1
    assert len(admitted) >= limit * elapsed_min * 0.9


def test_without_limits_nothing_is_counted() -> None:
    table = make_table(FakeClock())
    assert table.open("acme", KEY) is None and table.open("", None) is None
    set_limits(table, Limits(adapters=3))
    assert table.open("acme", KEY) is None


def test_the_refusal_names_limit_value_rest_and_time() -> None:
    table = make_table(FakeClock(), Limits(requests_per_minute=2))
    admit(table), admit(table)
    error = refusal(table)
    assert error.code == "requests_per_minute"
    assert error.retry_after_s == pytest.approx(30)
    text = "The tenant acme may use 2 requests per minute, and 0 are left; try again in 30 s."
    assert str(error) == text


def test_tokens_are_charged_by_prompt_and_corrected_at_the_end() -> None:
    clock = FakeClock()
    table = make_table(clock, Limits(tokens_per_minute=100))
    admission = admit(table, 40)
    assert admission.headers()["x-ratelimit-remaining-tokens"] == "60"
    admission.end(130)
    assert admission.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(table, 1).retry_after_s == pytest.approx(31 * 0.6)
    clock.advance(31 * 0.6 + 0.01)
    admit(table, 1)


def test_a_request_that_never_ran_costs_nothing() -> None:
    table = make_table(FakeClock(), Limits(tokens_per_minute=100, requests_per_minute=1))
    admit(table, 100).end(None)
    admit(table, 100)


def test_an_end_counts_once_and_only_after_a_begin() -> None:
    table = make_table(FakeClock(), Limits(concurrent_requests=1))
    unused = table.open("acme", KEY)
    assert unused is not None
    unused.end(5)
    first = admit(table)
    assert refusal(table).code == "concurrent_requests"
    first.end(5), first.end(5)
    admit(table)
    assert refusal(table).retry_after_s == 1


def test_a_prompt_over_the_limit_is_never_admitted() -> None:
    error = refusal(make_table(FakeClock(), Limits(tokens_per_minute=100)), 101)
    assert error.retry_after_s is None
    assert "100 tokens per minute" in str(error) and "needs 101" in str(error)


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
def test_a_limit_of_zero_admits_nothing(limit: str) -> None:
    assert refusal(make_table(FakeClock(), Limits(**{limit: 0}))).retry_after_s is None


def test_both_tenant_and_key_must_admit_and_a_refusal_charges_neither() -> None:
    tenant, key = Limits(requests_per_minute=3), Limits(requests_per_minute=1)
    table = make_table(FakeClock(), tenant, key)
    admit(table)
    for _ in range(5):
        assert "API key k1" in str(refusal(table))
    admit(table, key="k2"), admit(table, key=None)
    assert "tenant acme" in str(refusal(table, key="k2"))


def test_the_headers_are_of_the_account_with_the_least_left() -> None:
    table = make_table(
        FakeClock(),
        Limits(requests_per_minute=60, tokens_per_minute=1000),
        Limits(requests_per_minute=10),
    )
    assert admit(table, 100).headers() == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "6s",
    }


def test_changed_limits_keep_what_was_used_and_what_runs() -> None:
    table = make_table(FakeClock(), Limits(requests_per_minute=10, concurrent_requests=9))
    running = [admit(table) for _ in range(4)]
    set_limits(table, Limits(requests_per_minute=5, concurrent_requests=9))
    admit(table)
    assert refusal(table).code == "requests_per_minute"
    set_limits(table, Limits(requests_per_minute=100, concurrent_requests=5))
    assert refusal(table).code == "concurrent_requests"
    running[0].end(1)
    assert admit(table).headers()["x-ratelimit-remaining-requests"] == "94"
    set_limits(table, None)
    assert table.open("acme", KEY) is None
    running[1].end(1)


def test_what_was_used_before_the_start_is_taken_from_the_buckets() -> None:
    clock = FakeClock()
    table = make_table(clock, Limits(requests_per_minute=10, tokens_per_minute=100))
    table.recall([RecentUse("acme", KEY, 4, 60), RecentUse("other", "", 9, 900)])
    assert refusal(table, 41).retry_after_s == pytest.approx(0.6)
    assert admit(table, 40).headers()["x-ratelimit-remaining-requests"] == "5"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (59.5, "1m0s"), (90, "1m30s"), (360, "6m0s")],
)
def test_durations_have_the_form_of_openai(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
