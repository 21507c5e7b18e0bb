"""POST /v1/adapters/plan: how many planned adapters fit into this server's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response

from loramux.adapters.packed.paged import RANK_BLOCK
from loramux.backend.host import AdapterUse, EngineStats
from loramux.backend.text import ModelCard
from loramux.base.threads import PLANS
from loramux.capacity.plan import (
    Budgets,
    EvictedNow,
    Fleet,
    MeasuredAdapter,
    MemoryPlan,
    parse_targets,
)
from loramux.capacity.planner import plan_memory
from loramux.config.fields import parse_bytes
from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.generate.selection import find_named
from loramux.server.http.body import json_response, read_json
from loramux.server.http.call import Call
from loramux.server.http.openapi import taking
from loramux.server.http.routes import Route, Routes
from loramux.server.live.fitting import planned_base
from loramux.server.naming.names import NamedAdapter
from loramux.types.caller import Caller
from loramux.types.model import BaseModelInfo
from loramux.wire.text import PlanRequest

MAX_NAMES = 20
MAX_RANKS = 1000
MAX_LIKE = 100
MAX_TARGETS = 1000
MAX_TARGET_CHARACTERS = 10_000
DEFAULT_TARGETS = "attention"


def plan_routes(context: Context) -> list[Route]:
    routes = Routes("adapters")

    @routes.post("/v1/adapters/plan", taking(PlanRequest, MemoryPlan))
    async def plan_adapters(request: Call) -> Response:
        """Compute how many adapters fit in each tier, hit rates, evictions and advice."""
        max_bytes = context.options.max_body_bytes
        body, _ = await read_json(request, PlanRequest, max_bytes=max_bytes)
        context.require_ready()
        card = context.backend.card
        measured = await _measure(context, body, request.caller)
        base, budgets = planned_base(card), _budgets(body, card)
        fleet = _fleet(body, measured, base.shapes)
        plan = await PLANS.run(plan_memory, base, fleet, budgets)
        uses = await context.backend.adapter_uses()
        evicted = would_evict(plan, context.backend.stats, uses, _names(context))
        return json_response(msgspec.structs.replace(plan, evicted_now=evicted))

    return routes.found


def would_evict(
    plan: MemoryPlan,
    stats: EngineStats,
    uses: Sequence[AdapterUse],
    names: Mapping[str, str],
) -> EvictedNow:
    """Return the idle adapters that would be evicted for the planned ones, least recently used
    first.
    """
    needed = plan.tier("device").used_bytes
    # Before its first step the engine has no stats, and all pages are free.
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
    """Map the CID of each named adapter to its first name."""
    names = {cid: context.names.names_of(cid) for cid in context.backend.adapters}
    return {cid: known[0] for cid, known in names.items() if known}


async def _measure(
    context: Context, body: PlanRequest, caller: Caller
) -> tuple[MeasuredAdapter, ...]:
    """Return the sizes of the adapters that the body names, which the server opens."""
    if body.like is None:
        return ()
    if body.rank is not None or body.targets is not None:
        raise InvalidRequest("like says ranks and targets. Leave them out.", param="like")
    if not 1 <= len(body.like) <= MAX_LIKE:
        raise InvalidRequest(f"like names 1 to {MAX_LIKE} adapters.", param="like")
    measured = []
    for name in body.like:
        found = await find_named(context, name, param="like", caller=caller)
        if found is None:
            raise NotServed(f"The adapter `{name}` does not exist.", param="like")
        measured += [_measured(context, one) for one in found]
    return tuple(measured)


def _measured(context: Context, adapter: NamedAdapter) -> MeasuredAdapter:
    card, shapes = context.backend.adapters[adapter.cid], context.backend.card.shapes
    # The server knows no ranks by module: all projections may have the largest one.
    num_projections = 0 if shapes is None else len(shapes.projections)
    return MeasuredAdapter(
        name=adapter.full_name,
        rank=card.rank,
        num_bytes=card.num_bytes,
        num_blocks=-(-card.rank // RANK_BLOCK) * num_projections,
    )


def _fleet(
    body: PlanRequest, measured: tuple[MeasuredAdapter, ...], shapes: BaseModelInfo
) -> Fleet:
    zipf = 1.0 if body.zipf is None else body.zipf
    if measured:
        return Fleet(num_adapters=body.adapters, measured=measured, zipf=zipf)
    if body.rank is None:
        raise InvalidRequest("Give rank, or like.", param="rank")
    ranks = [body.rank] if isinstance(body.rank, int) else body.rank
    if len(ranks) > MAX_RANKS:
        raise InvalidRequest(f"rank has more than {MAX_RANKS} entries.", param="rank")
    targets = body.targets if body.targets is not None else DEFAULT_TARGETS
    if len(targets) > MAX_TARGETS or sum(map(len, targets)) > MAX_TARGET_CHARACTERS:
        raise InvalidRequest(
            f"targets has more than {MAX_TARGETS} names or {MAX_TARGET_CHARACTERS} characters.",
            param="targets",
        )
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split(",") if name.strip()]
    return Fleet(
        num_adapters=body.adapters,
        ranks=tuple(ranks),
        targets=parse_targets(targets, shapes),
        zipf=zipf,
    )


def _budgets(body: PlanRequest, card: ModelCard) -> Budgets:
    return Budgets(
        device_bytes=_size(body.device_memory, card.pool_bytes, "device_memory"),
        host_bytes=_size(body.host_memory, card.host_memory_bytes, "host_memory"),
        disk_bytes=_size(body.disk_space, card.disk_space_bytes, "disk_space"),
        kv_tokens=body.kv_tokens,
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
