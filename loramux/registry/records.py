"""The plain values that the registry takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loramux.adapters.recipe import SUM_METHOD, Recipe
from loramux.adapters.signature import Verified
from loramux.registry.names import AdapterName
from loramux.types.composition import sum_text
from loramux.types.modality import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content that a version names."""

    cid: str
    manifest: Mapping[str, object]
    size_bytes: int
    base_model: str | None = None
    """The base that the adapter's config records; it belongs to the version, not to the CID."""
    source: str | None = None
    """The source from which the files can be fetched again; it belongs to the version."""
    signatures: tuple[str, ...] = ()
    """Detached signatures of the manifest in Base64, of which none was verified yet."""
    verified: Verified | None = None
    """The signature that a key of the tenant has made; it belongs to the version."""
    pushed_by: str | None = None
    """The id of the API key of the push; it belongs to the version."""


@dataclass(frozen=True, slots=True)
class RecipePart:
    """A part of a recipe; without a name if the recipe was named by its CID."""

    cid: str
    weight: float
    adapter: AdapterName | None = None
    version: str | None = None

    def __str__(self) -> str:
        return self.cid if self.adapter is None else f"{self.adapter}@{self.version}"


@dataclass(frozen=True, slots=True)
class VersionRecipe:
    """What a version without files is made of: a sum of other versions, or a combination."""

    recipe: Recipe
    parts: tuple[RecipePart, ...]
    """In the order of the recipe."""

    @property
    def is_sum(self) -> bool:
        """Whether the parts are added in the batch, so that no combined adapter is made."""
        return self.recipe.method.name == SUM_METHOD

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical form of the recipe, with the names of its parts."""
        parts = [
            {"cid": part.cid, "weight": part.weight}
            | ({} if part.adapter is None else {"name": str(part)})
            for part in self.parts
        ]
        return {**self.recipe.to_dict(), "parts": parts}

    def __str__(self) -> str:
        terms = sum_text((str(part), part.weight) for part in self.parts)
        return terms if self.is_sum else f"{self.recipe.method.name}({terms})"

    def without_names(self) -> VersionRecipe:
        parts = tuple(RecipePart(part.cid, part.weight) for part in self.parts)
        return VersionRecipe(self.recipe, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    adapter: AdapterName
    version: str
    cid: str
    size_bytes: int
    base_model: str | None
    created_at: float
    recipe: VersionRecipe | None = None
    """None: a version with files."""
    source: str | None = None
    pushed_by: str | None = None
    """The id of the API key of the push; None: it was pushed without a key."""
    signed_by: str | None = None
    """The id of the key whose signature was verified; None: it is not signed."""
    modality: Modality = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One version in the list of all adapters."""

    adapter: AdapterName
    version: str
    cid: str
    size_bytes: int
    signed_by: str | None
    aliases: tuple[str, ...]
    """The aliases that select it, alone or in a split."""
    modality: Modality = "text"


@dataclass(frozen=True, slots=True)
class Target:
    """One version of an alias, and its weight in a split."""

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
    """1 for the first state of an alias, and higher for each later one."""
    action: AliasAction
    targets: tuple[Target, ...]
    """The versions of the alias; empty after a removal."""
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    adapter: AdapterName
    latest: str | None
    """None if all versions were removed."""
    versions: tuple[VersionInfo, ...]
    """All versions, the highest first."""
    aliases: tuple[AliasState, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The current meaning of a reference; a CID has no name, as several tenants may share it."""

    cid: str
    tenant: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None
    base_model: str | None = None
    recipe: VersionRecipe | None = None
    """None: an adapter with files."""
    signed_by: str | None = None
    """The id of the key whose signature was verified when the version was pushed."""
    modality: Modality = "text"


ALL_TENANTS = "*"


@dataclass(frozen=True, slots=True)
class Share:
    """Another tenant's right to use an adapter, or one version of it."""

    adapter: AdapterName
    tenant: str
    """The tenant that may use it; "*": all."""
    version: str = ""
    """Empty: all versions."""

    def __str__(self) -> str:
        version = f"@{self.version}" if self.version else ""
        return f"The share of {self.adapter}{version} with {self.tenant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a CID, to be added to its statistics."""

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
class DailyUsage:
    """The requests that a tenant and a key had on one day with the same adapters."""

    day: int
    """Days since 1970, in UTC."""
    tenant: str
    api_key_id: str
    """Empty: requests without a key."""
    adapter: str
    """Names without versions, joined by +; empty: the base alone."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_reused_tokens: int
    """Prompt tokens from the prefix cache."""


@dataclass(frozen=True, slots=True)
class RecentUse:
    """What a tenant and a key used on one server in the last minute."""

    tenant: str
    api_key_id: str
    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReceipt:
    """A receipt as the registry stores it: the searchable fields and the complete body."""

    id: str
    created_at: float
    tenant: str
    cid: str | None
    """None if the base alone served the request."""
    latency_ms: float
    is_cold: bool
    body: Mapping[str, object]
    """The complete receipt, as the client got it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptFilter:
    """Conditions on receipts; a condition that is None does not apply."""

    tenant: str | None = None
    cids: tuple[str, ...] | None = None
    since: float | None = None
    min_latency_ms: float | None = None
    is_cold: bool | None = None
    statuses: tuple[str, ...] | None = None
    slowest_first: bool = False
    """Sorts by latency instead of by time."""
    limit: int = 100
