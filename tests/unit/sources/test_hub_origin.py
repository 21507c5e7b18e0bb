from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from loramux.adapters.images.files import DIFFUSERS_NAME
from loramux.errors import LoramuxError, SourceFailed, SourceForbidden, SourceNotFound
from loramux.sources.config import HubConfig, Secret, SourceConfig
from loramux.sources.fetch import Fetched, Fetcher
from loramux.sources.origins.base import Checksum
from loramux.sources.origins.hub import read_etag, stored_token
from loramux.sources.parse import parse_source
from tests.fault_server import Answer, Fault
from tests.hub_server import SIGNATURE, HubRepository, HubServer
from tests.unit.sources.source_factory import (
    CONFIG,
    CONFIG_NAME,
    IMPATIENT,
    WEIGHTS,
    WEIGHTS_NAME,
    FakeTime,
    adapter_files,
    entries,
    make_weights,
)

TOKEN = "hf_token_of_a_tester"
OLD = make_weights(seed=1)


@pytest.fixture(autouse=True)
def repositories(hub: HubServer) -> None:
    checkpoint = adapter_files("checkpoint-5", make_weights(seed=2))
    style = {"styles/water.safetensors": WEIGHTS}
    hostile = {"../../evil": b"x", "/etc/evil": b"x", "a\0b": b"x", "\u202egnp.exe": b"x"}
    files = {**adapter_files(), **checkpoint, **style, **hostile, "README.md": b"# hi"}
    hub.repositories = {
        "acme/pirate": HubRepository({"main": files, "v1": adapter_files(weights=OLD)}),
        "acme/gated": HubRepository({"main": adapter_files()}, readers=frozenset({TOKEN})),
        "acme/old": HubRepository({"main": {CONFIG_NAME: CONFIG, "adapter_model.bin": b"x"}}),
    }


def fetch(config: SourceConfig, text: str, tmp_path: Path) -> Fetched:
    fetcher = Fetcher(config, timing=FakeTime().timing)
    return fetcher.fetch(parse_source(text, config), tmp_path / "target")


def with_token(config: SourceConfig, token: str) -> SourceConfig:
    return replace(config, hub=replace(config.hub, token=Secret(token)))


