"""Figures that routers scrape: names, labels, and truth while adapters come and go."""

from __future__ import annotations

from loramux.backend.host import EngineStats, TierStats
from tests.unit.metrics.scraping import scraped
from tests.unit.server.scripted_backend import ScriptedBackend, named

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_pages=100,
    num_free_pages=25,
    num_idle_pages=30,
    num_preemptions=4,
    num_adapter_loads=7,
    num_adapter_evictions=5,
    num_steps=11,
    resident_adapters=("cidv1:sha256:legal",),
    running_adapters={"cidv1:sha256:legal": 2},
    waiting_adapters={"cidv1:sha256:team/polite": 1, "cidv1:sha256:forgotten": 1},
    tiers=(
        TierStats(
            tier="device",
            budget_bytes=1000,
            used_bytes=600,
            num_adapters=3,
            hits=50,
            misses=8,
            loads=9,
            evictions=6,
            load_seconds=0.25,
            load_bytes=1800,
            failures=1,
        ),
        TierStats(tier="host", budget_bytes=5000, hits=7, misses=1),
    ),
    prefix_query_tokens=400,
    prefix_hit_tokens=300,
    step_loss_s={"0.001": 5, "0.01": 2, "+Inf": 1},
    step_loss_sum_s=0.5,
)
OF_ROUTERS = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 2,
    "vllm:kv_cache_usage_perc": 0.45,
    "vllm:num_preemptions_total": 4,
    "vllm:gpu_cache_usage_perc": 0.45,
    "vllm:gpu_prefix_cache_queries_total": 400,
    "vllm:gpu_prefix_cache_hits_total": 300,
    "loramux:pages": 100,
    "loramux:pages_used": 75,
    "loramux:adapter_loads_total": 7,
    "loramux:adapter_evictions_total": 5,
    "vllm:prefix_cache_queries_total": 400,
    "vllm:prefix_cache_hits_total": 300,
    "loramux:engine_steps_total": 11,
    "loramux:engine_restarts_total": 1,
    "loramux:engine_ready": 1,
}


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


def test_kills_are_counted_by_cause() -> None:
    backend = loaded_backend()
    backend.kills = {"hung_step": 2, "silent": 0}
    found = scraped(backend)["loramux:engine_kills_total"]
    assert [(labels["cause"], value) for labels, value in found] == [
        ("hung_step", 2),
        ("silent", 0),
    ]


def test_all_names_of_an_adapter_on_the_device_are_labels() -> None:
    backend = loaded_backend()
    backend.give_name("alias", named("legal"))
    resident = [labels["adapter"] for labels, _ in scraped(backend)["loramux:adapter_resident"]]
    assert resident == ["legal", "alias"]


def test_each_tier_has_its_own_series() -> None:
    found = scraped(loaded_backend())
    label = {"model_name": "tiny-base", "tier": "device"}
    values = {
        "hits_total": 50,
        "misses_total": 8,
        "loads_total": 9,
        "evictions_total": 6,
        "load_seconds_total": 0.25,
        "load_bytes_total": 1800,
        "load_failures_total": 1,
        "bytes": 600,
        "budget_bytes": 1000,
        "adapters": 3,
    }
    for name, value in values.items():
        device, host = found[f"loramux:tier_{name}"]
        assert device == (label, value)
        assert host[0]["tier"] == "host"


def test_step_time_lost_to_loads_is_a_histogram_that_adds_up() -> None:
    """Catches buckets that are not cumulative, which Prometheus cannot read."""
    found = scraped(loaded_backend())
    buckets = found["loramux:step_load_loss_seconds_bucket"]
    assert [(labels["le"], value) for labels, value in buckets] == [
        ("0.001", 5),
        ("0.01", 7),
        ("+Inf", 8),
    ]
    assert found["loramux:step_load_loss_seconds_count"][0][1] == 8
    assert found["loramux:step_load_loss_seconds_sum"][0][1] == 0.5
