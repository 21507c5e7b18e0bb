"""Entries of the audit log for changes that requests make, and for those that are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from loramux.registry.audit import Actor, Event
from loramux.registry.registry import Registry
from loramux.server.auth.caller import known_caller
from loramux.server.context import HostContext
from loramux.threads import QUERIES


def actor_of(http: Request) -> Actor:
    """Returns tenant, key and address of a request's caller."""
    caller = known_caller(http)
    address = "" if http.client is None else http.client.host
    return Actor(caller.tenant, caller.key_id or "", address)


def registry_of(context: HostContext, http: Request) -> Registry:
    """Returns the registry, whose changes are recorded as those of the request's caller."""
    return context.require_registry().registry.acting(actor_of(http))


@asynccontextmanager
async def recording_refusal(
    context: HostContext, http: Request, event: Event
) -> AsyncIterator[None]:
    """Records why a change was refused, unless the registry has recorded it."""
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as error:
        if context.registry is not None:
            audit = context.registry.registry.audit
            await QUERIES.run(audit.record_refusal, actor_of(http), event, error)
        raise


@asynccontextmanager
async def audited(context: HostContext, http: Request, event: Event) -> AsyncIterator[None]:
    """Records a change that is not one of the registry, or why it was refused."""
    async with recording_refusal(context, http, event):
        yield
    if context.registry is not None:
        await QUERIES.run(context.registry.registry.audit.record, actor_of(http), event)
