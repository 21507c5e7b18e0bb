"""Which settings of `loramux serve` are possible, one by one and together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loramux.config.engine import EVICTIONS, MERGES, SCHEDULES
from loramux.config.fields import flag
from loramux.errors import InvalidRequest

if TYPE_CHECKING:
    from loramux.config.serve import ServeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
RECEIPTS = ("auto", "on", "off")
AT_LEAST_ONE = (
    *("max_lora_rank", "max_loras", "max_cpu_loras", "max_queue_tokens", "max_model_len"),
    *("max_batch_tokens", "max_sequences", "device_memory", "receipt_retention_days"),
    *("store_space", "max_adapter_size", "fetch_workers"),
)


def check_limits(config: ServeConfig) -> None:
    for name, allowed, says in limits_of(config):
        if not allowed:
            raise InvalidRequest(
                f"{flag(name)} must be {says}, got {getattr(config, name)!r}.", param=name
            )


def limits_of(config: ServeConfig) -> list[tuple[str, bool, str]]:
    return [
        ("dtype", config.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("log_level", config.log_level in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}"),
        ("port", 0 <= config.port <= 65535, "between 0 and 65535"),
        ("host", bool(config.host), "an address such as 127.0.0.1"),
        ("eviction", config.eviction in EVICTIONS, f"one of {', '.join(EVICTIONS)}"),
        ("merge", config.merge in MERGES, f"one of {', '.join(MERGES)}"),
        ("receipts", config.receipts in RECEIPTS, f"one of {', '.join(RECEIPTS)}"),
        ("fetch_timeout_s", 0 < config.fetch_timeout_s < math.inf, "over 0 seconds"),
        ("home_tenant", bool(config.home_tenant), "the name of a tenant"),
        ("schedule", config.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
        *(
            (name, 0 < getattr(config, name) <= 1, "over 0 and at most 1")
            for name in ("adapter_memory_fraction", "gpu_memory_utilization")
        ),
        (
            "lora_tail_ranks",
            config.lora_tail_ranks >= 0 and config.lora_tail_ranks % 16 == 0,
            "0 or a multiple of 16",
        ),
        *(
            (name, getattr(config, name) >= 0, "0 or more")
            for name in ("max_queue", "host_memory", "disk_space", "prewarm")
        ),
        *(
            (name, (value := getattr(config, name)) is None or value >= 1, "1 or more")
            for name in AT_LEAST_ONE
        ),
        *(
            (name, 0 <= getattr(config, name) < math.inf, "0 or more seconds")
            for name in ("drain_s", "probe_timeout_s", "max_wait_s")
        ),
    ]


def check_names(config: ServeConfig) -> None:
    seen = set(config.served_model_name)
    for module in config.lora_modules:
        if module.name in seen:
            raise InvalidRequest(
                f"Two models would be called {module.name!r}, and a request could not say "
                "which one it means. Rename one of them in --lora-modules or "
                "--served-model-name.",
                param="lora_modules",
            )
        seen.add(module.name)
