"""The table of adapter names: given names, references to the registry, and the host's adapters."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    EngineStopped,
    InvalidRequest,
    StoreDamaged,
)
from loramux.registry.records import Resolved
from loramux.server.errors import OtherContent
from loramux.server.naming.names import GivenName, NamedAdapter, Selected
from loramux.types.adapter import InspectedCard
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import run
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend, cid_of, named


def test_the_host_keeps_an_adapter_until_its_last_name_is_unloaded(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    names, folder = backend.names, write_tiny(tmp_path / "a")

    async def work() -> None:
        first, second = await names.load("one", str(folder)), await names.load("two", str(folder))
        assert first.cid == second.cid and names.names_of(first.cid) == ["one", "two"]
        await names.unload("one")
        assert backend.removed == [] and names.find("one") is None
        await names.unload("two")
        assert backend.removed == [first.cid] and names.names_of(first.cid) == []
        with pytest.raises(AdapterNotFound, match="'two' cannot be found"):
            await names.unload("two")

    run(work())


def test_an_adapter_is_kept_if_it_gets_a_new_name_while_its_last_one_goes(tmp_path: Path) -> None:
    """Catches a host that removes an adapter between its registration and its naming."""
    backend = ScriptedBackend()
    names, folder = backend.names, write_tiny(tmp_path / "a")

    async def work() -> None:
        cid = (await names.load("one", str(folder))).cid
        loading = asyncio.create_task(names.load("two", str(folder)))
        await asyncio.sleep(0)
        await names.unload("one")
        await loading
        assert backend.removed == [] and names.names_of(cid) == ["two"]
        assert cid in backend.adapters

    run(work())


def test_a_name_that_moves_removes_the_adapter_that_it_leaves_unnamed(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    names, folder = backend.names, write_tiny(tmp_path / "a", 1)

    async def work() -> None:
        before = (await names.load("rl", str(folder))).cid
        assert (await names.load("rl", str(folder))).cid == before and backend.removed == []
        write_tiny(folder, 2)
        after = await names.load("rl", str(folder))
        assert after.cid == cid_of(folder) and backend.removed == [before]

    run(work())


def test_an_adapter_that_the_registry_names_stays_when_its_given_name_goes(
    registry_app: Make,
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    backend = served.backend

    async def work() -> None:
        await backend.names.pull(Resolved(cid=cid, tenant="acme", name="sql", version="1.0.0"))
        backend.give_name("given", backend.adapters[cid])
        assert backend.names.names_of(cid) == ["given", "acme/sql@1.0.0"]
        assert backend.names.labels_of(cid) == ["given", "acme/sql"]
        await backend.names.unload("given")
        assert backend.removed == [] and backend.names.names_of(cid) == ["acme/sql@1.0.0"]

    run(work())


def inspected(backend: ScriptedBackend, folder: Path, *given: str) -> None:
    """Give names to a folder of which only the header was checked."""
    for name in given:
        backend.names.bind(name, InspectedCard(path=str(folder), rank=4, num_bytes=64))


def state_of(backend: ScriptedBackend, name: str) -> str | None:
    given = backend.names.find(name)
    return None if given is None else given.state


def test_concurrent_callers_share_one_read_and_all_names_of_the_folder_are_ready(
    tmp_path: Path,
) -> None:
    backend = ScriptedBackend()
    folder = write_tiny(tmp_path / "a")
    inspected(backend, folder, "one", "two")
    assert state_of(backend, "one") == "registered" and backend.added == []

    async def work() -> None:
        asks = [backend.names.identify(("one", "two")[i % 2]) for i in range(10)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await asyncio.sleep(0)
        tasks[0].cancel()
        found = await asyncio.gather(*tasks[1:])
        assert {given.cid for given in found if given} == {cid_of(folder)}
        assert await backend.names.identify("nobody") is None

    run(work())
    assert backend.added == [str(folder)] and backend.removed == []
    assert backend.names.names_of(cid_of(folder)) == ["one", "two"]
    assert state_of(backend, "two") == "ready" and backend.names.unread() == {}


def test_a_refused_adapter_is_read_again_only_when_its_files_change(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    folder = write_tiny(tmp_path / "a")
    inspected(backend, folder, "one")

    async def ask() -> None:
        with pytest.raises(AdapterRefused, match="NaN") as refused:
            await backend.names.identify("one")
        assert (refused.value.code, refused.value.fix) == ("not_finite", "Train it again.")

    backend.refusal = AdapterRefused("not_finite", "It has NaN values.", fix="Train it again.")
    run(ask())
    run(ask())
    assert backend.added == [str(folder)] and state_of(backend, "one") == "failed"
    write_tiny(folder, 2)
    run(ask())
    assert len(backend.added) == 2
    backend.refusal = None
    write_tiny(folder, 3)
    run(backend.names.identify("one"))
    assert state_of(backend, "one") == "ready"


def test_a_folder_that_is_gone_refuses_the_adapter_until_it_is_back(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    inspected(backend, tmp_path / "a", "one")
    for _ in range(2):
        with pytest.raises(AdapterRefused, match="No adapter folder") as refused:
            run(backend.names.identify("one"))
        assert refused.value.code == "unreadable"
    write_tiny(tmp_path / "a")
    run(backend.names.identify("one"))
    assert state_of(backend, "one") == "ready"


def test_an_engine_that_dies_while_it_reads_an_adapter_does_not_refuse_it(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    inspected(backend, write_tiny(tmp_path / "a"), "one")
    backend.refusal = EngineStopped("gone")
    with pytest.raises(EngineStopped):
        run(backend.names.identify("one"))
    assert state_of(backend, "one") == "registered"


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_a_name_that_is_unloaded_or_reloaded_during_its_read_is_not_bound_by_it(
    tmp_path: Path, is_reloaded: bool
) -> None:
    backend = ScriptedBackend()
    folder, other = write_tiny(tmp_path / "a", 1), write_tiny(tmp_path / "b", 2)
    inspected(backend, folder, "one")

    async def work() -> GivenName | None:
        asking = asyncio.create_task(backend.names.identify("one"))
        while not backend.added:
            await asyncio.sleep(0)
        if is_reloaded:
            await backend.names.load("one", str(other))
        else:
            await backend.names.unload("one")
        return await asking

    found = run(work())
    assert (found and found.cid) == (cid_of(other) if is_reloaded else None)
    assert cid_of(folder) not in backend.adapters and backend.removed == [cid_of(folder)]
    assert backend.names.unread() == {}


def test_a_name_whose_adapter_the_host_lost_is_read_again(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    folder = write_tiny(tmp_path / "a")

    async def work() -> None:
        cid = (await backend.names.load("one", str(folder))).cid
        del backend.adapters[cid]
        assert state_of(backend, "one") == "registered"
        found = await backend.names.identify("one")
        assert found is not None and found.cid == cid and cid in backend.adapters

    run(work())


@pytest.mark.parametrize("change", ["nothing", "files", "broken"])
def test_an_adapter_that_could_not_be_loaded_is_read_again(tmp_path: Path, change: str) -> None:
    """Its names move to changed files, and a refusal is shown by the next request."""
    backend = ScriptedBackend()
    folder = write_tiny(tmp_path / "a", 1)

    async def work() -> list[bool]:
        cid = (await backend.names.load("one", str(folder))).cid
        if change == "files":
            write_tiny(folder, 2)
        if change == "broken":
            backend.refusal = AdapterRefused("not_finite", "It has NaN values.")
        return await asyncio.gather(*(backend.names.restore(cid) for _ in range(3)))

    assert run(work()) == [change == "nothing"] * 3
    expected = [] if change == "broken" else [cid_of(folder)]
    assert [cid for cid in backend.adapters if backend.names.names_of(cid) == ["one"]] == expected
    assert state_of(backend, "one") == ("failed" if change == "broken" else "ready")
    assert len(backend.added) == 2 and len(backend.removed) == (change != "nothing")


def test_a_request_does_not_move_to_a_content_that_is_not_expected() -> None:
    backend = ScriptedBackend()
    cid = named("legal").cid
    legal = NamedAdapter("legal", cid, "legal", expected=frozenset((cid,)))
    selected = Selected("legal", (legal,))
    assert backend.names.rebind(selected) is selected
    backend.give_name("legal", replace(named("legal"), cid=CID_PREFIX + "new"))
    with pytest.raises(OtherContent, match="`legal`"):
        backend.names.rebind(selected)


def test_a_request_moves_with_its_names_and_keeps_its_weights() -> None:
    backend = ScriptedBackend()
    legal = NamedAdapter("legal", named("legal").cid, "legal", weight=0.5)
    polite = NamedAdapter("team/polite", named("team/polite").cid, "team/polite", weight=2.0)
    pulled = NamedAdapter("acme/sql", CID_PREFIX + "sql", resolved=Resolved(cid=CID_PREFIX + "sql"))
    selected = Selected("legal+polite", (legal, polite, pulled))
    assert backend.names.rebind(selected) is selected
    moved = replace(named("legal"), cid=CID_PREFIX + "new")
    backend.give_name("legal", moved)
    rebound = backend.names.rebind(selected)
    assert dict(rebound.selection) == {moved.cid: 0.5, polite.cid: 2.0, pulled.cid: 1.0}
    backend.give_name("legal", replace(moved, only_alone="it has one position"))
    with pytest.raises(InvalidRequest, match="it has one position"):
        backend.names.rebind(selected)
    backend.give_name("legal", named("team/polite"))
    with pytest.raises(InvalidRequest, match="are the same adapter"):
        backend.names.rebind(selected)


def test_concurrent_pulls_add_an_adapter_once_and_survive_a_cancelled_caller(
    registry_app: Make,
) -> None:
    served = registry_app()
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))

    async def work() -> None:
        make = [served.backend.names.pull(resolved) for _ in range(20)]
        tasks = [asyncio.create_task(one) for one in make]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks[1:])
        await served.backend.names.pull(resolved)

    run(work())
    assert len(served.backend.added) == 1
    folder = Path(served.backend.adapters[resolved.cid].path)
    assert (folder / "adapter_model.safetensors").exists()


def test_a_failed_pull_fails_all_callers_and_the_next_one_tries_again(registry_app: Make) -> None:
    served = registry_app()
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))
    served.backend.refusal = AdapterNotFound("gone")

    async def work() -> None:
        make = [served.backend.names.pull(resolved) for _ in range(3)]
        failures = await asyncio.gather(*make, return_exceptions=True)
        assert [type(failure) for failure in failures] == [AdapterNotFound] * 3
        served.backend.refusal = None
        await served.backend.names.pull(resolved)

    run(work())
    assert resolved.cid in served.backend.adapters


def test_a_pull_fails_if_the_host_read_another_cid(registry_app: Make) -> None:
    served = registry_app()
    backend = served.backend
    resolved = Resolved(cid=served.push("acme/sql@1.0.0", 1))
    other = CID_PREFIX + "other"
    backend.read_cid = lambda folder: other  # type: ignore[method-assign]
    with pytest.raises(StoreDamaged):
        run(backend.names.pull(resolved))
    assert backend.removed == [other] and resolved.cid not in backend.adapters


def test_missing_files_are_restored_once_and_only_for_adapters_of_the_registry(
    registry_app: Make,
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    names = served.backend.names
    view = served.library.materialize(cid)

    async def work() -> list[bool]:
        await names.pull(Resolved(cid=cid))
        shutil.rmtree(view)
        return await asyncio.gather(*(names.restore(cid) for _ in range(5)))

    assert run(work()) == [True] * 5
    assert (view / "adapter_model.safetensors").exists() and len(served.backend.added) == 1
    assert not run(names.restore(named("legal").cid)), "its files belong to the operator"


def test_a_restored_adapter_is_read_from_the_store_if_its_given_folder_is_gone(
    registry_app: Make, tmp_path: Path
) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    backend = served.backend
    backend.give_name("given", replace(named("legal"), cid=cid, path=str(tmp_path / "gone")))
    run(backend.names.pull(Resolved(cid=cid)))
    assert run(backend.names.restore(cid))
    assert backend.adapters[cid].path == str(served.library.materialize(cid))


def test_files_that_cannot_be_restored_fail_all_callers(registry_app: Make) -> None:
    served = registry_app()
    cid = served.push("acme/sql@1.0.0", 1)
    names = served.backend.names

    async def work() -> list[bool | BaseException]:
        await names.pull(Resolved(cid=cid))
        shutil.rmtree(served.folder / "store" / "records")
        asks = [names.restore(cid) for _ in range(3)]
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [type(one) for one in run(work())] == [AdapterNotFound] * 3
