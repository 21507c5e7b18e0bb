"""The server's own counters, also before there is an engine."""

from __future__ import annotations

from loramux.backend.host import Health
from loramux.metrics.server import Metrics
from tests.unit.metrics.scraping import scraped
from tests.unit.server.scripted_backend import ScriptedBackend


def test_scrape_before_the_engine_is_up_is_not_an_error() -> None:
    class Unknown(ScriptedBackend):
        def __init__(self) -> None:
            super().__init__()
            self.health = Health.STARTING
            del self.card

    found = scraped(Unknown())
    assert found["loramux:engine_ready"] == [({"model_name": ""}, 0)]


def test_routers_latency_series_exist() -> None:
    text = Metrics(ScriptedBackend()).render().decode()
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
    ):
        assert f"# TYPE {name} histogram" in text
    for name in ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success"):
        assert f"# TYPE {name}_total counter" in text
