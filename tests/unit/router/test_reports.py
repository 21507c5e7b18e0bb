"""Reports of replicas that this router cannot use, or only in part."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import msgspec
import pytest

from loramux.router.fleet import Replica, State, key_of_name
from loramux.router.follow import Followers
from loramux.router.reports import UnusableReport, read_report
from loramux.types.residency import Tier
from tests.unit.router.fake_replica import FakeReplica, ask, report, run, running_router

KEY = key_of_name("a")
UNUSABLE: list[dict[str, Any]] = [
    {"tier_s": [0.1] * 3},
    {"tier_s": [0.1] * 5 + [-1.0]},
    {"tier_s": [0.1] * 5 + [1e300]},
    {"moves": {KEY: -1}},
    {"moves": {"not hexadecimal!": 5}},
    {"moves": {"ab": 5}},
    {"state": "dancing"},
    {"step_s": -0.1},
    {"token_s": 1e9},
    {"open": -1},
    {"slots": 2**60},
    {"generation": -7},
]


@pytest.mark.parametrize("fields", UNUSABLE)
def test_a_report_with_an_impossible_value_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnusableReport):
        read_report(msgspec.json.encode(report(**fields)))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b"[" * 10_000])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(UnusableReport):
        read_report(body)


def test_a_number_that_is_none_is_refused() -> None:
    made = msgspec.json.encode(report()).replace(b'"step_s":0.005', b'"step_s":1e999')
    with pytest.raises(UnusableReport):
        read_report(made)
    assert math.isfinite(read_report(msgspec.json.encode(report())).step_s)


def test_a_faster_tier_of_a_newer_server_counts_as_the_device() -> None:
    newer = report(moves={KEY: 7}, tier_s=[0.5, 0.5, 0.06, 0.002, 0.001, 0.0, 0.0, 0.0])
    found = read_report(msgspec.json.encode(newer))
    assert found.moves == {KEY: Tier.DEVICE} and len(found.tier_s) == len(Tier)


@pytest.mark.parametrize("fields", UNUSABLE)
def test_one_odd_report_breaks_nothing(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def work() -> None:
        odd, *others = [FakeReplica(str(i)) for i in range(3)]
        async with running_router(odd, *others) as app:
            odd.fields |= fields
            while app.fleet.replicas[odd.url].state is not State.UNKNOWN:
                await asyncio.sleep(0.01)
            for number in range(12):
                reply = await ask(app, body={"model": f"a{number % 3}"})
                assert (reply.status, reply.json["from"] != "0") == (200, True)
            await asyncio.sleep(0.5)
            odd.fields.clear()
            while app.fleet.replicas[odd.url].state is not State.READY:
                await asyncio.sleep(0.01)

    run(work())
    told = [one for one in caplog.messages if "cannot be used" in one]
    assert len(told) == 1


def test_following_goes_on_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, num_errors = Followers._report, 0

    async def failing(self: Followers, replica: Replica, *, full: bool) -> Any:
        nonlocal num_errors
        if num_errors < 2:
            num_errors += 1
            raise KeyError("unexpected")
        return await real(self, replica, full=full)

    async def work() -> None:
        replica = FakeReplica("0")
        async with running_router(replica) as app:
            assert app.fleet.replicas[replica.url].state is State.READY
            monkeypatch.setattr(Followers, "_report", failing)
            while num_errors < 2 or app.fleet.replicas[replica.url].state is not State.READY:
                await asyncio.sleep(0.01)

    run(work())
    assert sum("starts again" in one for one in caplog.messages) == 2


def test_looking_for_members_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.router.follow._LOOK_S", 0.05)

    async def work() -> None:
        first, second = FakeReplica("0"), FakeReplica("1")
        await second.start()

        class Failing:
            num_errors = 0

            async def current(self) -> dict[str, str]:
                if self.num_errors < 2:
                    self.num_errors += 1
                    raise RuntimeError("unexpected")
                return {first.url: first.url, second.url: second.url}

            async def changed(self, timeout_s: float) -> None:
                await asyncio.sleep(timeout_s)

        async with running_router(first) as app:
            app._followers._members = Failing()
            while len(app.fleet.replicas) < 2:
                await asyncio.sleep(0.01)
        await second.stop()

    run(work())
