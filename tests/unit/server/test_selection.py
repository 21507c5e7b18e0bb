"""Which adapter a request selects, and what the answer calls it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.asgi_client import complete, make_app
from tests.unit.server.scripted_backend import ScriptedBackend

# fields, the adapter that must run, its weight, the name in the answer
SELECTIONS: list[tuple[dict[str, Any], str | None, float, str]] = [
    ({}, None, 1.0, "tiny-base"),
    ({"model": None}, None, 1.0, "tiny-base"),
    ({"model": "legal"}, "legal", 1.0, "legal"),
    ({"model": "team/polite"}, "team/polite", 1.0, "team/polite"),
    ({"model": "legal", "adapters": None}, "legal", 1.0, "legal"),
    ({"model": "legal", "adapters": []}, None, 1.0, "tiny-base"),
    ({"adapters": [], "adapter_weights": []}, None, 1.0, "tiny-base"),
    ({"adapters": ["legal"]}, "legal", 1.0, "legal"),
    ({"adapters": ["legal"], "adapter_weights": [0.5]}, "legal", 0.5, "legal"),
    ({"adapters": ["legal"], "adapter_weights": [-2]}, "legal", -2.0, "legal"),
    ({"model": "team/polite", "adapters": ["legal"]}, "legal", 1.0, "legal"),
]


@pytest.mark.parametrize(("fields", "adapter", "weight", "name"), SELECTIONS)
def test_request_selects_its_adapter(
    fields: dict[str, Any], adapter: str | None, weight: float, name: str
) -> None:
    backend = ScriptedBackend()
    answer = complete(make_app(backend), **fields).json()
    assert answer["model"] == name
    assert backend.requests[0].adapter == adapter
    assert backend.requests[0].adapter_weight == weight


def test_every_served_name_is_the_base_and_is_answered_as_asked() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, served_model_names=("smol", "gpt-4"))
    assert complete(app, model="gpt-4").json()["model"] == "gpt-4"
    assert complete(app, model=None).json()["model"] == "smol"
    assert complete(app, model="tiny-base").status_code == 404
    assert [job.adapter for job in backend.requests] == [None, None]


def test_name_that_is_listed_is_never_served_as_something_else() -> None:
    """An adapter that is called like the base would be listed and then select the base."""
    backend = ScriptedBackend()
    backend.adapters["tiny-base"] = backend.adapters["legal"]
    app = make_app(backend)
    complete(app, model="tiny-base")
    assert backend.requests[0].adapter is None


def test_several_adapters_are_refused_with_the_reason() -> None:
    response = complete(make_app(), adapters=["legal", "team/polite"])
    assert response.status_code == 400
    assert "not supported yet" in response.json()["error"]["message"]


def test_unknown_model_has_the_message_that_clients_know() -> None:
    error = complete(make_app(), model="x").json()["error"]
    assert error == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
