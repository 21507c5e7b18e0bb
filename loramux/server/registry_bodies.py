"""JSON bodies of the registry's routes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from loramux.registry.records import AdapterInfo, AliasState, VersionInfo


class PushRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    reference: str
    """tenant/name@1.4.2; without a version the next free one is taken."""
    source: str
    """A folder of the server's, or an id such as hf:owner/name or s3://bucket/folder."""


class PromoteRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    version: str
    alias: str = "prod"
    if_revision: int | None = None
    """Refuse (409) unless the alias is still at this revision."""
    warm: bool = False
    """Load the version first, so that nobody waits for it."""


class RollbackRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    alias: str = "prod"
    if_revision: int | None = None
    warm: bool = False


class SplitRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    weights: dict[str, int]
    """Version -> share, such as {"1.4.2": 90, "1.5.0": 10}."""
    alias: str = "prod"
    if_revision: int | None = None
    warm: bool = False


class VersionEntry(Struct, kw_only=True):
    version: str
    cid: str
    bytes: int
    base_model: str | None
    created: float


class AliasEntry(Struct, kw_only=True):
    alias: str
    revision: int
    action: str
    targets: dict[str, int]
    """Version -> share; empty: the alias is gone."""
    created: float


class RegistryEntry(Struct, kw_only=True):
    """An adapter of the registry."""

    id: str
    object: Literal["registry.adapter"] = "registry.adapter"
    tenant: str
    name: str
    latest: str | None
    versions: list[VersionEntry]
    """Highest first."""
    aliases: list[AliasEntry]


class PushedEntry(Struct, kw_only=True):
    id: str
    object: Literal["registry.version"] = "registry.version"
    version: str
    cid: str
    bytes: int
    is_new: bool
    """False: the version was there with the same bytes."""


class Removed(Struct, kw_only=True):
    id: str
    object: Literal["registry.removed"] = "registry.removed"
    deleted: bool = True


def registry_entry(info: AdapterInfo) -> RegistryEntry:
    return RegistryEntry(
        id=str(info.adapter),
        tenant=info.adapter.tenant,
        name=info.adapter.name,
        latest=info.latest,
        versions=[version_entry(version) for version in info.versions],
        aliases=[alias_entry(state) for state in info.aliases],
    )


def version_entry(version: VersionInfo) -> VersionEntry:
    return VersionEntry(
        version=version.version,
        cid=version.cid,
        bytes=version.size_bytes,
        base_model=version.base_model,
        created=version.created_at,
    )


def alias_entry(state: AliasState) -> AliasEntry:
    return AliasEntry(
        alias=state.alias,
        revision=state.revision,
        action=state.action.value,
        targets={target.version: target.weight for target in state.targets},
        created=state.created_at,
    )
