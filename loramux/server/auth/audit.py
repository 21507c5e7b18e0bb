"""Entries of the audit log for changes that requests make, and for those that are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect

from loramux.base.threads import QUERIES
from loramux.registry.audit import Actor, Event
from loramux.registry.registry import Registry
from loramux.server.http.call import Call


def actor_of(http: Call) -> Actor:
    """Return tenant, key and address of a request's caller."""
    caller = http.known_caller
    address = "" if http.client is None else http.client.host
    return Actor(caller.tenant, caller.key_id or "", address)


@asynccontextmanager
async def recording_refusal(
    registry: Registry | None, http: Call, event: Event
) -> AsyncIterator[None]:
    """Record why a change was refused, unless the registry has recorded it."""
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as error:
        if registry is not None:
            await QUERIES.run(registry.audit.record_refusal, actor_of(http), event, error)
        raise


@asynccontextmanager
async def audited(registry: Registry | None, http: Call, event: Event) -> AsyncIterator[None]:
    """Record a change that is not one of the registry, or why it was refused."""
    async with recording_refusal(registry, http, event):
        yield
    if registry is not None:
        await QUERIES.run(registry.audit.record, actor_of(http), event)
