"""GET /v1/adapters: where each adapter is and who uses it; pins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import AdapterCard, AdapterUse
from loramux.errors import InvalidRequest
from loramux.metrics.traffic import AdapterTraffic
from loramux.server.body import json_response
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.naming import find_named
from loramux.server.openapi import answering
from loramux.server.registry_bodies import RegistryEntry, registry_entry
from loramux.server.warming import warm_up
from loramux.server.wire import AdapterEntry, AdapterList

ADDED, BUSIEST = "added", "busiest"
ORDERS = (ADDED, BUSIEST)


def adapter_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["adapters"])
    of_one = answering(AdapterEntry, 400, 404, 503, path_name="name")
    of_pinned = answering(AdapterEntry, 400, 404, 503, path_name="name")

    @router.get("/v1/adapters", **answering(AdapterList, 400, 503, parameters=_list_parameters()))
    async def list_adapters(request: Request) -> Response:
        """Every adapter once, with all its names, its tier and its use."""
        order, limit = _order(request), _limit(request)
        entries = await _entries(context)
        if order == BUSIEST:
            entries = _by_traffic(entries, context.metrics.traffic)
        return json_response(AdapterList(data=entries[:limit], total=len(entries)))

    @router.post("/v1/adapters/{name:path}/pin", **of_pinned)
    async def pin_adapter(request: Request) -> Response:
        """A pinned adapter is not evicted from the device, once it is there."""
        return await _pin(context, request.path_params["name"], pinned=True)

    @router.delete("/v1/adapters/{name:path}/pin", **of_one)
    async def unpin_adapter(request: Request) -> Response:
        return await _pin(context, request.path_params["name"], pinned=False)

    @router.post(
        "/v1/adapters/{name:path}/warm",
        **answering(AdapterEntry, 400, 404, 408, 422, 429, 502, 503, path_name="name"),
    )
    async def warm_adapter(request: Request) -> Response:
        """Loads it, and generates a token with it: whoever asks next does not wait for it."""
        adapter = await _find(context, request.path_params["name"])
        await warm_up(context, adapter)
        return json_response(await _entry(context, adapter))

    @router.get(
        "/v1/adapters/{name:path}",
        **answering((AdapterEntry, RegistryEntry), 400, 404, 503, path_name="name"),
    )
    async def get_adapter(request: Request) -> Response:
        """Its place and use; of an adapter of the registry its versions and aliases."""
        name = request.path_params["name"]
        if context.registry is not None and name not in context.backend.adapters:
            info = await asyncio.to_thread(context.registry.registry.show, name)
            return json_response(registry_entry(info))
        return json_response(await _entry(context, name))

    return router


async def _pin(context: Context, name: str, *, pinned: bool) -> Response:
    adapter = await _find(context, name)
    await context.backend.pin_adapter(adapter, pinned)
    return json_response(await _entry(context, adapter))


async def _find(context: Context, name: str) -> str:
    """As the engine calls it."""
    context.require_ready()
    found = await find_named(context, name, param="name")
    if found is None or found.adapter is None:
        raise _unknown(name)
    return found.adapter


async def _entry(context: Context, name: str) -> AdapterEntry:
    context.require_ready()
    _require_adapter(context, name)
    cid = context.backend.adapters[name].cid
    for entry in await _entries(context):
        if entry.cid == cid:
            return entry
    # It was removed while the engine answered.
    raise _unknown(name)


async def _entries(context: Context) -> list[AdapterEntry]:
    """In the order in which they were added; those that only finish their requests come last."""
    context.require_ready()
    uses = {use.cid: use for use in await context.backend.adapter_uses()}
    cards: dict[str, list[AdapterCard]] = {}
    for card in context.backend.adapters.values():
        cards.setdefault(card.cid, []).append(card)
    traffic = context.metrics.traffic
    named = [_make_entry(group, uses.pop(cid, None), traffic) for cid, group in cards.items()]
    if context.registry is not None:
        for entry in named:
            # Those of the registry are known to the engine by their CID alone.
            entry.names = [context.registry.name_of(name) for name in entry.names]
            entry.id = entry.names[0]
    return named + [_make_entry([], use, traffic) for use in uses.values()]


def _make_entry(
    cards: Sequence[AdapterCard], use: AdapterUse | None, traffic: AdapterTraffic
) -> AdapterEntry:
    """`use` is None while the engine does not know the adapter yet."""
    use = use or AdapterUse(
        cid=cards[0].cid, tier="source", num_bytes=cards[0].num_bytes, rank=cards[0].rank
    )
    totals = [traffic.total(card.name) for card in cards]
    return AdapterEntry(
        id=cards[0].name if cards else use.cid,
        names=[card.name for card in cards],
        cid=use.cid,
        path=cards[0].path if cards else None,
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
        requests=sum(total.num_requests for total in totals),
        prompt_tokens=sum(total.num_prompt_tokens for total in totals),
        generation_tokens=sum(total.num_generation_tokens for total in totals),
    )


def _by_traffic(entries: Sequence[AdapterEntry], traffic: AdapterTraffic) -> list[AdapterEntry]:
    """The busiest of late first; those without any traffic stay in their order."""
    ranks = {name: rank for rank, name in enumerate(traffic.busiest())}
    last = len(ranks)
    return sorted(
        entries,
        # Those of the registry are counted by their CID.
        key=lambda entry: min(ranks.get(name, last) for name in (*entry.names, entry.cid)),
    )


def _require_adapter(context: Context, name: str) -> None:
    if name not in context.backend.adapters:
        raise _unknown(name)


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
            "description": "busiest: by tokens of the last minutes. Default: as they were added.",
            "schema": {"type": "string", "enum": list(ORDERS)},
        },
        {
            "name": "limit",
            "in": "query",
            "required": False,
            "description": "At most this many.",
            "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        },
    ]
