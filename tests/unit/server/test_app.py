"""The application as a whole: the routes it has, CORS, and independence of two of them."""

from __future__ import annotations

from loramux.server.families.table import FAMILIES, OWN
from tests.unit.server.asgi_client import complete, get, make_app, post, request
from tests.unit.server.scripted_backend import ScriptedBackend

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
    ("GET", "/v1/receipts/key"),
    ("GET", "/v1/caller"),
    ("GET", "/v1/doctor/{name}"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/audit"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("DELETE", "/v1/keys/{key_id}"),
    ("POST", "/v1/keys/{key_id}/rotate"),
    ("GET", "/v1/stats"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/fim/completions"),
    ("POST", "/classify"),
    ("POST", "/pooling"),
    ("POST", "/rerank"),
    ("POST", "/score"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/v2/rerank"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/health"),
    ("GET", "/live"),
    ("GET", "/v1/residency"),
    ("POST", "/pooling"),
    ("POST", "/v1/embeddings"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
}


def test_requests_may_have_the_prefix_of_a_proxy() -> None:
    app = make_app(root_path="/llm")
    body = {"model": "tiny-base", "prompt": "hi"}
    for path in ("/llm/v1/completions", "/v1/completions"):
        assert post(app, path, body).status_code == 200
    assert get(app, "/llm").text == "Ollama is running"
    assert get(app, "/llmx/health").status_code == 404
    assert get(app, "/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_document_lists_exactly_the_routes_that_are_served() -> None:
    paths = make_app().document.document["paths"]
    own = {
        (method.upper(), path)
        for path, ways in paths.items()
        for method, way in ways.items()
        if not {*FAMILIES, OWN} & set(way["tags"])
    }
    assert own == ROUTES


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
    first, second = make_app(ScriptedBackend()), make_app(ScriptedBackend())
    complete(first)
    assert 'vllm:generation_tokens_total{model_name="tiny-base"} 9.0' in get(first, "/metrics").text
    assert "vllm:generation_tokens_total{" not in get(second, "/metrics").text
