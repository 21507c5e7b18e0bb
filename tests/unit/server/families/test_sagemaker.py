"""SageMaker's routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.store_factory import write_tiny
from tests.unit.server.asgi_client import make_app, post, request
from tests.unit.server.scripted_backend import ScriptedBackend, named

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "chat.completion": {"messages": MESSAGES},
    "text_completion": {"prompt": "hi"},
    "response": {"input": "hi"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_goes_to_the_api_of_its_fields(kind: str) -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    assert post(app, "/invocations", BODIES[kind]).json()["object"] == kind
    response = post(
        app, "/invocations", BODIES[kind] | {"model": "tiny-base"}, headers={HEADER: "legal"}
    )
    assert response.json()["model"] == "legal"
    assert backend.cids == [None, named("legal").cid]


def test_inputs_are_loraxs() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    for parameters in (None, {"adapter_id": "team/polite"}):
        body = {"inputs": "hi", "parameters": parameters}
        response = post(app, "/invocations", body, headers={HEADER: "legal"})
        assert response.json() == [{"generated_text": "Hello you"}]
    assert backend.cids == [named("legal").cid] * 2
    assert "error_type" in post(app, "/invocations", {"inputs": ""}).json()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi", "adapters": ["team/polite"], "adapter_weights": [0.5]},
        {"inputs": "hi", "parameters": {"merged_adapters": {"ids": ["team/polite"]}}},
        {"messages": MESSAGES, "lora_path": "team/polite"},
    ],
)
def test_the_header_replaces_every_name_of_the_body(body: Any) -> None:
    backend = ScriptedBackend()
    response = post(make_app(backend), "/invocations", body, headers={HEADER: "legal"})
    assert response.status_code == 200
    assert backend.requests[0].selection == ((named("legal").cid, 1.0),)


@pytest.mark.parametrize("body", [{"messages": 5}, {"x": 1}, [], b"{"])
def test_a_bad_body_is_refused(body: Any) -> None:
    assert post(make_app(), "/invocations", body).status_code == 400


def test_an_unknown_adapter_in_the_header_is_not_the_base() -> None:
    response = post(make_app(), "/invocations", {"prompt": "x"}, headers={HEADER: "nope"})
    assert response.status_code == 404


def test_adapters_are_registered_and_unregistered(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    backend = ScriptedBackend()
    app = make_app(backend, allow_runtime_lora_updating=True)
    body = {"name": "new", "src": str(folder)}
    response = post(app, "/adapters", body)
    assert (response.status_code, response.text) == (200, "Adapter new registered")
    assert post(app, "/invocations", {"prompt": "x"}, headers={HEADER: "new"}).status_code == 200
    assert post(app, "/adapters", body).status_code == 400
    gone = request(app, "DELETE", "/adapters/new")
    assert (gone.status_code, gone.text) == (200, "Adapter new unregistered")
    assert request(app, "DELETE", "/adapters/new").status_code == 404


@pytest.mark.parametrize("body", [{}, {"name": "x"}, {"src": "x"}, {"name": "x", "src": "/none"}])
def test_an_adapter_without_name_or_files_is_refused(body: Any) -> None:
    app = make_app(allow_runtime_lora_updating=True)
    assert post(app, "/adapters", body).status_code in (400, 404)


def test_adapters_are_not_changed_unless_allowed() -> None:
    assert post(make_app(), "/adapters", {"name": "x", "src": "/x"}).status_code == 404
