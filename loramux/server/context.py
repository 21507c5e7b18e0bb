"""The objects that routes share: backend, options, metrics, adapter names, receipts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loramux.backend.host import AdapterHost, Health
from loramux.backend.text import TextBackend
from loramux.config.access import Network
from loramux.errors import AdapterNotFound, EngineStopped, InvalidRequest
from loramux.metrics.server import HostMetrics, Metrics
from loramux.receipts.issuer import ReceiptIssuer
from loramux.registry.access import NO_ACCESS
from loramux.registry.registry import Registry
from loramux.server.auth.quotas import QuotaTable
from loramux.server.errors import NotServed
from loramux.server.naming.combinations import Combinations
from loramux.server.naming.folder import AdapterFolder
from loramux.server.naming.names import AdapterNames, Selected
from loramux.server.naming.pins import NameLocks, Pins
from loramux.server.naming.pushed_folders import PushedFolders
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.sources import AdapterSources
from loramux.server.naming.view import View
from loramux.sources.config import SourceConfig
from loramux.types.caller import Caller
from loramux.types.modality import NO_MODEL, Modality

_NOT_READY = {
    Health.STARTING: "The engine is starting: try again in a moment.",
    Health.STALLED: "The engine does not move at present: try again in a moment.",
    Health.RESTARTING: "The engine stopped and is restarting: try again in a moment.",
    Health.DRAINING: "The server is shutting down and accepts no new requests.",
    Health.STOPPED: "The engine has stopped.",
}


_NO_QUOTAS = QuotaTable()
"""A server without a registry has no limits of tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP application."""

    served_model_names: tuple[str, ...] = ()
    """Names of the base model; replies contain the first. Empty: the model's own name."""
    max_body_bytes: int = 16 * 2**20
    """Maximum size of a request body."""
    max_choices: int = 1024
    """Maximum number of prompts times n of one request."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server; "*" for any."""
    root_path: str = ""
    """The prefix of paths under which a proxy publishes the server."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """Names of this server in the Host header; "*" for any."""
    probe_timeout_s: float = 30.0
    """Time limit of a deep health check."""
    tenant_header: str | None = None
    """Header with the tenant of a request; None: all requests belong to one tenant."""
    shared_names: tuple[str, ...] = ()
    """Patterns of the names given by the operator that all tenants may use."""
    trusted_proxies: tuple[Network, ...] = ()
    """Proxies whose X-Forwarded-For and tenant header are believed."""
    allow_runtime_lora_updating: bool = False
    """Whether vLLM's endpoints to load and unload adapters are enabled."""
    sources: SourceConfig = field(default_factory=SourceConfig)
    """Allowed sources of a push, with credentials and limits."""
    tool_call_parser: str | None = None
    """The format of tool calls; None: that of the chat template."""
    reasoning_parser: str | None = None
    """How reasoning is split from answers: qwen3 or deepseek_r1; None: it is not."""
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    adapter_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares under fair scheduling, by tenant and by adapter label; the default is 1."""
    unopened_registry: str | None = None
    """Default registry file that did not exist at start; the server runs without a registry."""
    ui: bool = True
    """Whether the web page under /ui exists."""
    unknown_fields: str = "warn"
    """What becomes of fields that no API has: ignore, warn (in a header) or refuse."""
    require_model: bool = False
    """Whether requests that name no model are refused."""
    compat: tuple[str, ...] | None = None
    """Families of other servers' APIs that answer; None: all."""
    adapter_source: str | None = None
    """LoRAX's source of adapters that are not served here if a request names none."""
    allowed_roots: tuple[str, ...] = ()
    """Folders from which requests may load adapters by path. Empty: a push may use no path, and
    vLLM's load endpoint any path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemand:
    """Where adapters come from that have no name yet."""

    combinations: Combinations | None = None
    sources: AdapterSources | None = None
    folder: AdapterFolder | None = None


NOTHING_ON_DEMAND = OnDemand()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostContext:
    """Shared by the routes of one backend; routes of the whole server get that of the first."""

    modality: ClassVar[Modality]
    backend: AdapterHost
    options: ServerOptions
    metrics: HostMetrics
    names: AdapterNames
    receipts: ReceiptIssuer = field(default_factory=ReceiptIssuer)
    combinations: Combinations | None = None
    """Makes combined adapters; None: this server makes none."""
    sources: AdapterSources | None = None
    """Fetches adapters that requests name by their source; None: none is fetched."""
    name_locks: NameLocks = field(default_factory=NameLocks)
    """Loads and unloads of the same name run one after another."""
    folder: AdapterFolder | None = None
    """The watched folder of adapters."""
    pushes: PushedFolders = field(default_factory=PushedFolders)
    """The files of adapters that were pushed."""
    pins: Pins = field(default_factory=Pins)
    """The adapters that tenants and keys have pinned."""
    others: tuple[HostContext, ...] = ()
    """Those of the other backends of this server."""
    foreign: Mapping[Modality, AdapterNames] = field(default_factory=dict)
    """The names of the other backends' adapters."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def hosts(self) -> tuple[HostContext, ...]:
        """This context and those of the other backends."""
        return (self, *self.others)

    @property
    def has_images(self) -> bool:
        return any(host.modality == "image" for host in self.hosts)

    def host_of(self, modality: Modality) -> HostContext:
        """Return the context of a model; raise NotServed if there is none."""
        for host in self.hosts:
            if host.modality == modality:
                return host
        raise NotServed(NO_MODEL[modality], param="name")

    async def host_for(self, name: str, view: View) -> HostContext:
        """Return the context of the backend that a name belongs to; else this one.

        The name is a given one, a CID, or one of the registry.
        """
        host = self.host_with(name)
        if host.names.find(name) is not None or self.registry is None:
            return host
        if name in host.backend.adapters or not self.others:
            return host
        try:
            resolved = await self.registry.resolve(name, sticky_key="", view=view)
        except (AdapterNotFound, InvalidRequest):
            return host
        return self.host_of(resolved.modality)

    def host_with(self, name: str) -> HostContext:
        """Return the context of the backend that has a given name or a CID; else this one."""
        for host in self.hosts:
            if host.names.find(name) is not None or name in host.backend.adapters:
                return host
        return self

    @property
    def base_names(self) -> tuple[str, ...]:
        return self.given_base_names or (self.backend.card.name,)

    @property
    def given_base_names(self) -> tuple[str, ...]:
        """The names of the base in the settings; empty: its own name."""
        return self.options.served_model_names

    def base_identity(self) -> tuple[str, str]:
        """Name and digest of the base model for receipts; empty until the engine has started."""
        if self.backend.health is Health.STARTING:
            return "".join(self.given_base_names[:1]), ""
        return self.base_names[0], self.backend.card.digest

    @property
    def registry(self) -> RegistryAdapters | None:
        return self.names.registry

    @property
    def database(self) -> Registry | None:
        """The registry without this server's caches."""
        return None if self.registry is None else self.registry.registry

    @property
    def quotas(self) -> QuotaTable:
        return _NO_QUOTAS if self.registry is None else self.registry.quotas

    def view_of(self, caller: Caller) -> View:
        """Return what the caller sees of the adapters."""
        if caller.is_operator and caller.adapters is None:
            return View(caller, self.receipts.home_tenant)
        sources = self.sources
        return View(
            caller,
            self.receipts.home_tenant,
            NO_ACCESS if self.registry is None else self.registry.access,
            self.options.shared_names,
            (lambda tenant, name: False) if sources is None else sources.is_known_to,
        )

    def tenant_of(self, caller: Caller) -> str:
        """Return the tenant whose record applies to the caller: without one, the home tenant's."""
        return caller.tenant or self.receipts.home_tenant

    def tenant_share(self, caller: Caller) -> float:
        """Return the share of --tenant-shares, or else of the tenant's record."""
        given = self.options.tenant_shares.get(caller.tenant)
        return self.quotas.settings_of(self.tenant_of(caller)).share if given is None else given

    def adapter_share(self, selected: Selected) -> float:
        """Return the smallest share of the adapters: naming a favoured one too gives no
        advantage.
        """
        shares = self.options.adapter_shares
        return min((shares.get(adapter.label, 1.0) for adapter in selected.used), default=1.0)

    def require_registry(self) -> RegistryAdapters:
        if self.registry is None:
            raise NotServed(
                f"This server has no registry: start it with --registry.{self.missed_registry}",
                param=None,
            )
        return self.registry

    @property
    def missed_registry(self) -> str:
        """A hint for error messages if a registry was created after the start, else empty."""
        path = self.options.unopened_registry
        if self.registry is not None or path is None or not Path(path).exists():
            return ""
        return (
            " Adapters have been pushed since this server started, and it has no registry: "
            "start it again to serve them."
        )

    def require_ready(self) -> None:
        health = self.backend.health
        if health is not Health.READY:
            raise EngineStopped(_NOT_READY[health])

    def require_known(self) -> None:
        """Raise until the engine has been ready once; for routes that only need its model card."""
        if self.backend.health is Health.STARTING:
            self.require_ready()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(HostContext):
    """Shared by the routes of the language model."""

    modality: ClassVar[Modality] = "text"
    backend: TextBackend
    metrics: Metrics

    @property
    def fingerprint(self) -> str:
        digest = self.backend.card.digest.rpartition(":")[2]
        return f"fp_{digest[:12]}"
