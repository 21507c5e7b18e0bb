"""Entries of adapters of the registry, as a caller sees them."""

from __future__ import annotations

from msgspec import UNSET

from loramux.registry.records import AdapterInfo, AliasState, VersionInfo
from loramux.server.naming.view import WHOLE_VIEW, View, unknown_adapter
from loramux.wire.registry import AliasEntry, RegistryEntry, VersionEntry


def registry_entry(info: AdapterInfo, view: View = WHOLE_VIEW) -> RegistryEntry:
    """Describe an adapter; of another tenant's, only what is shared with the caller."""
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
