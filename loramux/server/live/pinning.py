"""Pins adapters on the device, within the limits of the tenants and keys that pin them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loramux.errors import QuotaExceeded
from loramux.registry.audit import Action, Event
from loramux.server.auth.audit import audited
from loramux.server.context import HostContext
from loramux.server.http.call import Call
from loramux.types.limits import LIMITS, Limits

LIMIT = "pinned_pages"


async def pin(
    context: HostContext, http: Call, name: str, cids: Sequence[str], *, pinned: bool
) -> None:
    """Pins or unpins the adapters of a name; raises QuotaExceeded and pins none over a limit."""
    action = Action.PIN if pinned else Action.UNPIN
    tenant = context.tenant_of(http.caller)
    event = Event(action, tenant, name, {"cids": list(cids)})
    async with audited(context.database, http, event), context.pins.lock:
        owners = list(_owners(context, http))
        if pinned:
            await _check(context, owners, cids)
        names = [owner for owner, _ in owners]
        is_operator = http.caller.is_operator
        for cid in cids:
            # A tenant ends its own pin; the same content may be pinned by another.
            if pinned or is_operator or not context.pins.is_held_by_others(names, cid):
                await context.backend.pin_adapter(cid, pinned)
        for owner, _ in owners:
            known = context.pins.cids.setdefault(owner, set())
            known.update(cids) if pinned else known.difference_update(cids)


async def _check(
    context: HostContext, owners: Sequence[tuple[str, Limits]], cids: Sequence[str]
) -> None:
    limited = [(owner, limits.pinned_pages) for owner, limits in owners]
    if all(limit is None for _, limit in limited):
        return
    uses = {use.cid: use for use in await context.backend.adapter_uses()}
    # The engine registers an adapter no later than with its pin, and may not know it yet.
    sizes = {cid: card.num_bytes for cid, card in context.backend.adapters.items()}
    sizes |= {cid: use.num_bytes for cid, use in uses.items()}
    page_bytes = context.backend.card.pool_bytes // max(1, context.backend.stats.num_pages)
    for owner, limit in limited:
        # A pin ends with its adapter, so that only what is pinned now counts.
        now = {
            cid for cid in context.pins.cids.get(owner, ()) if cid in uses and uses[cid].is_pinned
        }
        pages = {cid: -(-sizes[cid] // max(1, page_bytes)) for cid in {*now, *cids} & {*sizes}}
        num_used = sum(pages[cid] for cid in now)
        num_new = sum(pages.get(cid, 0) for cid in {*cids} - now)
        if limit is not None and num_new and num_used + num_new > limit:
            raise QuotaExceeded(
                f"{owner} may have {limit} {LIMITS[LIMIT]} on this server, and "
                f"{max(0, limit - num_used)} are left; this adapter needs {num_new}. Unpin another "
                "one, or have the limit raised.",
                limit=LIMIT,
            )


def _owners(context: HostContext, http: Call) -> Iterator[tuple[str, Limits]]:
    caller = http.caller
    tenant = context.tenant_of(caller)
    yield f"The tenant {tenant}", context.quotas.settings_of(tenant).limits
    if caller.key_id is not None:
        yield f"The API key {caller.key_id}", context.quotas.limits_of_key(caller.key_id)
