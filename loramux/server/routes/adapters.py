"""GET /v1/adapters: residency and usage of each adapter; pin and warm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from loramux.adapters.identity import CID_PREFIX
from loramux.backend.host import AdapterUse
from loramux.base.threads import QUERIES
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.metrics.traffic import AdapterTraffic, Traffic
from loramux.registry.names import AdapterName, NameReference, parse_adapter_name, parse_version
from loramux.registry.records import CatalogEntry, Resolved, VersionRecipe
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.generate.selection import find_named
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.server.live.lists import registry_entry
from loramux.server.live.warming import pin, warm_up
from loramux.server.naming.names import GivenName, NamedAdapter, full_name
from loramux.server.naming.view import View
from loramux.server.routes.status import YES
from loramux.types.caller import Caller
from loramux.types.composition import compose
from loramux.types.modality import Modality
from loramux.wire.registry import RegistryEntry
from loramux.wire.text import AdapterEntry, AdapterFailure, AdapterList


def with_stored(
    entries: Sequence[AdapterEntry], catalog: Iterable[CatalogEntry]
) -> list[AdapterEntry]:
    """Add versions of the registry as names of adapters that are there, or as stored ones."""
    # Adapters that were not read yet have no CID.
    found = {entry.cid or entry.id: entry for entry in entries}
    for version in catalog:
        known = found.get(version.cid) or _stored(version)
        found[version.cid] = _named(known, version)
    return list(found.values())


def matching(entries: list[AdapterEntry], text: str) -> list[AdapterEntry]:
    """Return the entries of which a name, an alias or the CID contains the text."""
    wanted = text.strip().lower()
    if not wanted:
        return entries
    return [entry for entry in entries if any(wanted in one.lower() for one in _texts(entry))]


def _texts(entry: AdapterEntry) -> list[str]:
    aliases = [] if entry.aliases is UNSET else entry.aliases
    return [*entry.names, *aliases, entry.cid or ""]


def _named(entry: AdapterEntry, version: CatalogEntry) -> AdapterEntry:
    full_name = f"{version.adapter}@{version.version}"
    names = entry.names if full_name in entry.names else [*entry.names, full_name]
    before = [] if entry.aliases is UNSET else entry.aliases
    aliases = [*before, *(f"{version.adapter}@{alias}" for alias in version.aliases)]
    return replace(
        entry,
        id=names[0],
        names=names,
        aliases=aliases,
        signed_by=version.signed_by or entry.signed_by,
        modality="image" if version.modality == "image" else UNSET,
    )


def _stored(version: CatalogEntry) -> AdapterEntry:
    return AdapterEntry(
        id=version.cid,
        names=[],
        state="stored",
        cid=version.cid,
        path=None,
        rank=0,
        bytes=version.size_bytes,
        tier="source",
        pinned=False,
        hits=0,
        misses=0,
        last_use=None,
        running=0,
        waiting=0,
        cached_tokens=0,
        requests=0,
        prompt_tokens=0,
        generation_tokens=0,
    )


TIERS = ("device", "host", "disk", "source", "loading")
ADDED, BUSIEST = "added", "busiest"
ORDERS = (ADDED, BUSIEST)
# Limit of the versions of the registry in one list.
MAX_STORED = 100_000


def adapter_routes(context: HostContext) -> list[Route]:
    routes = Routes("adapters")
    pinning = answering(AdapterEntry, 400, 404, 503, path_name="name")

    @routes.get("/v1/adapters", answering(AdapterList, 400, 503, parameters=_list_parameters()))
    async def list_adapters(request: Call) -> Response:
        """List every adapter once, with all its names, its tier and its usage."""
        return await _list(context, request)

    @routes.post("/v1/adapters/{name:path}/pin", pinning)
    async def pin_adapter(request: Call) -> Response:
        """Protects an adapter from eviction from the device once it is resident there."""
        return await _pin(context, request, pinned=True)

    @routes.delete("/v1/adapters/{name:path}/pin", pinning)
    async def unpin_adapter(request: Call) -> Response:
        """Allow the eviction of an adapter again."""
        return await _pin(context, request, pinned=False)

    @routes.post(
        "/v1/adapters/{name:path}/warm",
        answering(AdapterEntry, 400, 404, 408, 422, 429, 502, 503, path_name="name"),
    )
    async def warm_adapter(request: Call) -> Response:
        """Load an adapter and generate a token with it, so that it is resident afterwards."""
        name = request.path_params["name"]
        caller = request.caller
        host = await context.host_for(name, context.view_of(caller))
        found = await _find(host, name, caller)
        await warm_up(host, compose((one.cid, one.weight) for one in found))
        return json_response(await _entry(context, _listed_cid(found), name, caller))

    @routes.get(
        "/v1/adapters/{name:path}",
        answering((AdapterEntry, RegistryEntry), 400, 404, 503, path_name="name"),
    )
    async def get_adapter(request: Call) -> Response:
        """Return residency and usage; for a name of the registry its versions and aliases."""
        name, caller = request.path_params["name"], request.caller
        view, host = context.view_of(caller), context.host_with(name)
        given = host.names.find(name) if view.sees_given(name) else None
        if given is not None and given.cid is None:
            return json_response(_unread_entry(host, host.names.unread()[given.path], view))
        # A CID that the caller does not see takes the path of an unknown one.
        cid = name if given is None and name.startswith(CID_PREFIX) else None
        cid = cid if given is None else given.cid
        if cid is None and context.registry is not None:
            return json_response(await _registry_entry(context, name, view))
        context.require_ready()
        if cid is None:
            raise _unknown(name)
        return json_response(await _entry(context, cid, name, caller))

    return routes.found


async def _list(context: HostContext, request: Call) -> Response:
    order, limit = _order(request), _count(request, "limit")
    offset = _count(request, "offset") or 0
    caller = request.caller
    entries = await _entries(context, caller)
    if request.query_params.get("stored", "").lower() in YES:
        entries = with_stored(entries, await _catalog(context, context.view_of(caller)))
    if order == BUSIEST:
        tenant = caller.confined_to
        traffic = [host.metrics.traffic_of(tenant) for host in context.hosts]
        entries = _by_traffic(entries, traffic)
    entries = matching(entries, request.query_params.get("search", ""))
    found = entries[offset:] if limit is None else entries[offset : offset + limit]
    return json_response(AdapterList(data=found, total=len(entries)))


async def _catalog(context: HostContext, view: View) -> list[CatalogEntry]:
    """Return the versions of the registry that the caller sees."""
    if context.registry is None:
        return []
    registry = context.registry.registry
    shared = {adapter.tenant for adapter in view.access.shares if view.sees(adapter)}
    tenants = [view.tenant, *sorted(shared - {view.tenant})] if view.is_confined else [None]
    found = []
    for tenant in tenants:
        versions = await QUERIES.run(registry.catalog, tenant=tenant, limit=MAX_STORED)
        found += [one for one in versions if _is_seen(view, one.adapter, one.version)]
    return [
        dataclasses.replace(one, aliases=()) if view.shared_versions(one.adapter) else one
        for one in found
    ]


def _is_seen(view: View, adapter: AdapterName, version: str) -> bool:
    return view.is_whole or view.allows(NameReference(adapter, parse_version(version)))


async def _pin(context: HostContext, request: Call, *, pinned: bool) -> Response:
    name, caller = request.path_params["name"], request.caller
    host = await context.host_for(name, context.view_of(caller))
    found = await _find(host, name, caller)
    await pin(host, request, name, [adapter.cid for adapter in found], pinned=pinned)
    return json_response(await _entry(context, _listed_cid(found), name, caller))


async def _find(context: HostContext, name: str, caller: Caller) -> tuple[NamedAdapter, ...]:
    """Return the adapters that the name means; raise NotServed."""
    context.require_ready()
    found = await find_named(context, name, param="name", caller=caller)
    if found is None:
        raise _unknown(name)
    return found


def _listed_cid(found: Sequence[NamedAdapter]) -> str:
    """Return the CID under which the adapters of a name are listed: of their sum, if they are."""
    part_of = found[0].part_of
    return found[0].cid if part_of is None else part_of.cid


async def _registry_entry(context: HostContext, name: str, view: View) -> RegistryEntry:
    """Describe an adapter of the registry with the versions that the caller sees."""
    registry = context.require_registry().registry
    for home in view.homes(name):
        adapter = parse_adapter_name(name, home_tenant=home or context.receipts.home_tenant)
        if not view.sees(adapter):
            continue
        try:
            return registry_entry(await QUERIES.run(registry.show, str(adapter)), view)
        except AdapterNotFound:
            continue
    raise _unknown(name)


async def _entry(context: HostContext, cid: str, name: str, caller: Caller) -> AdapterEntry:
    for entry in await _entries(context, caller):
        if entry.cid == cid:
            return entry
    # It was removed while the engine answered.
    raise _unknown(name)


async def _entries(context: HostContext, caller: Caller) -> list[AdapterEntry]:
    """Return the adapters of all models that the caller sees."""
    return [entry for host in context.hosts for entry in await _host_entries(host, caller)]


async def _host_entries(context: HostContext, caller: Caller) -> list[AdapterEntry]:
    """Return the adapters that the caller sees, in the order in which they were added.

    Adapters that were not read yet or were refused follow, and removed ones that still finish their
    requests come last.
    """
    context.require_ready()
    uses = {use.cid: use for use in await context.backend.adapter_uses()}
    names, made = context.names, context.combinations
    view, traffic = context.view_of(caller), context.metrics.traffic_of(caller.confined_to)
    entries = []
    for cid, card in context.backend.adapters.items():
        # The engine may not have registered it yet.
        unused = AdapterUse(cid=cid, tier="source", num_bytes=card.num_bytes, rank=card.rank)
        use, seen = uses.pop(cid, unused), names.visible_names(cid, view)
        if not (seen or view.is_whole or names.sees_combination(cid, view)):
            continue
        if view.is_confined:
            use = _own_use(context, use, view)
        path = None if view.is_confined else card.path
        entry = _make_entry(seen, path, use, traffic.total(cid), context.modality)
        if card.tokenizer_digest:
            entry.tokenizer_digest = card.tokenizer_digest
        recipe = None if made is None else made.recipes.get(cid)
        entries.append(entry if recipe is None else replace(entry, recipe=recipe.to_dict()))
    sums = [one for one in names.sums.values() if view.allows_name(full_name(one))]
    entries += _sum_entries(sums, {entry.cid: entry for entry in entries})
    unread = (_unread_entry(context, given, view) for given in names.unread().values())
    entries += [entry for entry in unread if entry.names]
    if not view.is_whole:
        return entries
    rest = (_make_entry([], None, use, Traffic(), context.modality) for use in uses.values())
    return [*entries, *rest]


def _own_use(context: HostContext, use: AdapterUse, view: View) -> AdapterUse:
    """Return the use without what other tenants did with the same content, and with own pins."""
    is_pinned = use.is_pinned and context.pins.holds(f"The tenant {view.tenant}", use.cid)
    if context.names.is_exclusive(use.cid, view):
        return dataclasses.replace(use, is_pinned=is_pinned)
    return AdapterUse(
        cid=use.cid,
        tier=use.tier,
        num_bytes=use.num_bytes,
        rank=use.rank,
        is_pinned=is_pinned,
    )


def _sum_entries(
    sums: Iterable[Resolved], parts: Mapping[str | None, AdapterEntry]
) -> list[AdapterEntry]:
    """Describe the sums of the registry whose parts the host still has."""
    entries = []
    for resolved in sums:
        assert resolved.recipe is not None
        found = [parts.get(part.cid) for part in resolved.recipe.parts]
        present = [part for part in found if part is not None]
        if len(present) == len(found):
            entries.append(_sum_entry(resolved, resolved.recipe, present))
    return entries


def _sum_entry(
    resolved: Resolved, recipe: VersionRecipe, parts: Sequence[AdapterEntry]
) -> AdapterEntry:
    """Describe a sum, which is as fast as its slowest part and has no bytes of its own."""
    slowest = max(parts, key=lambda part: TIERS.index(part.tier) if part.tier in TIERS else 0)
    rank = sum(part.rank for part in parts)
    use = AdapterUse(cid=resolved.cid, tier=slowest.tier, num_bytes=0, rank=rank)
    entry = _make_entry([full_name(resolved)], None, use, Traffic())
    pinned = all(part.pinned for part in parts)
    return replace(entry, recipe=recipe.to_dict(), pinned=pinned)


def _unread_entry(context: HostContext, names: list[GivenName], view: View) -> AdapterEntry:
    """Describe an adapter without a CID by its names in the view, which share a folder."""
    given = names[0]
    unused = AdapterUse(cid="", tier="source", num_bytes=given.num_bytes, rank=given.rank)
    seen = view.visible([one.name for one in names], ())
    path = None if view.is_confined else given.path
    entry = _make_entry(seen, path, unused, Traffic(), context.modality)
    entry.cid, entry.state = None, given.state
    if given.failure is not None:
        error = given.failure.error
        entry.failure = AdapterFailure(code=error.code, message=error.reason, fix=error.fix)
    return entry


def _make_entry(
    names: list[str],
    path: str | None,
    use: AdapterUse,
    total: Traffic,
    modality: Modality = "text",
) -> AdapterEntry:
    return AdapterEntry(
        modality="image" if modality == "image" else UNSET,
        id=names[0] if names else use.cid,
        names=names,
        state="ready",
        cid=use.cid,
        path=path,
        rank=use.rank,
        bytes=use.num_bytes,
        tier=use.tier,
        pinned=use.is_pinned,
        hits=use.hits,
        misses=use.misses,
        last_use=use.last_use_s,
        running=use.num_running,
        waiting=use.num_waiting,
        cached_tokens=use.cached_tokens,
        requests=total.num_requests,
        prompt_tokens=total.num_prompt_tokens,
        generation_tokens=total.num_generation_tokens,
    )


def _by_traffic(
    entries: list[AdapterEntry], traffic: Iterable[AdapterTraffic]
) -> list[AdapterEntry]:
    """Sorts the recently busiest first; entries without traffic keep their order."""
    ranks = {cid: rank for one in traffic for rank, cid in enumerate(one.busiest())}
    return sorted(entries, key=lambda entry: ranks.get(entry.cid or "", len(ranks)))


def _unknown(name: str) -> NotServed:
    return NotServed(f"The adapter `{name}` does not exist.", param="name")


def _order(request: Call) -> str:
    order = request.query_params.get("order", ADDED)
    if order not in ORDERS:
        raise InvalidRequest(f"order must be {' or '.join(ORDERS)}, got {order!r}.", param="order")
    return order


def _count(request: Call, param: str) -> int | None:
    text = request.query_params.get(param)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise InvalidRequest(f"{param} must be a whole number, got {text!r}.", param=param)
    return int(text)


def _list_parameters() -> list[dict[str, Any]]:
    return [
        {
            "name": "order",
            "in": "query",
            "required": False,
            "description": "busiest: by tokens of the last minutes. Default: as registered.",
            "schema": {"type": "string", "enum": list(ORDERS)},
        },
        *(
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": meaning,
                "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
            }
            for name, meaning in (
                ("limit", "Maximum number of entries."),
                ("offset", "Number of entries to skip."),
            )
        ),
        {
            "name": "search",
            "in": "query",
            "required": False,
            "description": "Only adapters of which a name, an alias or the CID contains this text.",
            "schema": {"type": "string"},
        },
        {
            "name": "stored",
            "in": "query",
            "required": False,
            "description": "1: also versions of the registry that no request has named yet.",
            "schema": {"type": "string"},
        },
    ]
