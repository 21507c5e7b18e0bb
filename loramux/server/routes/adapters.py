"""GET /v1/adapters: residency and usage of each adapter; pin and warm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import AdapterUse
from loramux.errors import InvalidRequest
from loramux.metrics.traffic import AdapterTraffic, Traffic
from loramux.registry.records import Resolved, VersionRecipe
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.names import GivenName, NamedAdapter, full_name
from loramux.server.openapi import answering
from loramux.server.selection import find_named
from loramux.server.warming import warm_up
from loramux.server.wire import AdapterEntry, AdapterFailure, AdapterList
from loramux.server.wire_registry import RegistryEntry, registry_entry
from loramux.threads import QUERIES
from loramux.types.composition import compose

TIERS = ("device", "host", "disk", "source", "loading")
ADDED, BUSIEST = "added", "busiest"
ORDERS = (ADDED, BUSIEST)


def adapter_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["adapters"])
    pinning = answering(AdapterEntry, 400, 404, 503, path_name="name")

    @router.get("/v1/adapters", **answering(AdapterList, 400, 503, parameters=_list_parameters()))
    async def list_adapters(request: Request) -> Response:
        """Lists every adapter once, with all its names, its tier and its usage."""
        order, limit = _order(request), _limit(request)
        entries = await _entries(context)
        if order == BUSIEST:
            entries = _by_traffic(entries, context.metrics.traffic)
        return json_response(AdapterList(data=entries[:limit], total=len(entries)))

    @router.post("/v1/adapters/{name:path}/pin", **pinning)
    async def pin_adapter(request: Request) -> Response:
        """Protects an adapter from eviction from the device once it is resident there."""
        return await _pin(context, request.path_params["name"], pinned=True)

    @router.delete("/v1/adapters/{name:path}/pin", **pinning)
    async def unpin_adapter(request: Request) -> Response:
        """Allows the eviction of an adapter again."""
        return await _pin(context, request.path_params["name"], pinned=False)

    @router.post(
        "/v1/adapters/{name:path}/warm",
        **answering(AdapterEntry, 400, 404, 408, 422, 429, 502, 503, path_name="name"),
    )
    async def warm_adapter(request: Request) -> Response:
        """Loads an adapter and generates a token with it, so that it is resident afterwards."""
        name = request.path_params["name"]
        found = await _find(context, name)
        await warm_up(context, compose((one.cid, one.weight) for one in found))
        return json_response(await _entry(context, _listed_cid(found), name))

    @router.get(
        "/v1/adapters/{name:path}",
        **answering((AdapterEntry, RegistryEntry), 400, 404, 503, path_name="name"),
    )
    async def get_adapter(request: Request) -> Response:
        """Returns residency and usage; for a name of the registry its versions and aliases."""
        name = request.path_params["name"]
        given = context.names.find(name)
        if given is not None and given.cid is None:
            return json_response(_unread_entry(context.names.unread()[given.path]))
        cid = _served_cid(context, name)
        if cid is None and context.registry is not None:
            info = await QUERIES.run(context.registry.registry.show, name)
            return json_response(registry_entry(info))
        context.require_ready()
        if cid is None:
            raise _unknown(name)
        return json_response(await _entry(context, cid, name))

    return router


async def _pin(context: Context, name: str, *, pinned: bool) -> Response:
    found = await _find(context, name)
    for adapter in found:
        await context.backend.pin_adapter(adapter.cid, pinned)
    return json_response(await _entry(context, _listed_cid(found), name))


async def _find(context: Context, name: str) -> tuple[NamedAdapter, ...]:
    """Returns the adapters that the name means; raises NotServed."""
    context.require_ready()
    found = await find_named(context, name, param="name")
    if found is None:
        raise _unknown(name)
    return found


def _listed_cid(found: Sequence[NamedAdapter]) -> str:
    """Returns the CID under which the adapters of a name are listed: of their sum, if they are."""
    part_of = found[0].part_of
    return found[0].cid if part_of is None else part_of.cid


def _served_cid(context: Context, name: str) -> str | None:
    """Returns the CID of a given name, or the name itself if it is the CID of a known adapter."""
    given = context.names.find(name)
    if given is not None:
        return given.cid
    return name if name in context.backend.adapters else None


async def _entry(context: Context, cid: str, name: str) -> AdapterEntry:
    for entry in await _entries(context):
        if entry.cid == cid:
            return entry
    # It was removed while the engine answered.
    raise _unknown(name)


async def _entries(context: Context) -> list[AdapterEntry]:
    """Returns all adapters in the order in which they were added.

    Adapters that were not read yet or were refused follow, and removed ones that still finish their
    requests come last.
    """
    context.require_ready()
    uses = {use.cid: use for use in await context.backend.adapter_uses()}
    names, traffic, made = context.names, context.metrics.traffic, context.combinations
    entries = []
    for cid, card in context.backend.adapters.items():
        # The engine may not have registered it yet.
        unused = AdapterUse(cid=cid, tier="source", num_bytes=card.num_bytes, rank=card.rank)
        use = uses.pop(cid, unused)
        entry = _make_entry(names.names_of(cid), card.path, use, traffic.total(cid))
        if card.tokenizer_digest:
            entry.tokenizer_digest = card.tokenizer_digest
        recipe = None if made is None else made.recipes.get(cid)
        entries.append(entry if recipe is None else replace(entry, recipe=recipe.to_dict()))
    entries += _sum_entries(names.sums.values(), {entry.cid: entry for entry in entries})
    entries += map(_unread_entry, names.unread().values())
    return entries + [_make_entry([], None, use, Traffic()) for use in uses.values()]


def _sum_entries(
    sums: Iterable[Resolved], parts: Mapping[str | None, AdapterEntry]
) -> list[AdapterEntry]:
    """Describes the sums of the registry whose parts the host still has."""
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
    """Describes a sum, which is as fast as its slowest part and has no bytes of its own."""
    slowest = max(parts, key=lambda part: TIERS.index(part.tier) if part.tier in TIERS else 0)
    rank = sum(part.rank for part in parts)
    use = AdapterUse(cid=resolved.cid, tier=slowest.tier, num_bytes=0, rank=rank)
    entry = _make_entry([full_name(resolved)], None, use, Traffic())
    pinned = all(part.pinned for part in parts)
    return replace(entry, recipe=recipe.to_dict(), pinned=pinned)


def _unread_entry(names: list[GivenName]) -> AdapterEntry:
    """Describes an adapter without a CID by its names, which share a folder."""
    given = names[0]
    unused = AdapterUse(cid="", tier="source", num_bytes=given.num_bytes, rank=given.rank)
    entry = _make_entry([one.name for one in names], given.path, unused, Traffic())
    entry.cid, entry.state = None, given.state
    if given.failure is not None:
        error = given.failure.error
        entry.failure = AdapterFailure(code=error.code, message=error.reason, fix=error.fix)
    return entry


def _make_entry(
    names: list[str], path: str | None, use: AdapterUse, total: Traffic
) -> AdapterEntry:
    return AdapterEntry(
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


def _by_traffic(entries: list[AdapterEntry], traffic: AdapterTraffic) -> list[AdapterEntry]:
    """Sorts the recently busiest first; entries without traffic keep their order."""
    ranks = {cid: rank for rank, cid in enumerate(traffic.busiest())}
    return sorted(entries, key=lambda entry: ranks.get(entry.cid or "", len(ranks)))


def _unknown(name: str) -> NotServed:
    return NotServed(f"The adapter `{name}` does not exist.", param="name")


def _order(request: Request) -> str:
    order = request.query_params.get("order", ADDED)
    if order not in ORDERS:
        raise InvalidRequest(f"order must be {' or '.join(ORDERS)}, got {order!r}.", param="order")
    return order


def _limit(request: Request) -> int | None:
    text = request.query_params.get("limit")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise InvalidRequest(f"limit must be a whole number, got {text!r}.", param="limit")
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
        {
            "name": "limit",
            "in": "query",
            "required": False,
            "description": "Maximum number of entries.",
            "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        },
    ]
