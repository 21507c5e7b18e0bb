"""Settings of the engine and of its scheduler: frozen dataclasses that check their values."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal

from loramux.config.fields import (
    AUTO,
    FRACTION,
    NOT_NEGATIVE_SECONDS,
    Kind,
    Limit,
    at_least,
    check_limits,
    one_of,
    setting,
)
from loramux.config.speculative import SpeculativeConfig, parse_speculative_config
from loramux.errors import InvalidRequest

EvictionName = Literal["cost", "lru"]
EVICTIONS: tuple[EvictionName, ...] = ("cost", "lru")
SCHEDULES = ("fair", "fcfs")
MERGES = ("off", "auto")
POOLINGS = ("auto", "last", "mean")
QUANTIZATIONS = ("none", "int8", "fp8", "int4")
DTYPES = ("auto", "bfloat16", "float16", "float32")
Auto = Literal["auto"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Values of `auto`. Measured on an H200 with an 8B model: 41,100 prompt tokens/s in steps of 2,048
# tokens, 34,200 in steps of 512.
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 2048, 512
AUTO_SEQUENCES = 256
GPU_HOST_MEMORY_DIVISOR, CPU_HOST_MEMORY_BYTES = 4, 2**30
# Groups of settings, in the order of `loramux serve --help`.
MODEL, MEMORY = "Model and adapters", "Memory and batching"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler; the engine derives them from its own and from the model."""

    max_batch_tokens: int = 512
    """Tokens of one step: one per running sequence, then prefill chunks."""
    max_sequences: int = 256
    """Sequences that run at once."""
    block_tokens: int = 16
    """Tokens whose keys and values are stored in one page."""
    max_model_len: int = 2048
    """Largest number of prompt and output tokens of a sequence."""
    schedule: str = "fair"
    """fair: shares per tenant and adapter; fcfs: order of arrival."""
    max_wait_s: float = 2.0
    """Wait after which a request below its share may preempt requests above theirs."""
    max_loras: int | None = None
    """Distinct adapters in one batch; None: as many as fit."""
    base_digest: str = ""
    """Digest of the base model; it is part of every prefix-cache key."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "block_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be 1 or more.", param=name)
        if self.max_loras is not None and self.max_loras < 1:
            raise InvalidRequest("max_loras must be 1 or more.", param="max_loras")
        if self.max_wait_s < 0:
            raise InvalidRequest("max_wait_s must be 0 or more seconds.", param="max_wait_s")
        if self.schedule not in SCHEDULES:
            raise InvalidRequest(
                f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}.",
                param="schedule",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, for `LLM` and for `loramux serve`."""

    dtype: str = setting(
        "auto",
        Kind.TEXT,
        MODEL,
        f"Data type of the weights. Valid values: {', '.join(DTYPES)}; auto is float32 on a CPU "
        "without fast bfloat16.",
        metavar="TYPE",
        limit=one_of(*DTYPES),
    )
    kv_cache_dtype: str = setting(
        AUTO,
        Kind.TEXT,
        MODEL,
        f"Data type of keys and values in the KV cache. Valid values: {', '.join(DTYPES)}; auto is "
        "that of the weights.",
        metavar="TYPE",
        limit=one_of(*DTYPES),
    )
    quantization: str = setting(
        "none",
        Kind.TEXT,
        MODEL,
        "Format that the weights of the layers are kept in. Valid values: "
        f"{', '.join(QUANTIZATIONS)}; int8: a byte per weight and a scale per output row; "
        "fp8: FP8 weights and inputs; int4: 4 bits in groups of 128; both on a Hopper GPU.",
        metavar="FORMAT",
        limit=one_of(*QUANTIZATIONS),
    )
    original: str | None = setting(
        None,
        Kind.TEXT,
        MODEL,
        "Unquantised model that an AWQ or SmoothQuant checkpoint was made from: a folder or a name "
        "on the hub. Adapters that were trained on it are fitted to the folded scales.",
        metavar="MODEL",
    )
    max_rank: int | None = setting(
        None,
        Kind.COUNT,
        MODEL,
        "Refuse adapters with a higher rank. Default: any rank.",
        name="max_lora_rank",
        limit=at_least(1),
    )
    strict_base: bool = setting(
        False,
        Kind.SWITCH,
        MODEL,
        "Refuse an adapter whose config names another base model.",
    )
    device: str = setting(
        AUTO,
        Kind.TEXT,
        MEMORY,
        "Device that runs the model: auto, cpu, cuda or cuda:N; auto is the first GPU that the "
        "kernels can use, else the CPU.",
        metavar="NAME",
        limit=Limit("auto, cpu, cuda or cuda:N", lambda value: bool(_DEVICE.fullmatch(value))),
    )
    device_memory_bytes: int | None = setting(
        None,
        Kind.SIZE,
        MEMORY,
        "Size of the page pool shared by KV cache and adapters, such as 2GiB. Default: on a CPU a "
        "quarter of the memory, 4 GiB at most; on a GPU what --gpu-memory-utilization leaves.",
        name="device_memory",
        metavar="SIZE",
        limit=at_least(1),
    )
    gpu_memory_utilization: float = setting(
        0.9,
        Kind.FRACTION,
        MEMORY,
        "Fraction of the GPU's memory for weights, activations, graphs and page pool together.",
        metavar="FRACTION",
        limit=FRACTION,
    )
    lora_augmented_ranks: int = setting(
        256,
        Kind.COUNT,
        MEMORY,
        "Ranks of hot adapters whose LoRA A a GPU appends to the base weights, so that one GEMM "
        "computes both; a multiple of 16. 0 disables it.",
        limit=Limit("0 or a multiple of 16", lambda value: value >= 0 and value % 16 == 0),
        aliases=("lora_tail_ranks",),
    )
    host_memory_bytes: int | Auto = setting(
        AUTO,
        Kind.SIZE,
        MEMORY,
        "Host memory for packed adapters that are ready to be copied into the pool; auto is a "
        "quarter of the available memory with a GPU, 1GiB without.",
        name="host_memory",
        metavar="SIZE",
        limit=at_least(0),
    )
    disk_space_bytes: int = setting(
        8 * 2**30,
        Kind.SIZE,
        MEMORY,
        "Disk space for checked and packed adapters, so that loading a cold adapter is one read; "
        "0 disables it. Default: 8GiB.",
        name="disk_space",
        metavar="SIZE",
        limit=at_least(0),
    )
    disk_folder: str | None = setting(
        None,
        Kind.PATH,
        MEMORY,
        "Folder of the packed adapters on disk. Default: images in the cache folder.",
        metavar="PATH",
    )
    """None: `LLM` has no disk tier; `loramux serve` uses a folder of the cache."""
    max_loras: int | None = setting(
        None,
        Kind.COUNT,
        MEMORY,
        "Maximum number of distinct adapters in one batch. Default: as many as fit.",
        limit=at_least(1),
    )
    max_cpu_loras: int | None = setting(
        None,
        Kind.COUNT,
        MEMORY,
        "Maximum number of adapters in host memory. Default: as many as fit.",
        limit=at_least(1),
    )
    adapter_memory_fraction: float = setting(
        1.0,
        Kind.FRACTION,
        MEMORY,
        "Largest fraction of the page pool that adapters may take from the KV cache.",
        metavar="FRACTION",
        limit=FRACTION,
    )
    eviction: EvictionName = setting(
        "cost",
        Kind.TEXT,
        MEMORY,
        f"Eviction policy of adapters and cached prefixes. Valid values: {', '.join(EVICTIONS)}; "
        "cost weighs frequency of use, reload time and size.",
        metavar="NAME",
        limit=one_of(*EVICTIONS),
    )
    pooling: str = setting(
        AUTO,
        Kind.TEXT,
        MODEL,
        "How hidden states become an embedding: auto, last (that of the last token) or mean; auto "
        "is what the model's files configure, and most generative models have none.",
        metavar="NAME",
        limit=one_of(*POOLINGS),
    )
    prefix_cache: bool = setting(
        True,
        Kind.SWITCH,
        MEMORY,
        "Disable the prefix cache: compute every prompt completely.",
        name="no_prefix_cache",
        is_inverted=True,
    )
    merge: str = setting(
        "off",
        Kind.TEXT,
        MEMORY,
        f"Merge mode. Valid values: {', '.join(MERGES)}; auto merges an adapter that dominates the "
        "traffic into a copy of the weights where that is measured to be faster.",
        metavar="NAME",
        limit=one_of(*MERGES),
    )
    merge_memory_bytes: int | None = setting(
        None,
        Kind.SIZE,
        MEMORY,
        "Largest merged copy of the weights. Default: a quarter of the memory.",
        name="merge_memory",
        metavar="SIZE",
    )
    schedule: str = setting(
        "fair",
        Kind.TEXT,
        MEMORY,
        f"Order of admission. Valid values: {', '.join(SCHEDULES)}; fair gives every tenant and "
        "adapter its share, fcfs keeps the order of arrival.",
        metavar="NAME",
        limit=one_of(*SCHEDULES),
    )
    max_wait_s: float = setting(
        2.0,
        Kind.SECONDS,
        MEMORY,
        "With schedule fair: seconds after which a waiting request may preempt requests of tenants "
        "and adapters that are above their share.",
        limit=NOT_NEGATIVE_SECONDS,
    )
    speculative_config: str | None = setting(
        None,
        Kind.TEXT,
        MEMORY,
        "Speculative decoding as vLLM's JSON, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 8}\': drafts are looked up in the prompt '
        "and the answer, and change no answer. Default: no drafts.",
        metavar="JSON",
    )
    max_model_len: int | None = setting(
        None,
        Kind.COUNT,
        MEMORY,
        "Maximum number of prompt and output tokens of a sequence. Default: the model's maximum.",
        limit=at_least(1),
    )
    max_batch_tokens: int | Auto = setting(
        AUTO,
        Kind.COUNT,
        MEMORY,
        "Maximum number of tokens computed in one step; auto is "
        f"{GPU_BATCH_TOKENS} on a GPU, {CPU_BATCH_TOKENS} on a CPU.",
        metavar="INTEGER|auto",
        limit=at_least(1),
    )
    max_sequences: int | Auto = setting(
        AUTO,
        Kind.COUNT,
        MEMORY,
        f"Maximum number of sequences that run at once; auto is {AUTO_SEQUENCES}.",
        metavar="INTEGER|auto",
        limit=at_least(1),
    )
    max_active_adapters: int | None = None
    """Maximum number of adapters in the page pool, in use or idle; None: as many as fit."""
    block_tokens: int = 16
    """Tokens whose keys and values are stored in one page."""
    pack_weights: bool = True
    """Keep a second copy of the base weights in the CPU's fastest layout, if memory allows."""
    reference_kernels: bool = False
    """Run the reference kernels everywhere, for debugging (also LORAMUX_KERNELS=torch)."""

    def __post_init__(self) -> None:
        check_limits(self)
        self.speculative  # noqa: B018  (raises for a value that cannot be used)
        if self.merge != "off" and self.is_gpu:
            raise InvalidRequest(
                f"merge={self.merge!r} works on a CPU only: GPU kernels read adapters from their "
                "pages, and merging gains nothing. Set merge to off.",
                param="merge",
            )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        text = self.speculative_config
        return None if text is None else parse_speculative_config(text)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU; False while it is `auto`."""
        return is_gpu(self.device)

    @property
    def wants_reference_kernels(self) -> bool:
        return self.reference_kernels or os.environ.get("LORAMUX_KERNELS") == "torch"

    @property
    def may_compile_kernels(self) -> bool:
        """Whether numba kernels may be used; LORAMUX_KERNELS=cpu forbids them, for tests."""
        return os.environ.get("LORAMUX_KERNELS") != "cpu"

    def resolve(self, device: str, *, available_bytes: int) -> ResolvedConfig:
        """Replace every `auto` by its value on a device; dtype auto also depends on the model.

        `available_bytes`: host memory that is free for this process.
        """
        if is_gpu(device):
            batch_tokens, host_bytes = GPU_BATCH_TOKENS, available_bytes // GPU_HOST_MEMORY_DIVISOR
        else:
            batch_tokens, host_bytes = CPU_BATCH_TOKENS, CPU_HOST_MEMORY_BYTES
        chosen = {
            "max_batch_tokens": batch_tokens,
            "max_sequences": AUTO_SEQUENCES,
            "host_memory_bytes": host_bytes,
        }
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: value for name, value in chosen.items() if values[name] == AUTO}
        return ResolvedConfig(**{**values, "device": device})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The settings of an engine on a known device: none but dtype is `auto`."""

    host_memory_bytes: int
    max_batch_tokens: int
    max_sequences: int

    @property
    def wants_device_kernels(self) -> bool:
        """Whether the GPU kernels run; LORAMUX_KERNELS=triton interprets them, for tests."""
        if os.environ.get("LORAMUX_KERNELS") == "triton":
            return True
        return self.is_gpu and not self.wants_reference_kernels


def is_gpu(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
