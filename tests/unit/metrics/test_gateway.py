"""Adapter metrics as inference gateways parse them."""

from __future__ import annotations

import time
from dataclasses import replace

from loramux.metrics.gateway import MAX_NAMES
from loramux.metrics.server import Metrics
from tests.gateway_rules import PodMetrics, parse_scrape
from tests.unit.metrics.scraping import scraped
from tests.unit.metrics.test_engine import loaded_backend
from tests.unit.server.scripted_backend import ScriptedBackend, named


def metrics_of(backend: ScriptedBackend, *, max_resident: int = 8) -> Metrics:
    labels_of = backend.names.labels_of
    return Metrics(backend, labels_of=labels_of, max_resident=lambda: max_resident)


def pod_of(metrics: Metrics) -> PodMetrics:
    return parse_scrape(metrics.render().decode())


def test_a_gateway_reads_every_figure() -> None:
    pod = pod_of(metrics_of(loaded_backend()))
    assert (pod.running_queue, pod.waiting_queue, pod.kv_usage) == (3, 2, 0.45)
    assert (pod.running, pod.waiting) == ({"legal"}, {"team/polite"})
    assert (pod.block_size, pod.num_blocks, pod.max_adapters) == (16, 0, 8)
    assert (pod.stack_kv_usage, pod.stack_hit_rate) == (0.45, 0.75)
    assert (pod.num_loaded, pod.max_loaded) == (1, 8) and set(pod.loaded) == {"legal"}


def test_the_time_of_the_lists_is_now() -> None:
    [(_, value)] = scraped(loaded_backend())["vllm:lora_requests_info"]
    assert abs(value - time.time()) < 60


def test_an_empty_replica_has_room_for_an_adapter() -> None:
    """Catches a limit of 0, with which a scorer never sends an adapter to a fresh replica."""
    backend = ScriptedBackend()
    for max_resident in (1, 500):
        pod = pod_of(metrics_of(backend, max_resident=max_resident))
        assert pod.max_adapters == max_resident and pod.affinity("legal") == 0.8


def test_an_idle_adapter_on_the_device_has_full_affinity_by_the_name_asked_for() -> None:
    backend = loaded_backend()
    backend.stats = replace(backend.stats, running_adapters={}, waiting_adapters={})
    metrics = metrics_of(backend)
    metrics.asked.add(named("legal").cid, "acme/legal@1.0.0")
    pod = pod_of(metrics)
    assert pod.affinity("acme/legal@1.0.0") == pod.affinity("legal") == 1.0
    assert pod.affinity("other") == 0.8


def test_a_full_device_always_has_room_for_one_more() -> None:
    """The least recently used one would be evicted; the newest ones are listed."""
    backend = ScriptedBackend()
    cids = [f"cidv1:sha256:{i}" for i in range(6)]
    for i, cid in enumerate(cids):
        backend.give_name(f"a{i}", replace(named(f"{i}"), cid=cid))
    backend.stats = replace(backend.stats, resident_adapters=tuple(cids))
    metrics = metrics_of(backend, max_resident=4)
    for i in (3, 1, 5):
        metrics.asked.add(cids[i], f"a{i}")
    pod = pod_of(metrics)
    assert pod.running == {"a5", "a1", "a3"} and pod.affinity("a0") == 0.8


def test_names_with_a_comma_are_left_out_of_the_lists() -> None:
    backend = loaded_backend()
    metrics = metrics_of(backend)
    metrics.asked.add(named("legal").cid, "ties(a,b)")
    assert pod_of(metrics).running == {"legal"}


def test_lists_end_at_their_limit_and_forget_removed_adapters() -> None:
    backend = ScriptedBackend()
    cids = [f"cidv1:sha256:{i}" for i in range(400)]
    for i, cid in enumerate(cids):
        backend.give_name(f"a{i}", replace(named(f"{i}"), cid=cid))
    backend.stats = replace(backend.stats, resident_adapters=tuple(cids))
    metrics = metrics_of(backend, max_resident=1000)
    metrics.asked.add("cidv1:sha256:gone", "gone")
    assert len(pod_of(metrics).running) == MAX_NAMES
    assert not list(metrics.asked.names_of("cidv1:sha256:gone"))


def test_each_loaded_adapter_has_rank_level_and_pin() -> None:
    backend = loaded_backend()
    backend.pinned = {named("legal").cid}
    found = scraped(backend, metrics_of(backend))
    labels = {"adapter_name": "legal", "level": "gpu", "pinned": "true", "rank": "8"}
    assert found["vllm:lora_adapter_loaded"] == [(labels, 1)]
    assert found["vllm:num_gpu_loaded_lora_adapters"] == [({}, 1)]
    assert found["vllm:max_gpu_lora_adapters"] == [({}, 8)]
