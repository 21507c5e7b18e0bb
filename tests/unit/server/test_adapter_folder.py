"""The watched folder: adapters come, change and go without a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from loramux.server.app import create_app
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.naming.folder import AdapterFolder
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import complete, get, run
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend, named


class Scene:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.backend = ScriptedBackend()
        self.folder = AdapterFolder(self.backend, self.backend.names, root)
        self.app = create_app(
            self.backend,
            ServerOptions(),
            names=self.backend.names,
            on_demand=OnDemand(folder=self.folder),
        )

    def scan(self) -> None:
        run(self.folder.scan())

    def ask(self, model: str) -> int:
        return int(complete(self.app, model=model).status_code)

    @property
    def names(self) -> list[str]:
        return [one["id"] for one in get(self.app, "/v1/models").json()["data"]][3:]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "adapters")


def test_a_scan_lists_what_is_there(scene: Scene) -> None:
    write_tiny(scene.root / "sql")
    (scene.root / "notes").mkdir()
    write_tiny(scene.root / ".hidden")
    scene.scan()
    assert scene.names == ["sql"]
    assert scene.ask("sql") == 200
    assert scene.ask("notes") == scene.ask(".hidden") == 404


def test_a_name_is_served_before_the_next_scan(scene: Scene) -> None:
    assert scene.ask("sql") == 404
    write_tiny(scene.root / "sql")
    assert scene.ask("sql") == 200
    assert scene.ask("tiny-base:sql") == 200
    assert scene.backend.cids[0] == scene.backend.cids[1] is not None


def test_changed_files_are_another_adapter(scene: Scene) -> None:
    folder = write_tiny(scene.root / "sql")
    assert scene.ask("sql") == 200
    shutil.rmtree(folder)
    write_tiny(folder, 2)
    scene.scan()
    assert scene.ask("sql") == 200
    first, second = scene.backend.cids
    assert first != second
    assert first not in scene.backend.adapters


def test_a_removed_folder_is_not_served_any_more(scene: Scene) -> None:
    folder = write_tiny(scene.root / "sql")
    scene.scan()
    assert scene.ask("sql") == 200
    shutil.rmtree(folder)
    scene.scan()
    assert scene.ask("sql") == 404 and scene.names == []


def test_names_that_were_given_elsewhere_come_first(scene: Scene) -> None:
    write_tiny(scene.root / "legal")
    scene.scan()
    assert scene.ask("legal") == 200
    assert scene.backend.cids == [named("legal").cid]
    shutil.rmtree(scene.root / "legal")
    scene.scan()
    assert scene.ask("legal") == 200


@pytest.mark.parametrize("name", ["../out", "a/b", "..", ".", "", "a\\b", "x" * 300, "a\0"])
def test_no_name_leads_out_of_the_folder(scene: Scene, tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path / "out")
    assert run(scene.folder.find(name)) is False


def test_a_refused_adapter_is_not_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from loramux.errors import AdapterRefused

    async def refuse(paths: Any) -> list[Any]:
        return [AdapterRefused("wrong_shape", "no") for _ in paths]

    write_tiny(scene.root / "bad")
    monkeypatch.setattr(scene.backend, "inspect_adapters", refuse)
    scene.scan()
    assert scene.names == [] and scene.ask("bad") == 404


def test_changes_after_the_first_scan_are_audited(registry_app: Make, tmp_path: Path) -> None:
    served, root = registry_app(), tmp_path / "adapters"
    audit = served.registry.audit
    write_tiny(root / "first")
    backend = served.backend
    folder = AdapterFolder(backend, backend.names, root, home_tenant="default")
    run(folder.scan())
    # What is there at the start belongs to the settings.
    assert audit.entries() == []
    write_tiny(root / "second", 2)
    run(folder.scan())
    shutil.rmtree(root / "first")
    run(folder.scan())
    run(folder.scan())
    shown = [
        (one.entry.action, one.entry.tenant, one.entry.target, one.entry.actor.address)
        for one in audit.entries()
    ]
    assert shown == [
        ("unload", "default", "first", "--lora-dir"),
        ("load", "default", "second", "--lora-dir"),
    ]
    assert audit.entries()[1].entry.details == {"source": str(root / "second")}
    assert not audit.verify().faults
