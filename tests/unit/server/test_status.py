"""Health tells the truth, also when asked in depth."""

from __future__ import annotations

import asyncio

import pytest

from loramux import __version__
from loramux.backend.host import EngineStats, Health, TierStats
from loramux.errors import EngineStopped
from tests.unit.server.asgi_client import complete, get, make_app
from tests.unit.server.scripted_backend import ScriptedBackend


@pytest.mark.parametrize("path", ["/health", "/ping", "/health?deep=1"])
@pytest.mark.parametrize("health", list(Health))
def test_health_is_200_only_while_requests_are_taken(health: Health, path: str) -> None:
    backend = ScriptedBackend()
    backend.health = health
    backend.num_restarts = 3
    backend.stats = EngineStats(num_running=2, num_waiting=1)
    response = get(make_app(backend), path)
    assert response.status_code == (200 if health is Health.READY else 503)
    report = response.json()
    assert report["status"] == health.value
    assert (report["restarts"], report["running"], report["waiting"]) == (3, 2, 1)


def test_deep_check_reports_what_it_did() -> None:
    report = get(make_app(), "/health?deep=1").json()
    assert report["checks"] == {"generate_s": 0.1}
    assert "checks" not in get(make_app(), "/health?deep=0").json()


def test_deep_check_uses_the_configured_time() -> None:
    backend = ScriptedBackend()
    backend.probe_script = lambda timeout_s: {"given_s": timeout_s}
    app = make_app(backend, probe_timeout_s=7.5)
    assert get(app, "/health?deep=true").json()["checks"] == {"given_s": 7.5}


@pytest.mark.parametrize("error", [EngineStopped("no adapter loads"), ValueError("broken")])
def test_failed_deep_check_is_503_with_its_reason(error: Exception) -> None:
    def fail(timeout_s: float) -> dict[str, float]:
        raise error

    backend = ScriptedBackend()
    backend.probe_script = fail
    response = get(make_app(backend), "/health?deep=1")
    assert response.status_code == 503
    assert response.json()["status"] == "failing"
    assert str(error) in response.json()["failure"]


def test_a_probe_without_an_answer_times_out() -> None:
    class Hanging(ScriptedBackend):
        async def probe(self, timeout_s: float) -> dict[str, float]:
            await asyncio.Event().wait()
            return {}

    response = get(make_app(Hanging(), probe_timeout_s=-0.99), "/health?deep=1")
    assert response.status_code == 503
    assert "No answer within" in response.json()["failure"]


def test_version_is_the_packages() -> None:
    assert get(make_app(), "/version").json() == {"version": __version__}


def test_metrics_are_prometheus_text() -> None:
    response = get(make_app(), "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE vllm:num_requests_running gauge" in response.text


def test_stats_show_batch_queue_pages_and_tiers() -> None:
    backend = ScriptedBackend()
    tier = TierStats(tier="device", budget_bytes=100, used_bytes=60, num_adapters=3, hits=5)
    backend.stats = EngineStats(
        num_running=2, num_waiting=1, num_pages=16, num_free_pages=4, tiers=(tier,)
    )
    app = make_app(backend)
    complete(app, model="legal")
    report = get(app, "/v1/stats").json()
    assert (report["model"], report["status"]) == ("tiny-base", "ready")
    assert (report["running"], report["waiting"], report["free_pages"]) == (2, 1, 4)
    assert report["page_bytes"] == (1 << 20) // 16
    assert (report["device"], report["gpu_name"]) == ("cpu", None)
    assert (report["requests"], report["prompt_tokens"], report["generation_tokens"]) == (1, 2, 9)
    [shown] = report["tiers"]
    assert (shown["tier"], shown["adapters"], shown["hits"]) == ("device", 3, 5)
