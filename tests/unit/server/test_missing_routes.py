"""B7 and B8: paths and methods that the server does not have, in the shapes of their APIs."""

from __future__ import annotations

import pytest

from loramux.types.routes import ROUTE_ACCESS
from tests.unit.server.asgi_client import make_app, request
from tests.unit.server.registry_app import Make


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/chat/completion", "Did you mean POST /v1/chat/completions?"),
        ("GET", "/v1/model", "Did you mean GET /v1/models?"),
        ("POST", "/v1/adaptors", "Did you mean POST /v1/adapters?"),
        ("GET", "/nothing/like/this/at/all", "GET /openapi.json lists all routes."),
    ],
)
def test_404_names_the_nearest_route(method: str, path: str, hint: str) -> None:
    response = request(make_app(), method, path)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == f"There is no route {method} {path}. {hint}"


def test_405_names_the_method() -> None:
    response = request(make_app(), "GET", "/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    message = response.json()["error"]["message"]
    assert message == "GET /v1/chat/completions is not allowed. Send POST."
    assert "Send GET or POST." in request(make_app(), "PUT", "/v1/adapters").text


@pytest.mark.parametrize(
    ("path", "options", "flag"),
    [
        ("/v1/load_lora_adapter", {}, "--allow-runtime-lora-updating"),
        ("/unload_lora_adapter", {}, "--allow-runtime-lora-updating"),
        ("/adapters", {}, "--allow-runtime-lora-updating"),
        ("/ui", {"ui": False}, "--no-ui"),
        ("/api/chat", {"compat": ()}, "--compat ollama"),
        ("/v1/messages", {"compat": ("ollama",)}, "--compat anthropic"),
    ],
)
def test_404_names_the_flag_that_opens_the_route(
    path: str, options: dict[str, object], flag: str
) -> None:
    response = request(make_app(**options), "POST", path)
    assert (response.status_code, flag in response.text) == (404, True), response.text


def test_a_tenant_reads_the_same_of_a_method_that_is_missing(registry_app: Make) -> None:
    app = registry_app(tenant_header="x-tenant").app
    response = request(app, "PUT", "/v1/models", headers={"x-tenant": "acme"})
    assert response.status_code in (404, 405) and "Send GET." in response.text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/api/pull", "/api/", "/api/x/y", "/api/blobs/sha256:1"])
def test_ollamas_unknown_paths_answer_in_its_shape(method: str, path: str) -> None:
    response = request(make_app(), method, path)
    assert response.status_code == 404 and list(response.json()) == ["error"]
    assert response.json()["error"].startswith(f"There is no route {method} {path}.")


def test_ollamas_paths_answer_other_methods_in_its_shape() -> None:
    response = request(make_app(), "GET", "/api/chat")
    assert response.status_code == 405
    assert response.json() == {"error": "GET /api/chat is not allowed. Send POST."}


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/x/y"])
def test_unknown_paths_of_messages_answer_in_anthropics_shape(path: str) -> None:
    response = request(make_app(), "POST", path)
    body = response.json()
    assert (response.status_code, body["type"]) == (404, "error")
    assert body["error"]["type"] == "not_found_error"
    assert f"There is no route POST {path}." in body["error"]["message"]


def test_without_the_family_its_paths_answer_as_all_others() -> None:
    response = request(make_app(compat=()), "GET", "/api/pull")
    assert response.json()["error"]["code"] == 404


def test_a_long_path_is_neither_compared_nor_shown_in_full() -> None:
    response = request(make_app(), "GET", "/" + "x" * 5000)
    assert response.status_code == 404 and len(response.text) < 400


def test_no_route_is_called_missing() -> None:
    paths = {key.partition(" ")[2] for key in ROUTE_ACCESS if "{" not in key}
    for path in sorted(paths - {"/v1/live"}):
        response = request(make_app(allow_runtime_lora_updating=True), "DELETE", path)
        assert "There is no route" not in response.text, path
