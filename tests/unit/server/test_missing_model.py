"""B5: a request that names no model, where there are adapters."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.naming.names import AdapterNames
from tests.unit.server.asgi_client import make_app, post
from tests.unit.server.registry_app import Make
from tests.unit.server.scripted_backend import ScriptedBackend

WARNING = "x-loramux-warning"
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", MESSAGES, "model"),
    ("/v1/completions", {"prompt": "x"}, "model"),
    ("/v1/completions", {"prompt": "x", "model": "", "stream": True}, "model"),
    ("/v1/completions", {"prompt": "x", "model": "tgi"}, "model"),
    ("/v1/responses", {"input": "x"}, "model"),
    ("/v1/messages", MESSAGES | {"max_tokens": 5}, "model"),
    ("/api/chat", MESSAGES | {"model": "", "stream": False}, "model"),
    ("/completion", {"prompt": "x"}, "model"),
    ("/generate", {"text": "x"}, "model"),
    ("/generate", {"inputs": "x"}, "adapter_id"),
]


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
def test_the_base_answers_with_a_warning(path: str, body: dict[str, Any], field: str) -> None:
    response = post(make_app(), path, body)
    assert response.status_code == 200
    assert response.headers[WARNING] == f"no {field} was named: the base tiny-base answered"


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
def test_require_model_refuses(path: str, body: dict[str, Any], field: str) -> None:
    backend = ScriptedBackend()
    response = post(make_app(backend, require_model=True), path, body)
    assert response.status_code in (400, 422) and not backend.requests
    assert f"--require-model: send {field} with" in response.text


@pytest.mark.parametrize("require_model", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "model": "tiny-base"}),
        ("/v1/completions", {"prompt": "x", "model": "legal"}),
        ("/v1/completions", {"prompt": "x", "adapters": ["legal"]}),
        ("/v1/completions", {"prompt": "x", "adapters": []}),
        ("/v1/completions", {"prompt": "x", "lora_path": "legal"}),
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "tiny-base"}}),
        ("/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 1}]}),
        ("/v1/embeddings", {"input": "x", "model": "legal"}),
    ],
)
def test_a_request_that_chooses_has_no_warning(
    path: str, body: dict[str, Any], require_model: bool
) -> None:
    response = post(make_app(require_model=require_model), path, body)
    assert "--require-model" not in response.text
    assert "no model" not in response.headers.get(WARNING, "")


def test_a_server_of_a_base_alone_has_no_warning() -> None:
    backend = ScriptedBackend()
    app = create_app(backend, ServerOptions(), names=AdapterNames(backend))
    assert WARNING not in post(app, "/v1/completions", {"prompt": "x"}).headers


def test_adapters_of_a_registry_count(registry_app: Make) -> None:
    assert (
        "no model" in post(registry_app().app, "/v1/completions", {"prompt": "x"}).headers[WARNING]
    )


def test_an_adapter_may_have_the_name_that_else_chooses_nothing(registry_app: Make) -> None:
    served = registry_app(require_model=True)
    served.push("default/dummy@1.0.0", 1)
    assert post(served.app, "/v1/completions", {"prompt": "x", "model": "dummy"}).is_success
