"""What every route needs: the engine, the options, the counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loramux.backend import Health, TextBackend
from loramux.errors import EngineStopped
from loramux.metrics.server import Metrics
from loramux.server.errors import NotServed
from loramux.server.names import AdapterNames
from loramux.server.receipt_draft import ReceiptIssuer
from loramux.server.registry_adapters import RegistryAdapters
from loramux.sources.config import SourceConfig

_NOT_READY = {
    Health.STARTING: "The engine is starting: ask again in a moment.",
    Health.RESTARTING: "The engine stopped and is being started again: ask again in a moment.",
    Health.DRAINING: "The server is shutting down and takes no new requests.",
    Health.STOPPED: "The engine has stopped.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    served_model_names: tuple[str, ...] = ()
    """Names of the base; the first is the one that answers show. Empty: its own name."""
    max_body_bytes: int = 32 * 2**20
    """A larger request body is refused without being read."""
    max_choices: int = 1024
    """Prompts of one request times its n."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server; "*" for any."""
    probe_timeout_s: float = 30.0
    """What a deep health check may take."""
    tenant_header: str | None = None
    """Header that names a request's tenant; None: all requests are one tenant's."""
    allow_runtime_lora_updating: bool = False
    """Whether vLLM's calls to load and unload adapters are there."""
    sources: SourceConfig = field(default_factory=SourceConfig)
    """Where a push may fetch adapters from, with which credentials and within which limits."""
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    adapter_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares under fair scheduling, by tenant and by adapter label; the default is 1."""
    unopened_registry: str | None = None
    """A SQLite file that was not there at the start, so that the server has no registry."""
    allowed_roots: tuple[str, ...] = ()
    """Folders that adapters may be read from when a request names a path. Empty: a push may name
    none, and vLLM's call to load an adapter any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    backend: TextBackend
    options: ServerOptions
    metrics: Metrics
    names: AdapterNames
    receipts: ReceiptIssuer = field(default_factory=ReceiptIssuer)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def base_names(self) -> tuple[str, ...]:
        return self.options.served_model_names or (self.backend.card.name,)

    def base_identity(self) -> tuple[str, str]:
        """Name and digest of the base model for receipts; empty until the engine has started."""
        if self.backend.health is Health.STARTING:
            return "".join(self.options.served_model_names[:1]), ""
        return self.base_names[0], self.backend.card.digest

    @property
    def fingerprint(self) -> str:
        digest = self.backend.card.digest.rpartition(":")[2]
        return f"fp_{digest[:12]}"

    @property
    def registry(self) -> RegistryAdapters | None:
        return self.names.registry

    def require_registry(self) -> RegistryAdapters:
        if self.registry is None:
            raise NotServed(
                f"This server has no registry: start it with --registry.{self.missed_registry}",
                param=None,
            )
        return self.registry

    @property
    def missed_registry(self) -> str:
        """A sentence for who asks for something that was pushed after the start; mostly empty."""
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
        """Enough for routes that ask nothing of the engine itself: it has been up once."""
        if self.backend.health is Health.STARTING:
            self.require_ready()
