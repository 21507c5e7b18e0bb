"""Settings of `loramux serve`: each is a flag, a key of the TOML file, and a line of help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.config.access import ACCESS, AccessConfig
from loramux.config.connections import CONNECTIONS, ConnectionConfig
from loramux.config.engine import MEMORY, MODEL, EngineConfig
from loramux.config.fields import (
    NONE,
    NOT_NEGATIVE_SECONDS,
    POSITIVE_SECONDS,
    Kind,
    Limit,
    LoraModule,
    Setting,
    at_least,
    check_limits,
    one_of,
    setting,
    settings_of,
)
from loramux.config.images import IMAGES, ImageConfig
from loramux.errors import InvalidRequest

REGISTRY, NETWORK = "Registry and receipts", "Network and operation"
GROUPS = (MODEL, IMAGES, REGISTRY, MEMORY, ACCESS, NETWORK, CONNECTIONS)
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
RECEIPTS = ("auto", "on", "off")
RECEIPT_CONTENTS = ("digests", "metadata")
CHECKS = ("header", "full")
UNKNOWN_FIELDS = ("ignore", "warn", "refuse")
ADAPTER_SOURCES = ("hub", "local", "s3", "pbase")
FAMILIES = ("anthropic", "llamacpp", "lorax", "ollama", "responses", "sagemaker", "sglang")
"""Other servers' APIs."""
TOOL_CALL_PARSERS = ("hermes", "qwen", "llama3_json", "mistral", "mistral_args", "generic")
REASONING_PARSERS = ("qwen3", "deepseek_r1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that `loramux serve` may be told."""

    model: str | None = setting(
        None,
        Kind.MODEL,
        MODEL,
        "Base model: a Hugging Face folder, a GGUF file, or a model of the Hugging Face hub as "
        "org/name[@revision] or org/name:file.gguf. Default: the installed SmolLM2-135M-Instruct.",
        metavar="PATH|ORG/NAME",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        MODEL,
        "One or more names of the base model in requests; replies contain the first. "
        "Default: the model's own name.",
        metavar="NAME…",
    )
    lora_modules: tuple[LoraModule, ...] = setting(
        (),
        Kind.LORA_MODULES,
        MODEL,
        'Adapters to serve: name=folder, or {"name": …, "path": …} as JSON. Instead of a folder '
        "also hf:owner/name[@revision], s3://, gs:// or az:// with bucket/folder, or "
        "https://host/folder. Give several after one flag, or repeat the flag.",
        metavar="NAME=SOURCE…",
    )
    lora_dir: str | None = setting(
        None,
        Kind.PATH,
        MODEL,
        "Folder of adapters, which is watched: each folder in it is served under its own name.",
        metavar="FOLDER",
    )
    check_adapters: str = setting(
        "header",
        Kind.TEXT,
        MODEL,
        f"Checks of --lora-modules at start. Valid values: {', '.join(CHECKS)}; header checks "
        "config and tensor shapes, and the weights before an adapter's first use; full reads and "
        "checks all weights at start.",
        metavar="NAME",
        limit=one_of(*CHECKS),
    )
    registry: str | None = setting(
        None,
        Kind.URL_OR_PATH,
        REGISTRY,
        "Also serve the adapters of this registry: a SQLite file, or postgresql://…; none disables "
        "it. Default: $LORAMUX_REGISTRY, else registry.db in the data folder if it exists.",
        metavar="URL|PATH",
        is_secret=True,
    )
    data: str | None = setting(
        None,
        Kind.PATH,
        REGISTRY,
        "Data folder with the adapter store; without --registry, its registry.db is the registry. "
        "Default: $LORAMUX_DATA, else loramux in the user's data folder.",
        metavar="FOLDER",
    )
    store_space: int | None = setting(
        None,
        Kind.SIZE,
        REGISTRY,
        "Maximum size of the adapter store. Default: as much as the disk holds.",
        metavar="SIZE",
        limit=at_least(1),
    )
    shared_cache: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Redis used by several servers as a cache in front of the remote store: "
        "redis://host:6379/0. Default: $LORAMUX_SHARED_CACHE, else none.",
        metavar="URL",
        is_secret=True,
    )
    remote_store: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Bucket that also stores every adapter: s3://bucket/folder, gs://… or az://…. Adapters "
        "missing from the data folder are read from it. Default: $LORAMUX_REMOTE_STORE, else none.",
        metavar="URL",
    )
    home_tenant: str = setting(
        "default",
        Kind.TEXT,
        REGISTRY,
        "Tenant of adapter names without tenant/.",
        metavar="NAME",
        limit=Limit("the name of a tenant", bool),
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        Kind.SWITCH,
        REGISTRY,
        "Allow requests to load and unload adapters through vLLM's endpoints; also "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    )
    adapter_source: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Where LoRAX's route looks for an adapter that is not served here, if the request names no "
        f"adapter_source. Valid values: {', '.join(ADAPTER_SOURCES)}. Default: nowhere.",
        metavar="NAME",
        limit=one_of(*ADAPTER_SOURCES),
    )
    allowed_roots: tuple[str, ...] = setting(
        (),
        Kind.PATHS,
        REGISTRY,
        "Folders from which requests may load adapters by path.",
        metavar="FOLDER…",
    )
    allowed_http_hosts: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Hosts from which adapters may be pushed over http(s)://, such as example.com, "
        "*.example.com or host:8080. Private addresses are refused.",
        metavar="HOST…",
    )
    private_http_hosts: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Hosts of your own network from which adapters may be pushed over http(s)://; their "
        "addresses may be private.",
        metavar="HOST…",
    )
    allowed_buckets: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Buckets from which adapters may be pushed over s3://, gs:// and az://. Default: any that "
        "the server's credentials can read.",
        metavar="BUCKET…",
    )
    allowed_hub_owners: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        REGISTRY,
        "Owners on the Hugging Face hub from which adapters may be pushed. Default: any.",
        metavar="NAME…",
    )
    max_adapter_size: int = setting(
        8 * 2**30,
        Kind.SIZE,
        REGISTRY,
        "Maximum size of an adapter that is pushed or fetched. Default: 8GiB.",
        metavar="SIZE",
        limit=at_least(1),
    )
    fetch_timeout_s: float = setting(
        1800.0,
        Kind.SECONDS,
        REGISTRY,
        "Timeout for fetching an adapter, in seconds.",
        limit=POSITIVE_SECONDS,
    )
    fetch_workers: int = setting(
        4,
        Kind.COUNT,
        REGISTRY,
        "Number of parts of a file that are fetched in parallel.",
        limit=at_least(1),
    )
    receipts: str = setting(
        "auto",
        Kind.TEXT,
        REGISTRY,
        f"Receipts in replies. Valid values: {', '.join(RECEIPTS)}; auto puts one into every "
        "complete reply, and with a registry, which stores them, into streams too; on also without "
        "a registry.",
        metavar="NAME",
        limit=one_of(*RECEIPTS),
    )
    receipt_contents: str = setting(
        "digests",
        Kind.TEXT,
        REGISTRY,
        f"What receipts bind. Valid values: {', '.join(RECEIPT_CONTENTS)}; digests adds digests of "
        "the token ids of prompts and answers, metadata leaves them out.",
        metavar="NAME",
        limit=one_of(*RECEIPT_CONTENTS),
    )
    receipt_key: str | None = setting(
        None,
        Kind.PATH,
        REGISTRY,
        "PEM file with the Ed25519 key that signs receipts. Default: unsigned.",
        metavar="FILE",
    )
    receipt_retention_days: int | None = setting(
        None,
        Kind.COUNT,
        REGISTRY,
        "Delete receipts older than this many days. Default: keep all.",
        limit=at_least(1),
    )
    pool_id: str | None = setting(
        None,
        Kind.TEXT,
        REGISTRY,
        "Name of this server in receipts. Default: the host name.",
        metavar="NAME",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    prewarm: int = setting(
        10,
        Kind.COUNT,
        MEMORY,
        "Number of the previous run's busiest adapters to load at start.",
        limit=at_least(0),
    )
    prewarm_adapters: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        MEMORY,
        "Adapters to load at start: names from --lora-modules, or registry names as in requests.",
        metavar="NAME…",
    )
    tenant_shares: tuple[tuple[str, float], ...] = setting(
        (),
        Kind.SHARES,
        MEMORY,
        "Fair shares of tenants; others have a share of 1.",
        metavar="NAME=NUMBER…",
        aliases=("tenant_weights",),
    )
    adapter_shares: tuple[tuple[str, float], ...] = setting(
        (),
        Kind.SHARES,
        MEMORY,
        "Fair shares of adapters; others have a share of 1.",
        metavar="NAME=NUMBER…",
        aliases=("adapter_weights",),
    )
    access: AccessConfig = field(default_factory=AccessConfig)
    host: str = setting(
        "127.0.0.1",
        Kind.TEXT,
        NETWORK,
        "Address to listen on; 0.0.0.0 accepts connections from other machines.",
        metavar="ADDRESS",
        limit=Limit("an address such as 127.0.0.1", bool),
    )
    port: int = setting(
        8000,
        Kind.COUNT,
        NETWORK,
        "Port to listen on; 0 selects a free one.",
        limit=Limit("between 0 and 65535", lambda value: 0 <= value <= 65535),
    )
    max_queue: int = setting(
        1024,
        Kind.COUNT,
        NETWORK,
        "Maximum number of waiting requests; further ones are answered with 429.",
        limit=at_least(0),
    )
    max_queue_tokens: int | None = setting(
        None,
        Kind.COUNT,
        NETWORK,
        "Maximum number of tokens of all open requests, counting prompts and max_tokens; further "
        "requests are answered with 429. Default: no limit.",
        limit=at_least(1),
    )
    chat_template: str | None = setting(
        None,
        Kind.TEXT,
        MODEL,
        "Jinja template of chats with the base: a file, or the template itself. Adapters with a "
        "template of their own keep it. Default: that of the model.",
        metavar="FILE",
    )
    tool_call_parser: str | None = setting(
        None,
        Kind.TEXT,
        MODEL,
        "Format in which the base model writes tool calls. Valid values: "
        f"{', '.join(TOOL_CALL_PARSERS)}. Default: that of its chat template.",
        metavar="NAME",
        limit=one_of(*TOOL_CALL_PARSERS),
    )
    reasoning_parser: str | None = setting(
        None,
        Kind.TEXT,
        MODEL,
        "Split the reasoning between <think> and </think> from the answers of chats. Valid values: "
        "qwen3 (an answer may have none), deepseek_r1 (the prompt opens it). Default: no split.",
        metavar="NAME",
        limit=one_of(*REASONING_PARSERS),
    )
    tenant_header: str | None = setting(
        None,
        Kind.TEXT,
        NETWORK,
        "Header in which a gateway names the tenant of a request. With --trusted-proxies only "
        "these may send it, and it confines the request to that tenant. Default: none.",
        metavar="NAME",
    )
    drain_s: float = setting(
        30.0,
        Kind.SECONDS,
        NETWORK,
        "Seconds that running requests get to finish after SIGTERM or Ctrl-C.",
        limit=NOT_NEGATIVE_SECONDS,
    )
    probe_timeout_s: float = setting(
        30.0,
        Kind.SECONDS,
        NETWORK,
        "Seconds that /health?deep=1 waits for the engine.",
        limit=NOT_NEGATIVE_SECONDS,
    )
    compat: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        NETWORK,
        f"Other servers' APIs that answer. Valid values: {', '.join(FAMILIES)}, none. "
        "Default: all of them.",
        metavar="NAME…",
        limit=Limit(
            f"among {', '.join(FAMILIES)}, none", lambda names: set(names) <= {*FAMILIES, NONE}
        ),
    )
    unknown_fields: str = setting(
        "warn",
        Kind.TEXT,
        NETWORK,
        f"Fields of requests that no API has. Valid values: {', '.join(UNKNOWN_FIELDS)}; warn "
        "names them in the header x-loramux-warning.",
        metavar="NAME",
        limit=one_of(*UNKNOWN_FIELDS),
    )
    require_model: bool = setting(
        False,
        Kind.SWITCH,
        NETWORK,
        "Refuse requests that name no model. Default: the base answers them, with a warning in a "
        "header if there are adapters.",
    )
    ui: bool = setting(
        True,
        Kind.SWITCH,
        NETWORK,
        "Leave out the web page under /ui.",
        name="no_ui",
        is_inverted=True,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        Kind.TEXTS,
        NETWORK,
        "Origins of web pages that may call the server from a browser.",
        metavar="ORIGIN…",
    )
    images: ImageConfig = field(default_factory=ImageConfig)
    connections: ConnectionConfig = field(default_factory=ConnectionConfig)
    log_level: str = setting(
        "info",
        Kind.TEXT,
        NETWORK,
        f"Log level. Valid values: {', '.join(LOG_LEVELS)}.",
        metavar="LEVEL",
        limit=one_of(*LOG_LEVELS),
    )

    @property
    def serves_text(self) -> bool:
        """Whether a language model is served: the default one unless there is an image model."""
        is_named = self.model is not None or self.lora_dir is not None
        return is_named or bool(self.lora_modules) or self.images.image_model is None

    def __post_init__(self) -> None:
        check_limits(self)
        check_names(self)


