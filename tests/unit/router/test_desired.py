"""Adapters loaded at run time are on all replicas or on none, through faults of each part."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loramux.registry.registry import Registry
from loramux.router.desired import FileDesired, MemoryDesired
from loramux.types.desired import DesiredAdapter, DesiredState
from tests.unit.router.fake_replica import run
from tests.unit.router.fake_servers import (
    ADMIN,
    LOAD,
    OWN,
    TENANT,
    UNLOAD,
    Fleet,
    change,
    infer,
    load,
    router_of,
    second_router,
)


@pytest.fixture(params=["memory", "file", "registry"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that opens the store again, as another router does."""
    if request.param == "memory":
        memory = MemoryDesired()
        yield lambda: memory
    elif request.param == "file":
        yield lambda: FileDesired(tmp_path / "adapters.json")
    else:
        with Registry(tmp_path / "registry.db") as registry:
            yield lambda: registry.desired("default")


def test_a_load_is_on_all_and_comes_back_after_restarts(store: Any) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, store()) as app:
            assert await load(app, "n", "/a") == 200
            assert fleet.cids("n") == ["cid-a"] * 3
            # Most of the fleet at once.
            fleet.restart(0, 1)
            await fleet.until("n", *["cid-a"] * 3)
            assert (await change(app, UNLOAD, lora_name="n")).status == 200
            # A server that the router does not use yet is brought to it before it is used.
            await fleet.until("n", "", "", "")
            assert (await change(app, UNLOAD, lora_name="n")).status == 404
            fleet.restart(1)
            assert await load(app, "m", "/b") == 200
            await fleet.until("m", *["cid-b"] * 3)
            assert fleet.cids("n") == ["", "", ""]

    run(work())


def test_another_router_goes_on_with_what_one_has_loaded(store: Any) -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, store()) as first, second_router(fleet, store()) as second:
            assert await load(first, "n", "/a") == 200
            assert await load(second, "m", "/b") == 200
            assert (await change(second, UNLOAD, lora_name="n")).status == 200
            assert await load(first, "o", "/c") == 200
            await asyncio.sleep(1)
            # Neither loads again what the other has loaded.
            assert [one.num_loads for one in fleet.servers] == [3, 3, 3]
            first._tasks.clear()
            fleet.restart(0, 1, 2)
            await fleet.until("m", *["cid-b"] * 3)
            await fleet.until("o", *["cid-c"] * 3)
            assert fleet.cids("n") == ["", "", ""]

    run(work())


def test_a_router_that_starts_again_knows_what_was_loaded(store: Any) -> None:
    async def work() -> None:
        fleet, opened = Fleet(), store()
        async with router_of(fleet, opened) as app:
            assert await load(app, "n", "/a") == 200
            assert await load(app, "m", "/b") == 200
            assert (await change(app, UNLOAD, lora_name="m")).status == 200
        fleet.restart(1)
        # One was away when another was unloaded.
        fleet.servers[2].has["m"] = ("/b", "cid-b")
        async with router_of(fleet, store()):
            await fleet.until("n", *["cid-a"] * 3)
            await fleet.until("m", "", "", "")

    run(work())


def test_a_load_goes_on_without_its_client() -> None:
    async def work() -> None:
        fleet = Fleet()
        for server in fleet.servers:
            server.load_s = 0.3
        async with router_of(fleet, MemoryDesired()) as app:
            leaves = asyncio.Event()
            asked = asyncio.create_task(
                change(app, LOAD, leaves=leaves, lora_name="n", lora_path="/a")
            )
            while not fleet.servers[0].num_loads:
                await asyncio.sleep(0.01)
            leaves.set()
            await asked
            while app._reconciler.desired.adapters["n"].state is not DesiredState.WANTED:
                await asyncio.sleep(0.01)
            assert fleet.cids("n") == ["cid-a"] * 3
            fleet.restart(0)
            await fleet.until("n", *["cid-a"] * 3)

    run(work())


def test_a_load_that_one_refuses_is_undone() -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, MemoryDesired()) as app:
            fleet.servers[1].refused.add("n")
            reply = await change(app, LOAD, lora_name="n", lora_path="/a")
            assert reply.status == 422 and reply.json["error"]["message"] == "no n"
            assert fleet.cids("n") == ["", "", ""]
            fleet.restart(0)
            await asyncio.sleep(0.3)
            assert fleet.cids("n") == ["", "", ""]
            fleet.servers[1].refused.clear()
            assert await load(app, "n", "/a") == 200

    run(work())


def test_a_load_in_place_that_one_refuses_restores_the_old_version() -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, MemoryDesired()) as app:
            assert await load(app, "n", "/a") == 200
            assert await load(app, "n", "/b") == 400
            fleet.servers[2].refused.add("n")
            assert await load(app, "n", "/b", load_inplace=True) == 422
            assert fleet.cids("n") == ["cid-a"] * 3
            fleet.servers[2].refused.clear()
            assert await load(app, "n", "/b", load_inplace=True) == 200
            assert fleet.cids("n") == ["cid-b"] * 3

    run(work())


def test_an_adapter_that_servers_were_started_with_is_restored_too() -> None:
    async def work() -> None:
        fleet = Fleet()
        for server in fleet.servers:
            server.has["given"] = ("/a", "cid-a")
        async with router_of(fleet, MemoryDesired()) as app:
            fleet.servers[0].refused.add("given")
            assert await load(app, "given", "/b", load_inplace=True) == 422
            fleet.servers[0].refused.clear()
            await fleet.until("given", *["cid-a"] * 3)

    run(work())


