"""A version that was replaced or undone answers through no router, wherever it still is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loramux.router.app import RouterApp
from loramux.router.desired import FileDesired
from loramux.router.fleet import State
from loramux.router.named import names_in, parts_of
from loramux.types.expected import expected_text, read_expected
from tests.unit.router.fake_replica import TIMEOUT_S, run
from tests.unit.router.fake_servers import (
    UNLOAD,
    Fleet,
    Server,
    change,
    infer,
    load,
    router_of,
    second_router,
)

Routers = tuple[RouterApp, RouterApp]


@asynccontextmanager
async def two_routers(fleet: Fleet, folder: Path) -> AsyncIterator[Routers]:
    path = folder / "adapters.json"
    async with (
        router_of(fleet, FileDesired(path)) as first,
        second_router(fleet, FileDesired(path)) as second,
    ):
        yield first, second


async def answers(routers: Routers, name: str) -> set[tuple[int, str]]:
    """Return status and CID of what both routers answer from each of the servers."""
    found = set()
    for app in routers:
        for first in range(3):
            # The reports make each of them the cheapest once.
            for number, replica in enumerate(app.fleet.replicas.values()):
                replica.waiting_tokens = 0 if number == first else 10**6
            reply = await infer(app, name)
            found.add((reply.status, reply.json.get("cid", "")))
    return found


async def load_in_vain(routers: Routers, server: Server, name: str, source: str) -> None:
    """Load in place while a server gets no changes, so that the load is undone."""
    server.gate.is_open = False
    assert await load(routers[0], name, source, load_inplace=True) == 504


def test_a_load_that_arrives_after_it_was_undone_answers_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = Fleet()
        slow = fleet.servers[0]
        async with two_routers(fleet, tmp_path) as routers:
            assert await load(routers[0], "n", "/a") == 200
            await load_in_vain(routers, slow, "n", "/b")
            while len(slow.gate.held) < 2:
                await asyncio.sleep(0.01)
            # What was sent last arrives first.
            for event in reversed(slow.gate.held[1:]):
                event.set()
            await asyncio.sleep(0.1)
            slow.gate.held[0].set()
            while slow.has["n"][1] != "cid-b":
                await asyncio.sleep(0.01)
            assert await answers(routers, "n") == {(200, "cid-a")}
            # The requests have shown what it has.
            slow.gate.is_open = True
            await fleet.until("n", *["cid-a"] * 3)

    run(work())


def test_a_load_that_arrives_after_a_later_one_answers_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = Fleet()
        slow = fleet.servers[0]
        async with two_routers(fleet, tmp_path) as routers:
            assert await load(routers[0], "n", "/a") == 200
            await load_in_vain(routers, slow, "n", "/b")
            slow.gate.is_open = True
            assert await load(routers[1], "n", "/c", load_inplace=True) == 200
            for event in reversed(slow.gate.held):
                await asyncio.sleep(0.1)
                event.set()
            while slow.has["n"][1] != "cid-b":
                await asyncio.sleep(0.01)
            assert await answers(routers, "n") == {(200, "cid-c")}
            await fleet.until("n", *["cid-c"] * 3)

    run(work())


def test_a_server_that_missed_a_load_answers_through_no_router(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with two_routers(fleet, tmp_path) as routers:
            assert await load(routers[0], "n", "/a") == 200
            # The loops have seen it.
            await asyncio.sleep(0.6)
            missed = fleet.servers[0]
            missed.gate.is_open = False
            # Away for the first router alone.
            usable = routers[0].fleet.usable
            url = fleet.replicas[0].url
            routers[0].fleet.usable = lambda now: [  # type: ignore[method-assign]
                one for one in usable(now) if one.name != url
            ]
            assert await load(routers[0], "n", "/b", load_inplace=True) == 200
            assert fleet.cids("n") == ["cid-a", "cid-b", "cid-b"]
            assert routers[1].fleet.replicas[url].state is State.READY
            assert await answers(routers, "n") == {(200, "cid-b")}
            assert (await change(routers[0], UNLOAD, lora_name="n")).status == 200
            assert fleet.cids("n") == ["cid-a", "", ""]
            assert await answers(routers, "n") == {(404, "")}

    run(work())


def test_a_first_load_is_seen_once_it_is_complete(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with two_routers(fleet, tmp_path) as routers:
            fleet.servers[0].gate.is_open = False
            # Held for as long as the test takes.
            routers[0]._reconciler.load_s = TIMEOUT_S
            loading = asyncio.create_task(load(routers[0], "n", "/a"))
            while fleet.cids("n") != ["", "cid-a", "cid-a"]:
                await asyncio.sleep(0.01)
            assert await answers(routers, "n") == {(404, "")}
            fleet.servers[0].gate.held[0].set()
            assert await loading == 200
            # At once, through the other router too.
            assert await answers((routers[1], routers[0]), "n") == {(200, "cid-a")}

    run(work())


def test_requests_are_answered_all_through_a_load_in_place(tmp_path: Path) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with two_routers(fleet, tmp_path) as routers:
            assert await load(routers[0], "n", "/a") == 200
            fleet.servers[0].load_s = 0.5
            loading = asyncio.create_task(load(routers[0], "n", "/b", load_inplace=True))
            while not loading.done():
                assert await answers(routers, "n") <= {(200, "cid-a"), (200, "cid-b")}
                await asyncio.sleep(0.01)
            assert await loading == 200
            assert await answers(routers, "n") == {(200, "cid-b")}

    run(work())


def test_what_was_loaded_is_served_while_the_record_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with two_routers(fleet, tmp_path) as routers:
            assert await load(routers[0], "n", "/a") == 200
            await asyncio.sleep(0.6)

            def fail(self: FileDesired) -> int:
                raise OSError("away")

            monkeypatch.setattr(FileDesired, "revision", fail)
            await asyncio.sleep(0.8)
            assert await answers(routers, "n") == {(200, "cid-a")}
            assert await load(routers[0], "n", "/b", load_inplace=True) == 503
            assert fleet.cids("n") == ["cid-a"] * 3

    run(work())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n", {"n"}),
        ("a+0.3*b", {"a+0.3*b", "a", "b"}),
        ("base:n", {"base:n", "n"}),
        ("llama3:8b:a + 2*b", {"llama3:8b:a + 2*b", "8b:a + 2*b", "a + 2*b", "a", "b"}),
    ],
)
def test_all_forms_of_a_name_are_found(text: str, names: set[str]) -> None:
    assert names <= parts_of(text)


def test_names_in_the_prompt_of_an_image_are_found() -> None:
    body = b'{"model": "m", "prompt": "a fox <lora:ink:0.8> <lora:night>"}'
    assert names_in(["m"], body) == {"m", "ink", "night"}
    assert names_in([":" * 100_000], b"") == frozenset()


def test_the_header_holds_any_name() -> None:
    expected = {"a,b=c|d é": frozenset({"x:1", "y:2"}), "gone": frozenset[str]()}
    text = expected_text(expected)
    assert text.isascii() and read_expected([text]) == expected
    # All lines of the header count.
    assert read_expected(["n=a|b", "n=b|c"]) == {"n": {"b"}}
    with pytest.raises(ValueError, match="'n' is not"):
        read_expected(["n"])
