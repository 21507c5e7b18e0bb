"""Adapters from the hub on demand: fetched once, looked at again later, private ones by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import SourceForbidden, SourceRefused
from loramux.server.app import create_app
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.naming import sources as adapter_sources
from loramux.server.naming.sources import AdapterSources
from loramux.sources.config import HubConfig, Secret, SourceConfig
from tests.hub_server import HubRepository, HubServer
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import complete, post, run
from tests.unit.server.scripted_backend import ScriptedBackend

REPOSITORY = "acme/sql"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer() as server:
        yield server


def files(folder: Path, seed: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in write_tiny(folder, seed).iterdir()}


def make(
    hub: HubServer, tmp_path: Path, **arguments: Any
) -> tuple[AdapterSources, ScriptedBackend]:
    backend = ScriptedBackend()
    config = SourceConfig(hub=HubConfig(endpoint=hub.url, allowed_owners=("acme",)))
    sources = AdapterSources(backend, backend.names, config, tmp_path / "area", **arguments)
    return sources, backend


def test_a_repository_is_fetched_once_and_named(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[REPOSITORY] = HubRepository({"main": files(tmp_path / "a", 1)})
    sources, backend = make(hub, tmp_path)
    first = run(sources.find(REPOSITORY, "hub"))
    num_calls = len(hub.seen)
    second = run(sources.find(f"hf:{REPOSITORY}", "hub"))
    assert first.selection == second.selection and len(hub.seen) == num_calls
    assert first.model == REPOSITORY
    assert backend.names.find(f"hf:{REPOSITORY}") is not None


def test_a_branch_that_moved_is_seen_later(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[REPOSITORY] = HubRepository({"main": files(tmp_path / "a", 1)})
    sources, backend = make(hub, tmp_path)
    first = run(sources.find(REPOSITORY, "hub"))
    hub.repositories[REPOSITORY] = HubRepository({"main": files(tmp_path / "b", 2)})
    assert run(sources.find(REPOSITORY, "hub")).selection == first.selection
    monkeypatch.setattr(adapter_sources, "FRESH_S", 0.0)
    second = run(sources.find(REPOSITORY, "hub"))
    assert second.selection != first.selection
    assert first.selection[0][0] not in backend.adapters


def test_a_private_adapter_needs_a_token_each_time(hub: HubServer, tmp_path: Path) -> None:
    content = files(tmp_path / "a", 1)
    hub.repositories[REPOSITORY] = HubRepository({"main": content}, readers=frozenset({"good"}))
    sources, backend = make(hub, tmp_path)
    found = run(sources.find(REPOSITORY, "hub", token=Secret("good")))
    [(cid, weight)] = found.selection
    assert weight == 1.0 and cid in backend.adapters
    assert backend.names.names_of(cid) == []
    for token in (None, Secret("bad-token")):
        with pytest.raises(SourceRefused) as raised:
            run(sources.find(REPOSITORY, "hub", token=token))
        assert "bad-token" not in str(raised.value)
    assert "good" not in str(list((tmp_path / "area").rglob("*")))


def test_vllms_load_call_takes_a_source(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[REPOSITORY] = HubRepository({"main": files(tmp_path / "a", 1)})
    sources, backend = make(hub, tmp_path)
    app = create_app(
        backend,
        ServerOptions(allow_runtime_lora_updating=True),
        names=backend.names,
        on_demand=OnDemand(sources=sources),
    )
    for prefix in ("hf:", ""):
        given = ((REPOSITORY, 200), ("other/x", 403), ("acme/x", 404))
        for number, (path, status) in enumerate(given):
            body = {"lora_name": f"{prefix}{number}", "lora_path": f"{prefix}{path}"}
            assert post(app, "/v1/load_lora_adapter", body).status_code == status, body
        assert complete(app, model=f"{prefix}0").status_code == 200


def test_a_folder_goes_before_a_repository_of_its_name(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "acme" / "own")
    monkeypatch.chdir(tmp_path)
    sources, backend = make(hub, tmp_path)
    options = ServerOptions(allow_runtime_lora_updating=True)
    on_demand = OnDemand(sources=sources)
    app = create_app(backend, options, names=backend.names, on_demand=on_demand)
    body = {"lora_name": "own", "lora_path": "acme/own"}
    assert post(app, "/v1/load_lora_adapter", body).status_code == 200
    assert backend.added == ["acme/own"] and not hub.repositories


def test_the_rules_of_a_push_hold(hub: HubServer, tmp_path: Path) -> None:
    sources, backend = make(hub, tmp_path)
    with pytest.raises(SourceForbidden, match="other"):
        run(sources.find("other/sql", "hub"))
    with pytest.raises(SourceForbidden, match="no root"):
        run(sources.find("/etc", "local"))
    with pytest.raises(SourceRefused, match="not a source"):
        run(sources.find("x/y", "ftp"))
    assert backend.added == [] and hub.seen == []


def test_the_oldest_are_forgotten(hub: HubServer, tmp_path: Path) -> None:
    for number in range(3):
        content = files(tmp_path / str(number), number)
        hub.repositories[f"acme/{number}"] = HubRepository({"main": content})
    sources, backend = make(hub, tmp_path, max_sources=2)
    for number in range(3):
        run(sources.find(f"acme/{number}", "hub"))
    named = [given.name for given in backend.names.given() if given.name.startswith("hf:")]
    assert named == ["hf:acme/1", "hf:acme/2"]
