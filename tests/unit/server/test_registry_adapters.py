"""Adapters of the registry: added once, found without queries, followed when they change."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from loramux.backend import AdapterCard
from loramux.errors import AdapterNotFound, StoreDamaged
from loramux.registry.records import Resolved
from loramux.server.registry_adapters import RegistryAdapters
from tests.unit.server.asgi_client import run
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend


def test_many_waiters_add_an_adapter_once_and_who_leaves_takes_nobody_along(
    registry_app: Make,
) -> None:
    served = registry_app()
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))

    async def work() -> None:
        make = [served.adapters.make_known(served.backend, resolved) for _ in range(20)]
        tasks = [asyncio.create_task(one) for one in make]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks[1:])
        await served.adapters.make_known(served.backend, resolved)

    run(work())
    assert [name for name, _ in served.backend.added] == [resolved.cid]
    folder = Path(served.backend.adapters[resolved.cid].path)
    assert (folder / "adapter_model.safetensors").exists()


def test_a_failure_reaches_all_who_wait_and_the_next_one_tries_again(registry_app: Make) -> None:
    served = registry_app()
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))
    served.backend.refusal = AdapterNotFound("gone")

    async def work() -> None:
        make = [served.adapters.make_known(served.backend, resolved) for _ in range(3)]
        failures = await asyncio.gather(*make, return_exceptions=True)
        assert [type(failure) for failure in failures] == [AdapterNotFound] * 3
        served.backend.refusal = None
        await served.adapters.make_known(served.backend, resolved)

    run(work())
    assert resolved.cid in served.backend.adapters


def test_an_engine_that_read_other_bytes_is_not_believed(registry_app: Make) -> None:
    served = registry_app()
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))

    class Misreading(ScriptedBackend):
        async def add_adapter(self, name: str, path: str) -> AdapterCard:
            card = AdapterCard(name=name, path=path, cid="other", rank=1, num_bytes=1)
            self.adapters[name] = card
            return card

    backend = Misreading()
    with pytest.raises(StoreDamaged):
        run(served.adapters.make_known(backend, resolved))
    assert resolved.cid not in backend.adapters


def test_what_is_known_is_found_without_a_query(
    registry_app: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    threads: list[str] = []
    real = served.registry.route
    monkeypatch.setattr(
        served.registry,
        "route",
        lambda reference: (threads.append(threading.current_thread().name), real(reference))[1],
    )

    async def work() -> None:
        for _ in range(3):
            assert (await served.adapters.resolve("acme/sql")).cid == cid

    run(work())
    assert len(threads) == 1 and threads[0] != threading.main_thread().name


def test_a_change_by_somebody_else_is_followed(registry_app: Make) -> None:
    served = registry_app()
    first, second = served.push("acme/sql@1.0.0", 1), served.push("acme/sql@1.1.0", 2)
    served.registry.promote("acme/sql", "1.0.0", alias="prod")
    heard = threading.Event()
    adapters = RegistryAdapters(served.library)
    forget = adapters.forget
    adapters.forget = lambda names: (forget(names), heard.set())[0]  # type: ignore[method-assign]
    adapters.start(poll_s=0.01)
    try:
        assert run(adapters.resolve("acme/sql")).cid == first
        served.registry.promote("acme/sql", "1.1.0", alias="prod")
        assert heard.wait(10)
        assert run(adapters.resolve("acme/sql")).cid == second
    finally:
        adapters.close()


def test_the_list_is_bounded_and_shows_what_a_bare_name_means(registry_app: Make) -> None:
    served = registry_app()
    cids = [served.push(f"acme/n{i}@1.0.0", i) for i in range(3)]
    assert [one.cid for one in served.adapters.list_current(limit=2)] == cids[:2]


def test_lost_files_are_restored_once_for_all_who_ask_and_only_of_the_registrys(
    registry_app: Make,
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    view = served.library.materialize(cid)
    shutil.rmtree(view)

    async def work() -> list[bool]:
        return await asyncio.gather(*(served.adapters.restore(cid) for _ in range(5)))

    assert run(work()) == [True] * 5
    assert (view / "adapter_model.safetensors").exists()
    assert not run(served.adapters.restore("given")), "its files are its owner's"


def test_what_cannot_be_restored_is_told_to_all_who_ask(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    shutil.rmtree(served.folder / "store" / "records")

    async def work() -> list[bool | BaseException]:
        asks = [served.adapters.restore(cid) for _ in range(3)]
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [type(one) for one in run(work())] == [AdapterNotFound] * 3
