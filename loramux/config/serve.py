"""Settings of `loramux serve`: a field is a flag, a key of the TOML file, and a line of help."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from loramux.config.engine import EVICTIONS, SCHEDULES, EngineConfig, EvictionName
from loramux.config.fields import Kind, LoraModule, setting
from loramux.config.limits import DTYPES, LOG_LEVELS, check_limits, check_names

MODEL, MEMORY, NETWORK = "Model and adapters", "Memory and batching", "Network and operation"
REGISTRY = "Registry and receipts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    model: str | None = setting(
        None,
        Kind.PATH,
        MODEL,
        "Base model: a Hugging Face folder or a GGUF file. Default: the installed "
        "SmolLM2-135M-Instruct.",
        metavar="PATH",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        MODEL,
        "Name (or several) by which requests ask for the base; answers show the first. "
        "Default: the model's own name.",
        metavar="NAME…",
    )
    lora_modules: tuple[LoraModule, ...] = setting(
        (),
        Kind.LORA_MODULES,
        MODEL,
        'Adapters to serve: name=folder, or {"name": …, "path": …} as JSON; several after one '
        "flag, or the flag several times.",
        metavar="NAME=PATH…",
    )
    dtype: str = setting(
        "auto",
        Kind.TEXT,
        MODEL,
        f"Number type of the weights: {', '.join(DTYPES)}.",
        metavar="TYPE",
    )
    max_lora_rank: int | None = setting(
        None, Kind.COUNT, MODEL, "Refuse adapters of a larger rank. Default: any rank."
    )
    strict_base: bool = setting(
        False, Kind.SWITCH, MODEL, "Refuse an adapter that records another base's name."
    )
    registry: str | None = setting(
        None,
        Kind.URL_OR_PATH,
        REGISTRY,
        "Serve this registry's adapters too: a SQLite file, or postgresql://…; none: no registry. "
        "Default: $LORAMUX_REGISTRY, else registry.db in the data folder if something was pushed "
        "there.",
        metavar="URL|PATH",
        is_secret=True,
    )
    data: str | None = setting(
        None,
        Kind.PATH,
        REGISTRY,
        "Folder of the adapter store; alone, its registry.db is the registry. Default: "
        "$LORAMUX_DATA, else loramux in the user's data folder.",
        metavar="FOLDER",
    )
    store_space: int | None = setting(
        None,
        Kind.SIZE,
        REGISTRY,
        "Largest adapter store. Default: as much as the disk holds.",
        metavar="SIZE",
    )
    shared_cache: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Redis that servers share as a cache before the remote store: redis://host:6379/0. "
        "Default: $LORAMUX_SHARED_CACHE, else none.",
        metavar="URL",
        is_secret=True,
    )
    remote_store: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Bucket that keeps every adapter too: s3://bucket/folder, gs://… or az://…; what is not in "
        "the data folder comes from there. Default: $LORAMUX_REMOTE_STORE, else none.",
        metavar="URL",
    )
    home_tenant: str = setting(
        "default", Kind.TEXT, REGISTRY, "Tenant of names without tenant/.", metavar="NAME"
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        Kind.SWITCH,
        REGISTRY,
        "Let requests load and unload adapters by vLLM's calls; also "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    )
    allowed_roots: tuple[str, ...] = setting(
        (),
        Kind.PATHS,
        REGISTRY,
        "Folders under which a request may name an adapter's path.",
        metavar="FOLDER…",
    )
    allowed_http_hosts: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Hosts that adapters may be pushed from by http(s)://, such as example.com, "
        "*.example.com or host:8080; never private addresses.",
        metavar="HOST…",
    )
    private_http_hosts: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "The same for hosts of your own network, whose addresses may be private.",
        metavar="HOST…",
    )
    allowed_buckets: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Buckets that adapters may be pushed from by s3://, gs:// and az://. Default: any that "
        "the server's credentials may read.",
        metavar="BUCKET…",
    )
    allowed_hub_owners: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Owners on the Hugging Face hub that adapters may be pushed from. Default: any.",
        metavar="NAME…",
    )
    max_adapter_size: int = setting(
        8 * 2**30,
        Kind.SIZE,
        REGISTRY,
        "Largest adapter that is pushed or fetched. Default: 8GiB.",
        metavar="SIZE",
    )
    fetch_timeout_s: float = setting(
        1800.0, Kind.SECONDS, REGISTRY, "Seconds that fetching an adapter may take."
    )
    fetch_workers: int = setting(
        4, Kind.COUNT, REGISTRY, "Parts of a file that are fetched at once."
    )
    receipts: str = setting(
        "auto",
        Kind.TEXT,
        REGISTRY,
        "auto: whole answers have one, with a registry streams too, where they are kept; on: "
        "streams always; off: none.",
        metavar="NAME",
    )
    receipt_key: str | None = setting(
        None,
        Kind.PATH,
        REGISTRY,
        "Sign receipts with the Ed25519 key of this PEM file. Default: unsigned.",
        metavar="FILE",
    )
    receipt_retention_days: int | None = setting(
        None, Kind.COUNT, REGISTRY, "Remove older receipts. Default: keep all."
    )
    pool_id: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "What receipts call this server. Default: the machine's name.",
        metavar="NAME",
    )
    device: str = setting("cpu", Kind.TEXT, MEMORY, "Where the model runs.", metavar="NAME")
    device_memory: int | None = setting(
        None,
        Kind.SIZE,
        MEMORY,
        "Page pool that KV cache and adapters share, such as 2GiB. Default: a quarter of the "
        "memory, 4 GiB at most.",
        metavar="SIZE",
    )
    gpu_memory_utilization: float = setting(
        0.9, Kind.SHARE, MEMORY, "Share of a GPU's memory for everything.", metavar="SHARE"
    )
    lora_tail_ranks: int = setting(
        256,
        Kind.COUNT,
        MEMORY,
        "Ranks of busy adapters that a GPU computes with the base's own products; a multiple of "
        "16, 0: none.",
    )
    host_memory: int = setting(
        2**30,
        Kind.SIZE,
        MEMORY,
        "Adapters kept in host memory, ready to be copied into the pool. Default: 1GiB.",
        metavar="SIZE",
    )
    disk_space: int = setting(
        8 * 2**30,
        Kind.SIZE,
        MEMORY,
        "Adapters kept on disk, checked and packed, so that a cold one is one read away; 0 keeps "
        "none. Default: 8GiB.",
        metavar="SIZE",
    )
    disk_folder: str | None = setting(
        None,
        Kind.PATH,
        MEMORY,
        "Where these are kept. Default: images in the cache folder.",
        metavar="PATH",
    )
    max_loras: int | None = setting(
        None, Kind.COUNT, MEMORY, "Distinct adapters in one batch. Default: as many as fit."
    )
    max_cpu_loras: int | None = setting(
        None, Kind.COUNT, MEMORY, "Adapters in host memory. Default: as many as fit."
    )
    adapter_memory_fraction: float = setting(
        1.0, Kind.SHARE, MEMORY, "Most of the page pool that adapters may take.", metavar="SHARE"
    )
    eviction: str = setting(
        "cost",
        Kind.TEXT,
        MEMORY,
        f"Which adapters leave first, one of {', '.join(EVICTIONS)}: cost weighs how often one is "
        "used, how long it takes to load and its size.",
        metavar="NAME",
    )
    prewarm: int = setting(
        10, Kind.COUNT, MEMORY, "Load so many of the last run's busiest adapters at start."
    )
    prewarm_adapters: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        MEMORY,
        "Load these adapters at start: names of --lora-modules, or of the registry as requests "
        "give them.",
        metavar="NAME…",
    )
    no_prefix_cache: bool = setting(
        False, Kind.SWITCH, MEMORY, "Compute every prompt anew, even one that was just computed."
    )
    merge: str = setting(
        "off",
        Kind.TEXT,
        MEMORY,
        "auto: an adapter that dominates is merged into a copy of the weights where that is "
        "measured to be faster; off: never.",
        metavar="NAME",
    )
    merge_memory: int | None = setting(
        None,
        Kind.SIZE,
        MEMORY,
        "Largest merged copy of the weights. Default: a quarter of the memory.",
        metavar="SIZE",
    )
    schedule: str = setting(
        "fair",
        Kind.TEXT,
        MEMORY,
        f"Who is served next, one of {', '.join(SCHEDULES)}: fair gives every tenant and adapter "
        "its share; fcfs keeps the order of arrival.",
        metavar="NAME",
    )
    max_wait_s: float = setting(
        2.0,
        Kind.SECONDS,
        MEMORY,
        "Under fair, a request that waits longer takes the place of those who had more than their "
        "share.",
    )
    tenant_weights: tuple[tuple[str, float], ...] = setting(
        (), Kind.WEIGHTS, MEMORY, "Shares of tenants, 1 for the others.", metavar="NAME=NUMBER…"
    )
    adapter_weights: tuple[tuple[str, float], ...] = setting(
        (), Kind.WEIGHTS, MEMORY, "Shares of adapters, 1 for the others.", metavar="NAME=NUMBER…"
    )
    max_model_len: int | None = setting(
        None,
        Kind.COUNT,
        MEMORY,
        "Longest prompt plus answer, in tokens. Default: what the model allows.",
    )
    max_batch_tokens: int = setting(512, Kind.COUNT, MEMORY, "Tokens computed in one step.")
    max_sequences: int = setting(256, Kind.COUNT, MEMORY, "Sequences that run at once.")
    host: str = setting(
        "127.0.0.1",
        Kind.TEXT,
        NETWORK,
        "Address to listen on; 0.0.0.0 lets other machines in.",
        metavar="ADDRESS",
    )
    port: int = setting(8000, Kind.COUNT, NETWORK, "Port to listen on; 0 takes a free one.")
    max_queue: int = setting(
        1024, Kind.COUNT, NETWORK, "Requests that may wait; one more is answered with 429."
    )
    max_queue_tokens: int | None = setting(
        None,
        Kind.COUNT,
        NETWORK,
        "Tokens that open requests may come to, prompts and longest answers; more are answered "
        "with 429. Default: no limit.",
    )
    tenant_header: str | None = setting(
        None,
        Kind.TEXT,
        NETWORK,
        "Header in which a gateway that you trust names the tenant of a request. Default: all "
        "requests are one tenant's.",
        metavar="NAME",
    )
    drain_s: float = setting(
        30.0,
        Kind.SECONDS,
        NETWORK,
        "Seconds that running requests get to end after SIGTERM or Ctrl-C.",
    )
    probe_timeout_s: float = setting(
        30.0, Kind.SECONDS, NETWORK, "Seconds that /health?deep=1 waits for the engine."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        NETWORK,
        "Web pages that may call the server from a browser.",
        metavar="ORIGIN…",
    )
    log_level: str = setting(
        "info", Kind.TEXT, NETWORK, f"How much is logged: {', '.join(LOG_LEVELS)}.", metavar="LEVEL"
    )

    def __post_init__(self) -> None:
        check_limits(self)
        check_names(self)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            device_memory_bytes=self.device_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            lora_tail_ranks=self.lora_tail_ranks,
            host_memory_bytes=self.host_memory,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            max_model_len=self.max_model_len,
            max_rank=self.max_lora_rank,
            strict_base=self.strict_base,
            disk_space_bytes=self.disk_space,
            disk_folder=self.disk_folder,
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
            adapter_memory_fraction=self.adapter_memory_fraction,
            eviction=cast(EvictionName, self.eviction),
            merge=self.merge,
            merge_memory_bytes=self.merge_memory,
            prefix_cache=not self.no_prefix_cache,
            schedule=self.schedule,
            max_wait_s=self.max_wait_s,
        )


SETTINGS = {setting.name: setting for setting in dataclasses.fields(ServeConfig)}
