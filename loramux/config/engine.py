"""Settings of an engine: frozen, and checked when made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from loramux.errors import InvalidRequest

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """'2GiB', '512M', '1.5 GB' or a plain number. Units are powers of 1024 in every spelling."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size. Write it like 512MiB, 2GiB or 1073741824.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


EvictionName = Literal["cost", "lru"]
MERGES = ("off", "auto")
SCHEDULES = ("fair", "fcfs")
EVICTIONS: tuple[EvictionName, ...] = ("cost", "lru")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(known)}, got {value!r}.", param=name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_batch_tokens: int = 512
    """Rows of one step: every running sequence's next token, then chunks of prompts."""
    max_sequences: int = 256
    """Sequences that run at once."""
    block_tokens: int = 16
    """Tokens whose keys and values share a page."""
    max_model_len: int = 2048
    """Longest prompt plus output."""
    schedule: str = "fair"
    """fair: shares per tenant and adapter; fcfs: in order of arrival."""
    max_wait_s: float = 2.0
    """After this long, a request of somebody who had less than his share takes others' place."""
    max_loras: int | None = None
    """Distinct adapters in one batch; None: as many as fit."""
    base_digest: str = ""
    """Part of every prefix-cache key."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "block_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be 1 or more.", param=name)
        if self.max_loras is not None and self.max_loras < 1:
            raise InvalidRequest("max_loras must be 1 or more.", param="max_loras")
        if self.max_wait_s < 0:
            raise InvalidRequest("max_wait_s must be 0 or more seconds.", param="max_wait_s")
        _check_choice("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32; auto is float32 on a CPU without fast bfloat16."""
    device: str = "cpu"
    device_memory_bytes: int | None = None
    """The page pool of KV cache and adapters; None: a quarter of the memory, 4 GiB at most, and
    on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, working memory, graphs and the page pool together."""
    lora_tail_ranks: int = 256
    """Ranks of adapters that a GPU computes with the base's own products, in blocks of 16: room for
    them is kept behind every weight. A step whose adapters need more reads them one by one."""
    host_memory_bytes: int = 2**30
    """Adapters kept in host memory, packed and ready to copy into the pool."""
    disk_space_bytes: int = 8 * 2**30
    """Packed adapters kept on disk; 0: none."""
    disk_folder: str | None = None
    """Where; None: no disk tier."""
    max_cpu_loras: int | None = None
    """Adapters in host memory; None: as many as fit."""
    max_loras: int | None = None
    """Distinct adapters in one batch; None: as many as fit."""
    max_active_adapters: int | None = None
    """Adapters in the pool, running or idle; None: as many as fit."""
    adapter_memory_fraction: float = 1.0
    """Largest share of the pool that adapters may take from the KV cache."""
    eviction: EvictionName = "cost"
    schedule: str = "fair"
    max_wait_s: float = 2.0
    prefix_cache: bool = True
    max_batch_tokens: int = 512
    max_sequences: int = 256
    block_tokens: int = 16
    max_model_len: int | None = None
    """None: what the model allows."""
    max_rank: int | None = None
    """Refuse adapters of a larger rank; None: any rank."""
    strict_base: bool = False
    """Refuse an adapter that was trained on a base of another name."""
    pack_weights: bool = True
    """Keep a second copy of the base weights in the CPU's fastest layout, when memory allows."""
    merge: str = "off"
    """auto: an adapter that dominates is merged into a copy of the weights, where it is faster."""
    merge_memory_bytes: int | None = None
    """Largest merged copy; None: a quarter of the memory."""
    reference_kernels: bool = False
    """Run the plain torch kernels everywhere; for hunting bugs (also LORAMUX_KERNELS=torch)."""

    def __post_init__(self) -> None:
        _check_choice("eviction", self.eviction, EVICTIONS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("merge", self.merge, MERGES)
        if not 0 < self.adapter_memory_fraction <= 1:
            raise InvalidRequest("adapter_memory_fraction must be in (0, 1].")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidRequest("gpu_memory_utilization must be in (0, 1].")
        if self.lora_tail_ranks < 0 or self.lora_tail_ranks % 16:
            raise InvalidRequest(
                f"lora_tail_ranks must be a multiple of 16, got {self.lora_tail_ranks}. "
                "Set it to 0 to keep no room for adapters behind the weights.",
                param="lora_tail_ranks",
            )
        if self.merge != "off" and self.is_gpu:
            raise InvalidRequest(
                f"merge={self.merge!r} works on a CPU only: a GPU's kernels read adapters from "
                "their pages, and merging would gain nothing. Set merge to off.",
                param="merge",
            )

    @property
    def is_gpu(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    @property
    def wants_device_kernels(self) -> bool:
        """Those of a GPU; LORAMUX_KERNELS=triton runs them in Triton's interpreter, for tests."""
        if os.environ.get("LORAMUX_KERNELS") == "triton":
            return True
        return self.is_gpu and not self.wants_reference_kernels

    @property
    def wants_reference_kernels(self) -> bool:
        return self.reference_kernels or os.environ.get("LORAMUX_KERNELS") == "torch"

    @property
    def may_compile_kernels(self) -> bool:
        """LORAMUX_KERNELS=cpu runs what a CPU without numba runs, for tests."""
        return os.environ.get("LORAMUX_KERNELS") != "cpu"
