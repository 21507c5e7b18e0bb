"""What inference gateways read of a scrape, by their own parsing rules.

The endpoint picker of llm-d and of the inference extension: the newest sample of
`vllm:lora_requests_info` by its value, lists split at commas and trimmed, `max_lora` as an integer;
gauges by name; block size and block count from the labels of `vllm:cache_config_info`.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


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

    def affinity(self, model: str) -> float:
        """Returns the score of llm-d's scorer of LoRA affinity."""
        if model in self.running:
            return 1.0
        if len(self.running) + len(self.waiting) < self.max_adapters:
            return 0.8
        return 0.6 if model in self.waiting else 0.0


def parse_scrape(text: str) -> PodMetrics:
    """Raises KeyError, IndexError or ValueError where a gateway would log an extract error."""
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
    )


def _names(joined: str) -> frozenset[str]:
    return frozenset(name for part in joined.split(",") if (name := part.strip()))
