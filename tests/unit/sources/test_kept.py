"""Remote adapters that stay on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.errors import SourceFailed, SourceForbidden, SourceNotFound
from loramux.sources.config import HubConfig, SourceConfig
from loramux.sources.kept import KeptAdapters
from tests.fault_server import FaultServer
from tests.hub_server import HubRepository, HubServer
from tests.unit.sources.source_factory import (
    CONFIG,
    FAST,
    WEIGHTS_NAME,
    adapter_files,
    make_weights,
)

OTHER = make_weights(seed=1)


def num_reads(hub: HubServer) -> int:
    return len(hub.storage.seen)


@pytest.fixture
def repository(hub: HubServer) -> HubRepository:
    repository = HubRepository({"main": adapter_files()})
    hub.repositories["acme/sql"] = repository
    return repository


def test_files_are_fetched_once_and_again_when_they_change(
    hub: HubServer, repository: HubRepository, hub_config: SourceConfig, tmp_path: Path
) -> None:
    kept = KeptAdapters(hub_config, tmp_path / "kept")
    first = kept.folder("hf:acme/sql")
    num_first = num_reads(hub)
    assert num_first > 0
    assert (first / "adapter_config.json").read_bytes() == CONFIG
    assert kept.folder("hf:acme/sql") == first
    assert num_reads(hub) == num_first
    repository.revisions["main"] = adapter_files(weights=OTHER)
    second = kept.folder("hf:acme/sql")
    assert second != first and (second / WEIGHTS_NAME).read_bytes() == OTHER
    repository.revisions["main"] = adapter_files()
    assert kept.folder("hf:acme/sql") == first


def test_without_the_hub_the_files_that_were_used_last_are_used(
    hub: HubServer,
    repository: HubRepository,
    hub_config: SourceConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = KeptAdapters(hub_config, tmp_path / "kept")
    folder = kept.folder("hf:acme/sql")
    commit = repository.commit_of("main")
    pinned = kept.folder(f"hf:acme/sql@{commit}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.repositories.clear()
    monkeypatch.setattr(hub, "missing_status", 500)
    assert kept.folder(f"hf:acme/sql@{commit}") == pinned
    assert not caplog.records
    assert kept.folder("hf:acme/sql") == folder
    assert "fetched before are used" in caplog.text
    with pytest.raises(SourceFailed):
        kept.folder("hf:acme/other")


def test_a_source_that_is_gone_or_not_allowed_is_an_error_although_it_was_kept(
    hub: HubServer, repository: HubRepository, hub_config: SourceConfig, tmp_path: Path
) -> None:
    kept = KeptAdapters(hub_config, tmp_path / "kept")
    kept.folder("hf:acme/sql")
    hub.repositories.clear()
    with pytest.raises(SourceNotFound):
        kept.folder("hf:acme/sql")
    config = SourceConfig(hub=HubConfig(endpoint=hub.url, allowed_owners=("us",)), limits=FAST)
    with pytest.raises(SourceForbidden, match="'acme' is not allowed"):
        KeptAdapters(config, tmp_path / "kept").folder("hf:acme/sql")


def test_a_web_server_is_a_source_too(
    web: FaultServer, web_config: SourceConfig, tmp_path: Path
) -> None:
    kept = KeptAdapters(web_config, tmp_path / "kept")
    folder = kept.folder(f"{web.url}/pirate")
    assert (folder / WEIGHTS_NAME).is_file()
