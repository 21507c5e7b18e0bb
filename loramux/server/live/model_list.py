"""The models that a caller may name: the bases, each with its adapters."""

from __future__ import annotations

from msgspec import UNSET

from loramux.backend.text import ModelCard
from loramux.base.threads import QUERIES
from loramux.errors import AdapterNotFound
from loramux.registry.records import Resolved
from loramux.server.context import HostContext
from loramux.server.generate.near_names import MAX_LISTED
from loramux.server.naming.view import View
from loramux.types.caller import Caller
from loramux.wire.text import ModelEntry


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


async def registry_entry(context: HostContext, model_id: str, view: View) -> ModelEntry | None:
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
