"""The application as a whole: the routes it has, CORS, and independence of two of them."""

from __future__ import annotations

from tests.unit.server.asgi_client import complete, get, make_app, request

ROUTES = {
    ("GET", "/v1/adapters"),
    ("GET", "/v1/adapters/{name}"),
    ("POST", "/v1/adapters/{name}/pin"),
    ("DELETE", "/v1/adapters/{name}/pin"),
    ("POST", "/v1/adapters/plan"),
    ("POST", "/v1/adapters"),
    ("DELETE", "/v1/adapters/{name}"),
    ("POST", "/v1/adapters/{name}/promote"),
    ("POST", "/v1/adapters/{name}/rollback"),
    ("POST", "/v1/adapters/{name}/split"),
    ("POST", "/v1/adapters/{name}/warm"),
    ("POST", "/v1/run"),
    ("GET", "/v1/receipts"),
    ("GET", "/v1/receipts/{receipt_id}"),
    ("GET", "/v1/stats"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
}


def test_document_lists_exactly_the_routes_that_are_served() -> None:
    paths = make_app().openapi()["paths"]
    assert {(method.upper(), path) for path in paths for method in paths[path]} == ROUTES


def test_pages_of_other_origins_may_not_read_answers_by_default() -> None:
    response = get(make_app(), "/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers


def test_allowed_origin_passes_the_preflight() -> None:
    app = make_app(cors_origins=("https://app.example",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    response = request(app, "OPTIONS", "/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"


def test_two_apps_count_apart() -> None:
    """A shared registry would fail at the second app, or mix their figures."""
    first, second = make_app(), make_app()
    complete(first)
    assert 'vllm:generation_tokens_total{model_name="tiny-base"} 9.0' in get(first, "/metrics").text
    assert "vllm:generation_tokens_total{" not in get(second, "/metrics").text