def test_an_adapter_comes_from_one_commit(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path
) -> None:
    fetched = fetch(hub_config, "hf:acme/pirate", tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    commit = hub.repositories["acme/pirate"].commit_of("main")
    assert fetched.revision == commit
    assert entries(tmp_path) == ["target", f"target/{CONFIG_NAME}", f"target/{WEIGHTS_NAME}"]
    paths = [seen.path for seen in hub.seen]
    assert "/resolve/main/" in paths[0]
    assert all(f"/resolve/{commit}/" in path for path in paths[1:])


def test_a_revision_and_a_commit_are_honoured(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path
) -> None:
    fetched = fetch(hub_config, "hf:acme/pirate@v1", tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == OLD
    commit = hub.repositories["acme/pirate"].commit_of("v1")
    again = fetch(hub_config, f"hf:acme/pirate@{commit}", tmp_path / "again")
    assert again.digests == fetched.digests


def test_a_single_file_and_a_folder_of_a_repository(
    hub_config: SourceConfig, tmp_path: Path
) -> None:
    single = fetch(hub_config, "hf:acme/pirate:styles/water.safetensors", tmp_path / "1")
    assert single.files == (DIFFUSERS_NAME,)
    folder = fetch(hub_config, "hf:acme/pirate:checkpoint-5", tmp_path / "2")
    assert folder.digests[WEIGHTS_NAME] == hashlib.sha256(make_weights(seed=2)).hexdigest()


@pytest.mark.parametrize("status", [401, 404])
def test_a_missing_repository_is_a_clear_error(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path, status: int
) -> None:
    hub.missing_status = status
    with pytest.raises(SourceNotFound, match="no such repository, or it is private.*HF_TOKEN"):
        fetch(hub_config, "hf:acme/nothing", tmp_path)
    assert entries(tmp_path) == []


def test_a_missing_revision_file_or_pickle_is_a_clear_error(
    hub_config: SourceConfig, tmp_path: Path
) -> None:
    for text, reason in [
        ("hf:acme/pirate@v9", "no such revision"),
        ("hf:acme/pirate:nope.safetensors", r"no nope\.safetensors"),
        ("hf:acme/old", "can run code"),
    ]:
        with pytest.raises(LoramuxError, match=reason):
            fetch(hub_config, text, tmp_path)
    assert entries(tmp_path) == []


def test_a_gated_repository_needs_the_right_token(hub_config: SourceConfig, tmp_path: Path) -> None:
    with pytest.raises(SourceForbidden, match=r"gated, and no token is configured \(401\)"):
        fetch(hub_config, "hf:acme/gated", tmp_path)
    with pytest.raises(SourceForbidden, match=r"token has no access \(403\).*set HF_TOKEN"):
        fetch(with_token(hub_config, "hf_other"), "hf:acme/gated", tmp_path)
    assert entries(tmp_path) == []
    fetch(with_token(hub_config, TOKEN), "hf:acme/gated", tmp_path)


def test_the_token_stays_on_the_hub_and_out_of_every_text(
    hub: HubServer,
    hub_config: SourceConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = with_token(hub_config, TOKEN)
    fetch(config, "hf:acme/gated", tmp_path)
    assert all(seen.headers["authorization"] == f"Bearer {TOKEN}" for seen in hub.seen)
    assert hub.storage.seen
    assert all("authorization" not in seen.headers for seen in hub.storage.seen)
    assert SIGNATURE in hub.storage.seen[0].path
    assert SIGNATURE not in caplog.text
    assert TOKEN not in caplog.text + repr(config)


def test_a_token_in_the_environment_of_the_client_is_used(
    hub_config: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert stored_token() == Secret(TOKEN)
    fetch(hub_config, "hf:acme/gated", tmp_path)


def test_a_download_that_breaks_off_goes_on(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path
) -> None:
    hub.storage.faults.append(Fault(cut_at=1000))
    fetched = fetch(hub_config, "hf:acme/pirate", tmp_path)
    assert (fetched.folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
    assert hub.storage.requests("GET")[1].headers["range"] == "bytes=1000-4095"


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_content_that_does_not_match_the_hubs_digest_is_discarded(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path, name: str
) -> None:
    content = {CONFIG_NAME: CONFIG.replace(b"4", b"8"), WEIGHTS_NAME: WEIGHTS[:-1] + b"!"}[name]
    if name == CONFIG_NAME:
        hub.faults.append(Fault(path_end=name, answer=Answer(body=content)))
    else:
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        hub.storage.answer = (  # type: ignore[method-assign]
            lambda seen: hub.storage.serve(content, seen) if digest in seen.path else Answer()
        )
    with pytest.raises(
        SourceFailed, match=f"{name} does not match the digest that its source reports"
    ):
        fetch(hub_config, "hf:acme/pirate", tmp_path)
    assert entries(tmp_path) == []


def test_a_broken_hub_is_waited_for_and_then_given_up(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path
) -> None:
    hub.faults += [Fault(method="HEAD", answer=Answer(status=500))] * 2
    fetch(hub_config, "hf:acme/pirate", tmp_path)
    hub.faults += [Fault(method="HEAD", answer=Answer(status=429))] * 9
    with pytest.raises(SourceFailed, match="status 429"):
        fetch(hub_config, "hf:acme/pirate", tmp_path / "again")


def test_a_hub_that_is_silent_or_away_is_a_failure(
    hub: HubServer, hub_config: SourceConfig, tmp_path: Path
) -> None:
    hub.faults += [Fault(method="HEAD", is_silent=True)] * 2
    impatient = replace(hub_config, limits=replace(IMPATIENT, max_attempts=2))
    with pytest.raises(SourceFailed, match="did not answer in time"):
        fetch(impatient, "hf:acme/pirate", tmp_path)
    away = replace(hub_config, hub=HubConfig(endpoint="http://127.0.0.1:9"))
    with pytest.raises(SourceFailed, match="connection to hf:acme/pirate failed"):
        fetch(away, "hf:acme/pirate", tmp_path)


def test_offline_mode_is_a_failure_with_a_fix(
    hub: HubServer,
    hub_config: SourceConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceFailed, match="Unset HF_HUB_OFFLINE") as failed:
        fetch(hub_config, "hf:acme/pirate", tmp_path)
    assert not failed.value.is_temporary
    assert hub.seen == []


def test_etags_of_the_hub_are_digests() -> None:
    assert read_etag("a" * 64) == Checksum("sha256", "a" * 64)
    assert read_etag("a" * 40) == Checksum("git", "a" * 40)
    assert read_etag("something") is None
