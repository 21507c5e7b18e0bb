"""Warming and pinning of adapters."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence

from loramux.backend.host import AdapterHost
from loramux.errors import AdapterNotFound, LoramuxError, QuotaExceeded
from loramux.registry.audit import Action, Event
from loramux.registry.records import Resolved
from loramux.server.auth.audit import audited
from loramux.server.context import Context, HostContext
from loramux.server.generate.generation import submit
from loramux.server.http.call import Call
from loramux.server.images.context import ImageContext
from loramux.server.images.drawing import draw_smallest
from loramux.server.naming.combinations import Combinations, open_version
from loramux.server.naming.names import AdapterNames, full_name
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.types.limits import LIMITS, Limits
from loramux.types.request import Request, Selection
from loramux.types.sampling import SamplingParams

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


_log = logging.getLogger(__name__)


async def warm_up(context: HostContext, selection: Selection) -> None:
    """Generate a token or an image with the adapters, which are on the device afterwards."""
    context.require_ready()
    if isinstance(context, ImageContext):
        await draw_smallest(context, selection)
    elif isinstance(context, Context):
        await _generate_token(context, selection)


async def _generate_token(context: Context, selection: Selection) -> None:
    request = Request(
        request_id=f"warm-{uuid.uuid4().hex}",
        prompt_token_ids=(1,),
        params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        selection=selection,
        timeout_s=context.options.probe_timeout_s,
    )
    async for _ in submit(context.backend, context.names, request):
        pass


def find_prewarmed(registry: RegistryAdapters | None, names: Iterable[str]) -> list[Resolved]:
    """Resolve the names of --prewarm-adapters in the registry; raise AdapterNotFound.

    It queries the database.
    """
    found = []
    for name in names:
        if registry is None:
            raise AdapterNotFound(
                f"--prewarm-adapters names {name!r}, which is not among --lora-modules, and this "
                "server has no registry."
            )
        try:
            found += registry.find_all(name)
        except LoramuxError as error:
            raise AdapterNotFound(
                f"--prewarm-adapters names {name!r}, which is not among --lora-modules, and the "
                f"registry does not have it either: {error}"
            ) from error
    return found


async def prewarm(
    host: AdapterHost,
    names: AdapterNames,
    *,
    given: Iterable[str] = (),
    adapters: Iterable[Resolved] = (),
    combinations: Combinations | None = None,
) -> None:
    """Load given names and adapters of the registry one after another; failures are logged."""
    for name in given:
        try:
            found = await names.identify(name)
            if found is not None and found.cid is not None:
                await host.prewarm([found.cid])
        except (LoramuxError, OSError) as error:
            _log.warning("%s is not pre-warmed: %s", name, error)
    for resolved in adapters:
        try:
            opened = await open_version(names, combinations, resolved, full_name(resolved))
            await host.prewarm([one.cid for one in opened])
        except (LoramuxError, OSError) as error:
            _log.warning("%s is not pre-warmed: %s", full_name(resolved), error)