def check_names(config: ServeConfig) -> None:
    """Refuse a name that would mean two models."""
    seen = set(config.served_model_name)
    for module in config.lora_modules:
        if module.name in seen:
            raise InvalidRequest(
                f"The name {module.name!r} is given to two models. Rename one of them in "
                "--lora-modules or --served-model-name.",
                param="lora_modules",
            )
        seen.add(module.name)


_PARTS: Mapping[str, type] = {
    "engine": EngineConfig,
    "access": AccessConfig,
    "connections": ConnectionConfig,
    "images": ImageConfig,
}
"""The fields of ServeConfig that are configs of their own."""


def _all_settings() -> Iterator[Setting]:
    """Yield the settings of all configs; those of a part are at the position of its field."""
    server = {found.field: found for found in settings_of(ServeConfig)}
    for one in dataclasses.fields(ServeConfig):
        if one.name in server:
            yield server[one.name]
        else:
            yield from settings_of(_PARTS[one.name])


_PART_OF = {found.name: part for part, config in _PARTS.items() for found in settings_of(config)}
SETTINGS: dict[str, Setting] = {
    found.name: found
    for found in sorted(_all_settings(), key=lambda found: GROUPS.index(found.group))
}
"""All settings by name, in the order of the help."""
ALIASES = {alias: found.name for found in SETTINGS.values() for alias in found.aliases}
"""Former names of settings."""


def serve_config(values: Mapping[str, object]) -> ServeConfig:
    """Return the config with these values, by the settings' names."""
    server: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    for name, value in values.items():
        found = SETTINGS[name]
        fields = parts[_PART_OF[name]] if name in _PART_OF else server
        fields[found.field] = not value if found.is_inverted else value
    built = {name: _PARTS[name](**fields) for name, fields in parts.items()}
    return ServeConfig(**server, **built)
