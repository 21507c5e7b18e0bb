"""GET /v1/models: every listed name can be requested."""

from __future__ import annotations

import time

from loramux.backend.host import Health
from tests.unit.server.asgi_client import complete, get, make_app, run
from tests.unit.server.scripted_backend import ScriptedBackend


def test_base_comes_first_then_adapters_with_root_and_parent() -> None:
    answer = get(make_app(served_model_names=("smol", "gpt-4")), "/v1/models").json()
    assert answer["object"] == "list"
    assert [entry["id"] for entry in answer["data"]] == ["smol", "gpt-4", "legal", "team/polite"]
    base, _, adapter, _ = answer["data"]
    assert abs(base.pop("created") - time.time()) < 60
    assert base == {
        "id": "smol",
        "object": "model",
        "owned_by": "loramux",
        "root": "/models/tiny-base",
        "parent": None,
        "max_model_len": 64,
    }
    assert adapter == {
        "id": "legal",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "loramux",
        "root": "/adapters/legal",
        "parent": "smol",
        "max_model_len": None,
    }


def test_created_is_stable() -> None:
    app = make_app()
    assert get(app, "/v1/models").json() == get(app, "/v1/models").json()


def test_every_listed_name_can_be_retrieved_and_requested() -> None:
    app = make_app()
    for entry in get(app, "/v1/models").json()["data"]:
        assert get(app, f"/v1/models/{entry['id']}").json() == entry
        assert complete(app, model=entry["id"]).json()["model"] == entry["id"]


def test_an_unloaded_adapter_is_not_listed() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    run(backend.names.unload("legal"))
    response = get(app, "/v1/models/legal")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    assert "legal" not in get(app, "/v1/models").text
    assert complete(app, model="legal").status_code == 404


def test_models_are_listed_during_a_restart_but_not_before_the_first_start() -> None:
    backend = ScriptedBackend()
    backend.health = Health.RESTARTING
    assert get(make_app(backend), "/v1/models").status_code == 200
    backend.health = Health.STARTING
    assert get(make_app(backend), "/v1/models").status_code == 503
