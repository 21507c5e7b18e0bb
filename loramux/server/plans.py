"""POST /v1/adapters/plan: what a number of adapters would do to this server's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import AdapterUse, EngineStats, ModelCard
from loramux.capacity.plan import Budgets, EvictedNow, Fleet, MemoryPlan, PlannedBase, parse_targets
from loramux.capacity.planner import plan_memory
from loramux.config.fields import parse_bytes
from loramux.errors import InvalidRequest, LoramuxError
from loramux.server.body import json_response, read_json
from loramux.server.context import Context
from loramux.server.openapi import taking
from loramux.server.wire import PlanRequest

MAX_NAMES = 20
MAX_RANKS = 1000
DEFAULT_TARGETS = "q,k,v,o"


def plan_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["adapters"])

    @router.post("/v1/adapters/plan", **taking(PlanRequest, MemoryPlan))
    async def plan_adapters(request: Request) -> Response:
        """How many would fit in each tier, expected hit rates, what would be evicted, advice."""
        max_bytes = context.options.max_body_bytes
        asked, _ = await read_json(request, PlanRequest, max_bytes=max_bytes)
        context.require_ready()
        card = context.backend.card
        base, fleet, budgets = _base(card), _fleet(asked), _budgets(asked, card)
        plan = await asyncio.to_thread(plan_memory, base, fleet, budgets)
        uses = await context.backend.adapter_uses()
        evicted = would_evict(plan, context.backend.stats, uses, _names(context))
        return json_response(msgspec.structs.replace(plan, evicted_now=evicted))

    return router


def would_evict(
    plan: MemoryPlan,
    stats: EngineStats,
    uses: Sequence[AdapterUse],
    names: Mapping[str, str],
) -> EvictedNow:
    """Idle adapters, the longest unused first, until the planned ones have room."""
    needed = plan.tier("device").used_bytes
    # Before its first step the engine has told nothing, and everything is free.
    room = stats.num_free_pages * plan.base.page_bytes if stats.num_pages else needed
    idle = [use for use in uses if use.tier == "device" and not use.is_pinned]
    idle = [use for use in idle if not use.num_running]
    evicted = []
    for use in sorted(idle, key=lambda use: use.last_use_s or 0.0):
        if room >= needed:
            break
        evicted.append(names.get(use.cid, use.cid))
        room += -(-use.num_bytes // plan.base.page_bytes) * plan.base.page_bytes
    return EvictedNow(adapters=len(evicted), names=evicted[:MAX_NAMES], is_enough=room >= needed)


def _names(context: Context) -> dict[str, str]:
    """Maps the CID of each named adapter to its first name."""
    names = {cid: context.names.names_of(cid) for cid in context.backend.adapters}
    return {cid: known[0] for cid, known in names.items() if known}


def _base(card: ModelCard) -> PlannedBase:
    if card.shapes is None:
        raise LoramuxError("The engine did not say what shapes its base has.")
    return PlannedBase(
        name=card.name,
        shapes=card.shapes,
        dtype=card.dtype,
        block_tokens=card.block_tokens,
        packing=card.packing,
    )


def _fleet(asked: PlanRequest) -> Fleet:
    ranks = [asked.rank] if isinstance(asked.rank, int) else asked.rank
    if len(ranks) > MAX_RANKS:
        raise InvalidRequest(f"rank has more than {MAX_RANKS} entries.", param="rank")
    targets = asked.targets if asked.targets is not None else DEFAULT_TARGETS
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split(",") if name.strip()]
    return Fleet(
        num_adapters=asked.adapters,
        ranks=tuple(ranks),
        targets=parse_targets(targets),
        zipf=1.0 if asked.zipf is None else asked.zipf,
    )


def _budgets(asked: PlanRequest, card: ModelCard) -> Budgets:
    return Budgets(
        device_bytes=_size(asked.device_memory, card.pool_bytes, "device_memory"),
        host_bytes=_size(asked.host_memory, card.host_memory_bytes, "host_memory"),
        disk_bytes=_size(asked.disk_space, card.disk_space_bytes, "disk_space"),
        kv_tokens=asked.kv_tokens,
        adapter_fraction=card.adapter_memory_fraction,
    )


def _size(given: int | str | None, own: int, param: str) -> int:
    if given is None:
        return own
    try:
        return parse_bytes(given)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from error
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{param} is too large.", param=param) from error
