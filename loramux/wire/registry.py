"""JSON bodies of the registry's routes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

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
