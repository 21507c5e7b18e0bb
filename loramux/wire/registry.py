"""JSON bodies of the registry's routes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from loramux.registry.records import AdapterInfo, AliasState, VersionInfo
from loramux.server.naming.view import WHOLE_VIEW, View, unknown_adapter
from loramux.types.modality import Modality


class RecipeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A version that is made of other versions of the registry, and has no files."""

    adapters: list[str]
    """Names or CIDs of versions."""
    weights: list[float] | None = None
    """One for each adapter; 1 each without them."""
    combination: str = "cat"
    """cat: the parts are added in the batch. Others are made into one adapter on first use."""
    density: float | None = None
    majority_sign_method: str | None = None
    seed: int | None = None
    svd_rank: int | None = None
    any_base: bool = False
    """Allow parts that record different base names."""


class PushRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    reference: str
    """tenant/name@1.4.2; without a version, the next free one."""
    source: str | UnsetType = UNSET
    """A folder on the server, or an id such as hf:owner/name or s3://bucket/folder."""
    recipe: RecipeBody | UnsetType = UNSET
    """Instead of a source."""
    signature: str | UnsetType = UNSET
    """A detached signature in Base64; without it, the file loramux.sig of the source."""
    modality: Modality | UnsetType = UNSET
    """What the adapter is for, text or image; absent: its files tell."""


class PromoteRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    version: str
    alias: str = "prod"
    if_revision: int | None = None
    """Refuse with 409 unless the alias is still at this revision."""
    warm: bool = False
    """Load the version first, so that no request waits for it."""


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
    recipe: dict[str, Any] | UnsetType = UNSET
    """Method, parts and parameters of a version without files."""
    signed_by: str | UnsetType = UNSET
    """The id of the key whose signature was verified."""
    pushed_by: str | UnsetType = UNSET
    """The id of the API key of the push."""
    modality: Modality | UnsetType = UNSET
    """image; absent for text"""


class AliasEntry(Struct, kw_only=True):
    alias: str
    revision: int
    action: str
    targets: dict[str, int]
    """Version -> share; empty: the alias was removed."""
    created: float


class RegistryEntry(Struct, kw_only=True):
    """An adapter of the registry."""

    id: str
    object: Literal["registry.adapter"] = "registry.adapter"
    tenant: str
    name: str
    latest: str | None
    versions: list[VersionEntry]
    """Versions, highest first."""
    aliases: list[AliasEntry]


class PushedEntry(Struct, kw_only=True):
    id: str
    object: Literal["registry.version"] = "registry.version"
    version: str
    cid: str
    bytes: int
    is_new: bool
    """False: the version already existed with the same bytes."""
    recipe: dict[str, Any] | UnsetType = UNSET
    signed_by: str | UnsetType = UNSET
    modality: Modality | UnsetType = UNSET
    """image; absent for text"""


class Removed(Struct, kw_only=True):
    id: str
    object: Literal["registry.removed"] = "registry.removed"
    deleted: bool = True


def registry_entry(info: AdapterInfo, view: View = WHOLE_VIEW) -> RegistryEntry:
    """Describes an adapter; of another tenant's, only what is shared with the caller."""
    shared = view.shared_versions(info.adapter)
    is_own = not view.is_confined or info.adapter.tenant == view.tenant
    seen = [one for one in info.versions if shared is None or one.version in shared]
    if not seen and shared is not None:
        raise unknown_adapter(info.adapter)
    return RegistryEntry(
        id=str(info.adapter),
        tenant=info.adapter.tenant,
        name=info.adapter.name,
        latest=info.latest if shared is None else seen[0].version,
        versions=[version_entry(version, is_own=is_own) for version in seen],
        aliases=[] if shared is not None else [alias_entry(state) for state in info.aliases],
    )


def version_entry(version: VersionInfo, *, is_own: bool = True) -> VersionEntry:
    return VersionEntry(
        version=version.version,
        cid=version.cid,
        bytes=version.size_bytes,
        base_model=version.base_model,
        created=version.created_at,
        recipe=UNSET if version.recipe is None else version.recipe.to_dict(),
        signed_by=version.signed_by or UNSET,
        pushed_by=(version.pushed_by if is_own else None) or UNSET,
        modality="image" if version.modality == "image" else UNSET,
    )


def alias_entry(state: AliasState) -> AliasEntry:
    return AliasEntry(
        alias=state.alias,
        revision=state.revision,
        action=state.action.value,
        targets={target.version: target.weight for target in state.targets},
        created=state.created_at,
    )
