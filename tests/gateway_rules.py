"""What inference gateways read of a scrape, by their own parsing rules.

The endpoint picker of llm-d and of the inference extension: the newest sample of
`vllm:lora_requests_info` by its value, lists split at commas and trimmed, `max_lora` as an integer;
gauges by name; block size and block count from the labels of `vllm:cache_config_info`; for each
adapter one sample of `vllm:lora_adapter_loaded`. production-stack's router: older names, by sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class LoadedAdapter:
    level: str
    rank: int
    is_pinned: bool


@dataclass(frozen=True)
class PodMetrics:
    waiting_queue: int
    running_queue: int
    kv_usage: float
    block_size: int
    num_blocks: int
    max_adapters: int
    running: frozenset[str]
    waiting: frozenset[str]
    loaded: Mapping[str, LoadedAdapter]
    num_loaded: int
    max_loaded: int
    stack_kv_usage: float
    stack_hit_rate: float

    def affinity(self, model: str) -> float:
        """Return the score of llm-d's scorer of LoRA affinity."""
        if model in self.running:
            return 1.0
        if len(self.running) + len(self.waiting) < self.max_adapters:
            return 0.8
        return 0.6 if model in self.waiting else 0.0


def parse_scrape(text: str) -> PodMetrics:
    """Raise KeyError, IndexError or ValueError where a gateway would log an extract error."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    lora, _ = max(samples["vllm:lora_requests_info"], key=lambda sample: sample[1])
    config, is_set = samples["vllm:cache_config_info"][0]
    assert is_set == 1
    return PodMetrics(
        waiting_queue=int(samples["vllm:num_requests_waiting"][0][1]),
        running_queue=int(samples["vllm:num_requests_running"][0][1]),
        kv_usage=samples["vllm:kv_cache_usage_perc"][0][1],
        block_size=int(config["block_size"]),
        num_blocks=int(config["num_gpu_blocks"]),
        max_adapters=int(lora["max_lora"]),
        running=_names(lora["running_lora_adapters"]),
        waiting=_names(lora["waiting_lora_adapters"]),
        loaded=dict(map(_loaded, samples.get("vllm:lora_adapter_loaded", []))),
        num_loaded=int(samples["vllm:num_gpu_loaded_lora_adapters"][0][1]),
        max_loaded=int(samples["vllm:max_gpu_lora_adapters"][0][1]),
        stack_kv_usage=samples["vllm:gpu_cache_usage_perc"][0][1],
        stack_hit_rate=_hit_rate(samples),
    )


def _loaded(sample: tuple[dict[str, str], float]) -> tuple[str, LoadedAdapter]:
    labels, value = sample
    assert value == 1 and labels["level"] in ("gpu", "cpu")
    is_pinned = {"true": True, "false": False}[labels["pinned"]]
    return labels["adapter_name"], LoadedAdapter(labels["level"], int(labels["rank"]), is_pinned)


def _hit_rate(samples: Mapping[str, list[tuple[dict[str, str], float]]]) -> float:
    hits = samples["vllm:gpu_prefix_cache_hits_total"][0][1]
    queries = samples["vllm:gpu_prefix_cache_queries_total"][0][1]
    return hits / queries if queries else 0.0


def _names(joined: str) -> frozenset[str]:
    return frozenset(name for part in joined.split(",") if (name := part.strip()))
