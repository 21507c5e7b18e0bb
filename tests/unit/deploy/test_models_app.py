"""Which model of an address a request is for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.testclient import TestClient

from loramux.deploy.models_app import ModelsApp
from loramux.router.answers import json_answer


@dataclass
class Model:
    """A model whose application tells what it was asked."""

    name: str
    is_text: bool
    adapter_names: frozenset[str] = frozenset()
    status: int = 200
    phases: list[str] = field(default_factory=list)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                self.phases.append((await receive())["type"])
                await send({"type": f"lifespan.{phase}.complete"})
            return
        message = await receive()
        told = {
            "status": "ready" if self.status == 200 else "starting",
            "data": [{"id": self.name}],
            "by": self.name,
            "path": scope["path"],
            "raw": scope["raw_path"].decode(),
            "body": message["body"].decode(),
        }
        await json_answer(told, status=self.status).send(send)


def models() -> list[Model]:
    return [
        Model("chat", True, frozenset({"pirate", "both"})),
        Model("flux", False, frozenset({"ink"})),
        Model("sdxl", False, frozenset({"night", "both"})),
    ]


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(ModelsApp({model.name: model for model in models()})) as client:
        yield client


def by(client: TestClient, path: str, **body: Any) -> tuple[str, str]:
    told = client.post(path, json=body).json()
    assert told["body"] == "" or json.loads(told["body"]) == body
    return told["by"], told["path"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"model": "chat"}, "chat"),
        ("/v1/chat/completions", {"model": "pirate"}, "chat"),
        ("/v1/images/generations", {"model": "sdxl", "adapters": ["ink"]}, "sdxl"),
        ("/v1/images/generations", {"adapters": ["night"]}, "sdxl"),
        ("/v1/images/generations", {"model": "ink"}, "flux"),
        # The only model of texts may know the name from its registry.
        ("/v1/chat/completions", {"model": "acme/hotfix@prod"}, "chat"),
        ("/v1/completions", {}, "chat"),
    ],
)
def test_the_body_names_the_model(client, path, body, expected) -> None:
    assert by(client, path, **body) == (expected, path)


def test_the_path_names_the_model(client) -> None:
    assert by(client, "/flux/predict", prompt="x") == ("flux", "/flux/predict")
    assert by(client, "/flux/v1/images/generations", prompt="x") == (
        "flux",
        "/v1/images/generations",
    )
    told = client.get("/chat/v1/adapters/acme%2Fa%401").json()
    assert (told["by"], told["path"], told["raw"]) == (
        "chat",
        "/v1/adapters/acme/a@1",
        "/v1/adapters/acme%2Fa%401",
    )


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt": "x"}, 400, "The body names no model. This address serves chat, flux, sdxl"),
        ({"model": "fluks"}, 404, "Did you mean flux"),
        ({"model": "both"}, 400, "Several models have an adapter 'both'"),
    ],
)
def test_an_unclear_request_is_refused(client, body, status, reason) -> None:
    answer = client.post("/v1/images/generations", json=body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]


def test_lists_and_health_are_of_all_models() -> None:
    served = models()
    with TestClient(ModelsApp({model.name: model for model in served})) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["chat", "flux", "sdxl"]
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 404
        served[1].status = 503
        answer = client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["models"] == {"chat": "ready", "flux": "starting", "sdxl": "ready"}
    assert all(len(model.phases) == 2 for model in served)


def test_one_model_gets_every_request() -> None:
    with TestClient(ModelsApp({"chat": Model("chat", True)})) as client:
        assert by(client, "/v1/completions", model="unknown") == ("chat", "/v1/completions")
        assert client.get("/metrics").json()["by"] == "chat"
