"""What the registry takes and gives; plain values that outlive the database's connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loramux.registry.names import AdapterName


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a version is a name of."""

    cid: str
    manifest: Mapping[str, object]
    size_bytes: int
    base_model: str | None = None
    """As the adapter's config records it; belongs to the version, not to the CID."""
    source: str | None = None
    """Where the bytes may be fetched again; belongs to the version too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    adapter: AdapterName
    version: str
    cid: str
    size_bytes: int
    base_model: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class Target:
    """One version behind an alias, and its share of the requests."""

    version: str
    weight: int = 1


class AliasAction(StrEnum):
    PROMOTE = "promote"
    SPLIT = "split"
    ROLLBACK = "rollback"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasState:
    alias: str
    revision: int
    """1 for the first state of an alias; never used twice."""
    action: AliasAction
    targets: tuple[Target, ...]
    """Empty after a removal."""
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    adapter: AdapterName
    latest: str | None
    """None: all its versions were removed."""
    versions: tuple[VersionInfo, ...]
    """Highest first."""
    aliases: tuple[AliasState, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a reference means now. A CID alone has no name: several tenants may share it."""

    cid: str
    tenant: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None
    base_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What to add to the statistics of a CID."""

    cid: str
    num_requests: int = 1
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    cid: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    last_used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    id: str
    created_at: float
    tenant: str
    cid: str | None
    """None: the base served."""
    latency_ms: float
    is_cold: bool
    body: Mapping[str, object]
    """All of the receipt, as it was given to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptFilter:
    """What is None does not restrict."""

    tenant: str | None = None
    cids: tuple[str, ...] | None = None
    since: float | None = None
    min_latency_ms: float | None = None
    is_cold: bool | None = None
    slowest_first: bool = False
    """Otherwise the newest."""
    limit: int = 100
