"""Figures that routers scrape: names, labels, and truth while adapters come and go."""

from __future__ import annotations

import time
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from loramux.backend import EngineStats, Health
from loramux.metrics import Metrics
from tests.unit.server.scripted_backend import ScriptedBackend

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_pages=100,
    num_free_pages=25,
    num_preemptions=4,
    num_adapter_loads=7,
    num_adapter_evictions=5,
    num_steps=11,
    resident_adapters=("cidv1:sha256:legal",),
    running_adapters={"cidv1:sha256:legal": 2},
    waiting_adapters={"cidv1:sha256:team/polite": 1, "cidv1:sha256:forgotten": 1},
)
OF_ROUTERS = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.75,
    "vllm:num_preemptions_total": 4,
    "loramux:pages": 100,
    "loramux:pages_used": 75,
    "loramux:adapter_loads_total": 7,
    "loramux:adapter_evictions_total": 5,
    "loramux:engine_steps_total": 11,
    "loramux:engine_restarts_total": 1,
    "loramux:engine_ready": 1,
}


def scraped(backend: ScriptedBackend) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = Metrics(backend).render().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def loaded_backend() -> ScriptedBackend:
    backend = ScriptedBackend()
    backend.stats = STATS
    backend.num_restarts = 1
    return backend


def test_engine_figures_have_the_names_that_routers_know() -> None:
    found = scraped(loaded_backend())
    label = {"model_name": "tiny-base"}
    assert {name: found[name] for name in OF_ROUTERS} == {
        name: [(label, value)] for name, value in OF_ROUTERS.items()
    }


def test_adapters_are_told_by_name_in_two_different_lists() -> None:
    [(labels, value)] = scraped(loaded_backend())["vllm:lora_requests_info"]
    assert labels == {
        "max_lora": "2",
        "running_lora_adapters": "legal",
        "waiting_lora_adapters": "team/polite",
    }
    assert abs(value - time.time()) < 60


def test_two_names_of_one_adapter_are_both_told() -> None:
    backend = loaded_backend()
    backend.adapters["alias"] = replace(backend.adapters["legal"], name="alias")
    found = scraped(backend)
    assert found["vllm:lora_requests_info"][0][0]["running_lora_adapters"] == "legal,alias"
    resident = [labels["adapter"] for labels, _ in found["loramux:adapter_resident"]]
    assert resident == ["legal", "alias"]


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
