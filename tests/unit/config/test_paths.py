from __future__ import annotations

from pathlib import Path

import pytest

from loramux.config.paths import find_data_paths


def test_what_is_given_wins_over_the_environment() -> None:
    environment = {"LORAMUX_REGISTRY": "postgresql://other/db", "LORAMUX_DATA": "/other"}
    places = find_data_paths(registry="/here/r.db", data="/here", environment=environment)
    assert (places.registry, places.store) == ("/here/r.db", Path("/here/store"))


def test_the_environment_wins_over_the_users_folder() -> None:
    environment = {"LORAMUX_DATA": "/data", "XDG_DATA_HOME": "/xdg"}
    places = find_data_paths(environment=environment)
    assert (places.registry, places.store) == ("/data/registry.db", Path("/data/store"))
    shared = find_data_paths(environment={**environment, "LORAMUX_REGISTRY": "postgresql://h/db"})
    assert (shared.registry, shared.store) == ("postgresql://h/db", Path("/data/store"))


def test_a_named_data_folder_does_not_move_a_registry_that_the_environment_names() -> None:
    places = find_data_paths(data="/here", environment={"LORAMUX_REGISTRY": "postgresql://h/db"})
    assert places.registry == "postgresql://h/db"


def test_what_stands_behind_the_store_is_named_like_the_rest() -> None:
    environment = {"LORAMUX_SHARED_CACHE": "redis://:hunter2@h", "LORAMUX_REMOTE_STORE": "s3://b"}
    places = find_data_paths(environment=environment)
    assert (places.shared_cache, places.remote_store) == ("redis://:hunter2@h", "s3://b")
    given = find_data_paths(
        shared_cache="redis://o", remote_store="gs://o", environment=environment
    )
    assert (given.shared_cache, given.remote_store) == ("redis://o", "gs://o")
    assert find_data_paths(environment={"LORAMUX_SHARED_CACHE": ""}).shared_cache is None
    assert "hunter2" not in repr(places)


def test_the_default_is_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert find_data_paths(environment={"XDG_DATA_HOME": "/xdg"}).store == Path(
        "/xdg/loramux/store"
    )
    at_home = Path("/home/someone/.local/share/loramux")
    assert find_data_paths(environment={}).store == at_home / "store"
    assert find_data_paths(environment={}).registry == str(at_home / "registry.db")


def test_empty_variables_count_as_none_and_paths_do_not_depend_on_later_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_data_paths(data="data", environment={}).store == tmp_path / "data" / "store"
    empty = {"LORAMUX_DATA": "", "LORAMUX_REGISTRY": "", "XDG_DATA_HOME": ""}
    assert find_data_paths(environment=empty) == find_data_paths(environment={})
