"""The plain values that the registry takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loramux.adapters.recipe import SUM_METHOD, Recipe
from loramux.registry.names import AdapterName
from loramux.types.composition import sum_text


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
        """Returns the canonical form of the recipe, with the names of its parts."""
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
    slowest_first: bool = False
    """Sorts by latency instead of by time."""
    limit: int = 100
