"""GET /v1/adapters: each adapter once, with all its names, its tier and its usage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.backend.host import AdapterUse, Health
from loramux.errors import AdapterRefused
from loramux.types.adapter import InspectedCard
from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import complete, get, make_app, request
from tests.unit.server.scripted_backend import ScriptedBackend, cid_of, named

LEGAL = AdapterUse(
    cid="cidv1:sha256:legal",
    tier="device",
    num_bytes=1024,
    rank=8,
    hits=5,
    misses=1,
    last_use_s=1_700_000_100.5,
    num_running=2,
    num_waiting=3,
    cached_tokens=64,
)


def listed(backend: ScriptedBackend, query: str = "") -> list[dict[str, Any]]:
    answer = get(make_app(backend), f"/v1/adapters{query}").json()
    assert answer["object"] == "list"
    data: list[dict[str, Any]] = answer["data"]
    return data


def test_an_adapter_is_shown_with_its_tier_and_usage() -> None:
    backend = ScriptedBackend()
    backend.uses = [LEGAL]
    legal, polite = listed(backend)
    assert legal == {
        "id": "legal",
        "object": "adapter",
        "names": ["legal"],
        "state": "ready",
        "failure": None,
        "cid": "cidv1:sha256:legal",
        "path": "/adapters/legal",
        "rank": 8,
        "bytes": 1024,
        "tier": "device",
        "pinned": False,
        "hits": 5,
        "misses": 1,
        "last_use": 1_700_000_100.5,
        "running": 2,
        "waiting": 3,
        "cached_tokens": 64,
        "requests": 0,
        "prompt_tokens": 0,
        "generation_tokens": 0,
    }
    # The engine has not registered this one yet.
    assert (polite["tier"], polite["rank"], polite["last_use"]) == ("source", 8, None)


def test_two_names_are_one_entry_and_a_removed_adapter_that_still_runs_is_listed() -> None:
    backend = ScriptedBackend()
    backend.give_name("alias", named("legal"))
    backend.uses = [LEGAL, replace(LEGAL, cid="cidv1:sha256:gone")]
    entries = {entry["id"]: entry for entry in listed(backend)}
    assert list(entries) == ["legal", "team/polite", "cidv1:sha256:gone"]
    assert entries["legal"]["names"] == ["legal", "alias"]
    assert entries["cidv1:sha256:gone"]["names"] == []
    app = make_app(backend)
    assert get(app, "/v1/adapters/alias").json() == get(app, "/v1/adapters/legal").json()


def test_one_adapter_by_its_name_also_with_a_slash() -> None:
    app = make_app()
    assert get(app, "/v1/adapters/team/polite").json()["id"] == "team/polite"
    missing = get(app, "/v1/adapters/unknown")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "name"


@pytest.mark.parametrize("name", ["legal", "team/polite"])
def test_pin_and_unpin(name: str) -> None:
    app = make_app()
    assert request(app, "POST", f"/v1/adapters/{name}/pin").json()["pinned"] is True
    assert get(app, f"/v1/adapters/{name}").json()["pinned"] is True
    assert request(app, "DELETE", f"/v1/adapters/{name}/pin").json()["pinned"] is False
    assert request(app, "POST", "/v1/adapters/unknown/pin").status_code == 404


def test_the_list_can_be_sorted_by_traffic_and_limited() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    complete(app, model="team/polite")
    answer = get(app, "/v1/adapters?order=busiest&limit=1").json()
    [first] = answer["data"]
    assert (first["id"], first["requests"], answer["total"]) == ("team/polite", 1, 2)
    assert (first["prompt_tokens"], first["generation_tokens"]) == (2, 9)
    names = [entry["id"] for entry in get(app, "/v1/adapters?order=busiest").json()["data"]]
    assert names == ["team/polite", "legal"]


@pytest.mark.parametrize("query", ["order=size", "limit=-1", "limit=x", "limit=", "limit=1e3"])
def test_an_invalid_query_parameter_is_named(query: str) -> None:
    response = get(make_app(), f"/v1/adapters?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/adapters/legal"])
def test_the_routes_need_a_ready_engine(path: str) -> None:
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    assert get(make_app(backend), path).status_code == 503


def test_an_adapter_without_weights_is_listed_and_read_by_its_first_request(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    app, folder = make_app(backend), write_tiny(tmp_path / "a")
    for name in ("lazy", "alias"):
        backend.names.bind(name, InspectedCard(path=str(folder), rank=4, num_bytes=64))
    entry = get(app, "/v1/adapters/lazy").json()
    assert entry == listed(backend)[2]
    assert (entry["state"], entry["cid"], entry["tier"]) == ("registered", None, "source")
    assert (entry["names"], entry["rank"], entry["bytes"]) == (["lazy", "alias"], 4, 64)
    assert "lazy" in [model["id"] for model in get(app, "/v1/models").json()["data"]]
    assert complete(app, model="lazy", prompt="a").status_code == 200
    assert backend.cids == [cid_of(folder)] and backend.added == [str(folder)]
    entry = get(app, "/v1/adapters/alias").json()
    assert (entry["state"], entry["cid"]) == ("ready", cid_of(folder))


def test_a_refused_adapter_is_422_and_failed_until_its_files_change(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    app, folder = make_app(backend), write_tiny(tmp_path / "a")
    backend.names.bind("lazy", InspectedCard(path=str(folder), rank=4, num_bytes=64))
    backend.refusal = AdapterRefused("not_finite", "It has NaN values.", fix="Train it again.")
    for _ in range(2):
        answer = complete(app, model="lazy", prompt="a")
        assert answer.status_code == 422 and answer.json()["error"]["reason"] == "not_finite"
    entry = get(app, "/v1/adapters/lazy").json()
    assert entry["state"] == "failed" and len(backend.added) == 1
    assert entry["failure"] == {
        "code": "not_finite",
        "message": "It has NaN values.",
        "fix": "Train it again.",
    }
    assert "lazy" not in [model["id"] for model in get(app, "/v1/models").json()["data"]]
    assert request(app, "POST", "/v1/adapters/lazy/pin").status_code == 422
    backend.refusal = None
    write_tiny(folder, 2)
    assert complete(app, model="lazy", prompt="a").status_code == 200
    assert get(app, "/v1/adapters/lazy").json()["state"] == "ready"