def test_files_that_were_overwritten_are_never_served_by_the_old_name() -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, MemoryDesired()) as app:
            assert await load(app, "n", "/a") == 200
            fleet.files["/a"] = "cid-other"
            fleet.restart(1)
            replica = app.fleet.replicas[fleet.replicas[1].url]
            while "n" not in replica.lacking or fleet.cids("n")[1]:
                await asyncio.sleep(0.01)
            for _ in range(10):
                assert (await infer(app, "n")).json == {"cid": "cid-a"}
            # In place the new files are right everywhere.
            assert await load(app, "n", "/a", load_inplace=True) == 200
            await fleet.until("n", *["cid-other"] * 3)

    run(work())


def test_one_that_hangs_in_a_load_holds_up_no_other_change() -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, MemoryDesired()) as app:
            fleet.servers[0].hanging.add("n")
            hanging = asyncio.create_task(load(app, "n", "/a"))
            while not fleet.servers[0].num_loads:
                await asyncio.sleep(0.01)
            assert await load(app, "m", "/b") == 200
            assert (await change(app, UNLOAD, lora_name="m")).status == 200
            assert await load(app, "n", "/a") in (409, 504)
            assert (await infer(app, "base")).status == 200
            assert await hanging == 504
            # It has let go at last, and follows what was undone.
            fleet.servers[0].hanging.clear()
            await asyncio.sleep(0.2)
            await fleet.until("n", "", "", "")

    run(work())


def test_a_replica_gets_requests_when_it_has_its_adapters() -> None:
    async def work() -> None:
        fleet = Fleet(2)
        async with router_of(fleet, MemoryDesired()) as app:
            for number in range(8):
                assert await load(app, f"n{number}", "/a") == 200
            fleet.servers[0].load_s = 0.2
            fleet.restart(0)
            replica = app.fleet.replicas[fleet.replicas[0].url]
            num_asked = 0
            while len(fleet.servers[0].has) < 8 or not replica.is_prepared:
                num_asked += 1
                assert (await infer(app, f"n{num_asked % 8}")).status == 200
                await asyncio.sleep(0.01)
            assert num_asked and replica.state == "ready"

    run(work())


def test_an_adapter_that_one_lost_unnoticed_is_answered_by_another() -> None:
    async def work() -> None:
        fleet = Fleet(2)
        async with router_of(fleet, MemoryDesired()) as app:
            assert await load(app, "n", "/a") == 200
            # The loops have seen it.
            await asyncio.sleep(0.3)
            for server in fleet.servers:
                server.has.clear()
                for _ in range(6):
                    expected = 503 if not any(one.has for one in fleet.servers) else 200
                    reply = await infer(app, "n")
                    assert reply.status == expected
            assert reply.headers["retry-after"]
            # A name that was never loaded is unknown.
            assert (await infer(app, "other")).status == 404

    run(work())


def test_the_key_of_the_client_may_end() -> None:
    async def work() -> None:
        fleet = Fleet()
        async with router_of(fleet, MemoryDesired()) as app:
            assert await load(app, "n", "/a") == 200
            for server in fleet.servers:
                del server.keys[ADMIN]
            fleet.restart(0)
            await fleet.until("n", *["cid-a"] * 3)
            assert await load(app, "m", "/b") == 401

    run(work())


def test_who_may_not_change_adapters_changes_nothing() -> None:
    async def work() -> None:
        fleet, store = Fleet(), MemoryDesired()
        async with router_of(fleet, store) as app:
            for key, status in ((TENANT, 403), ("wrong", 401)):
                for path in (LOAD, UNLOAD):
                    reply = await change(app, path, key, lora_name="n", lora_path="/a")
                    assert reply.status == status
            assert not store.read().adapters and not fleet.servers[0].num_loads

    run(work())


def test_a_key_of_the_router_that_may_not_load_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        fleet = Fleet()
        for server in fleet.servers:
            server.keys[OWN] = False
        async with router_of(fleet, MemoryDesired()) as app:
            reply = await change(app, LOAD, lora_name="n", lora_path="/a")
            assert reply.status == 503 and "LORAMUX_API_KEY" in reply.json["error"]["message"]

    run(work())


def test_a_load_of_a_router_that_ended_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.router.reconcile._ABANDONED_S", -4.0)

    async def work() -> None:
        fleet, store = Fleet(), MemoryDesired()
        abandoned = DesiredAdapter(
            name="n",
            state=DesiredState.CHANGING,
            source="/b",
            previous_source="/a",
            previous_cid="cid-a",
        )
        store.write(abandoned, if_revision=0)
        # It had come as far as one of them.
        fleet.servers[1].has["n"] = ("/b", "cid-b")
        async with router_of(fleet, store):
            await fleet.until("n", *["cid-a"] * 3)

    run(work())


def test_only_so_many_unloaded_adapters_are_remembered(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("router", "registry"):
        monkeypatch.setattr(f"loramux.{place}.desired.MAX_GONE", 3)
    opened = store()
    for number in range(6):
        opened.write(DesiredAdapter(name=f"g{number}", state=DesiredState.GONE), if_revision=0)
    opened.write(DesiredAdapter(name="w", state=DesiredState.WANTED, source="/a"), if_revision=0)
    assert set(store().read().adapters) == {"g3", "g4", "g5", "w"}
    assert store().revision() == 7
