"""The models and adapters that a caller sees, as lists and entries."""

from __future__ import annotations

from msgspec import UNSET

from loramux.backend.text import ModelCard
from loramux.base.threads import QUERIES
from loramux.errors import AdapterNotFound
from loramux.registry.records import AdapterInfo, AliasState, Resolved, VersionInfo
from loramux.server.context import HostContext
from loramux.server.generate.selection import MAX_LISTED
from loramux.server.naming.view import WHOLE_VIEW, View, unknown_adapter
from loramux.types.caller import Caller
from loramux.wire.registry import AliasEntry, RegistryEntry, VersionEntry
from loramux.wire.text import ModelEntry


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


async def list_models(context: HostContext, caller: Caller) -> list[ModelEntry]:
    """Return the bases and all adapters that the caller may use, those of the registry last."""
    for host in context.hosts:
        host.require_known()
    view = context.view_of(caller)
    entries = host_entries(context, view)
    for host in context.others:
        entries |= host_entries(host, view)
    for entry in await _registry_entries(context, view):
        entries.setdefault(entry.id, entry)
    return list(entries.values())


async def _registry_entries(context: HostContext, view: View) -> list[ModelEntry]:
    if context.registry is None:
        return []
    found = await QUERIES.run(context.registry.list_current, view, limit=MAX_LISTED)
    served = {host.modality for host in context.hosts}
    found = [one for one in found if one.modality in served]
    return [_model_entry(context, f"{one.tenant}/{one.name}", one, view) for one in found]


async def registered_model(context: HostContext, model_id: str, view: View) -> ModelEntry | None:
    if context.registry is None:
        return None
    try:
        resolved = await context.registry.resolve(model_id, sticky_key="", view=view)
    except AdapterNotFound:
        return None
    if all(host.modality != resolved.modality for host in context.hosts):
        return None
    return _model_entry(context, model_id, resolved, view)


def _model_entry(context: HostContext, model_id: str, resolved: Resolved, view: View) -> ModelEntry:
    """Describe an adapter of the registry; its root is its CID until it was first requested."""
    hosts = [host for host in context.hosts if host.modality == resolved.modality]
    card = hosts[0].backend.adapters.get(resolved.cid) if hosts else None
    return ModelEntry(
        id=model_id,
        created=context.created_s,
        root=resolved.cid if card is None or view.is_confined else card.path,
        parent=hosts[0].base_names[0] if hosts else None,
        max_model_len=None,
        modality="image" if resolved.modality == "image" else UNSET,
    )


def host_entries(context: HostContext, view: View) -> dict[str, ModelEntry]:
    """Return the base and the given adapters by name, except for those that were refused.

    A name of the base always means the base. Paths of the server are not for tenants.
    """
    card, base_names = context.backend.card, context.base_names
    adapters = {
        given.name: ModelEntry(
            id=given.name,
            created=given.created_s,
            root=given.name if view.is_confined else given.path,
            parent=base_names[0],
            max_model_len=None,
            **context.names.described(given),
        )
        for given in context.names.given()
        if given.state != "failed" and view.sees_given(given.name)
    }
    bases = {
        name: ModelEntry(
            id=name,
            created=context.created_s,
            root=name if view.is_confined else card.path,
            parent=None,
            max_model_len=card.max_model_len if isinstance(card, ModelCard) else None,
            modality="image" if context.modality == "image" else UNSET,
        )
        for name in base_names
    }
    adapters = {name: entry for name, entry in adapters.items() if name not in bases}
    return bases | adapters if view.caller.may_use_base else adapters
