"""/v1/keys: the API keys of the registry, for platforms that make and end keys themselves."""

from __future__ import annotations

import time

import msgspec
from starlette.responses import Response

from loramux.base.threads import QUERIES
from loramux.errors import InvalidRequest
from loramux.registry.access import AccessRecords
from loramux.registry.audit import Action, Event
from loramux.registry.keys import KeyRecord, KeyRights, NewKey
from loramux.server.auth.audit import actor_of, recording_refusal
from loramux.server.context import HostContext
from loramux.server.errors import Forbidden
from loramux.server.http.body import json_response, read_json
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering, changing
from loramux.server.http.routes import Route, Routes
from loramux.types.caller import Caller
from loramux.wire.accounts import KeyEntry, KeyList, KeyRequest, NewKeyEntry, RotateRequest

_TENANT = {
    "name": "tenant",
    "in": "query",
    "required": False,
    "description": "Only keys of this tenant.",
    "schema": {"type": "string"},
}


def key_routes(context: HostContext) -> list[Route]:
    routes = Routes("accounts")

    @routes.get("/v1/keys", answering(KeyList, 400, 404, 503, parameters=[_TENANT]))
    async def list_keys(request: Call) -> Response:
        """List keys with their rights, without their secrets."""
        access = context.require_registry().registry.access
        tenant = _tenant(request.caller, request.query_params.get("tenant"))
        found = await QUERIES.run(lambda: access.keys(tenant=tenant))
        return json_response(KeyList(data=[_entry(context, key) for key in found]))

    @routes.post("/v1/keys", changing(KeyRequest, NewKeyEntry))
    async def create_key(request: Call) -> Response:
        """Make a key; the answer is the only one with its text."""
        return await _create(context, request)

    @routes.delete("/v1/keys/{key_id}", answering(KeyEntry, 403, 404, 503, path_name="key_id"))
    async def revoke_key(request: Call) -> Response:
        """Make a key invalid for ever."""
        access, key_id = _records(context, request), request.path_params["key_id"]
        event = Event(Action.KEY_REVOKE, request.caller.tenant, key_id)
        async with recording_refusal(context.database, request, event):
            tenant = _manager(request).confined_to
            await QUERIES.run(lambda: access.revoke_key(key_id, tenant=tenant))
        await _follow(context)
        found = context.require_registry().access.keys[key_id]
        return json_response(_entry(context, found))

    @routes.post("/v1/keys/{key_id}/rotate", changing(RotateRequest, NewKeyEntry, "key_id"))
    async def rotate_key(request: Call) -> Response:
        """Make a key with the same rights and limits, and end the old one."""
        access, key_id = _records(context, request), request.path_params["key_id"]
        body, _ = await read_json(request, RotateRequest, max_bytes=context.options.max_body_bytes)
        event = Event(Action.KEY_ROTATE, request.caller.tenant, key_id)
        async with recording_refusal(context.database, request, event):
            manager = _manager(request)
            new = await QUERIES.run(
                lambda: access.rotate_key(
                    key_id,
                    overlap_s=body.overlap_s,
                    tenant=manager.confined_to,
                    not_after=manager.ends_at,
                )
            )
        return await _new_key(context, new)

    return routes.found


async def _create(context: HostContext, request: Call) -> Response:
    access = _records(context, request)
    body, _ = await read_json(request, KeyRequest, max_bytes=context.options.max_body_bytes)
    event = Event(Action.KEY_CREATE, body.tenant or request.caller.tenant, "")
    async with recording_refusal(context.database, request, event):
        manager = _manager(request)
        rights = KeyRights(
            tenant=_tenant(manager, body.tenant),
            scopes=frozenset(body.scopes),
            adapters=None if body.adapters is None else tuple(body.adapters),
            may_use_base=body.may_use_base,
        )
        new = await QUERIES.run(
            lambda: access.create_key(
                rights,
                note=body.note,
                expires_in_s=body.expires_in_s,
                limits=body.limits,
                not_after=manager.ends_at,
            )
        )
    return await _new_key(context, new)


def _records(context: HostContext, request: Call) -> AccessRecords:
    return context.require_registry().registry.acting(actor_of(request)).access


def _manager(request: Call) -> Caller:
    """Return the caller, who may change keys; raises Forbidden."""
    caller = request.caller
    if caller.key_id is None:
        # From the first key on, requests need one: no caller may lock the others out.
        raise Forbidden(
            "This server needs no keys yet. Make the first one with loramux keys create, or start "
            "the server with --api-key."
        )
    if caller.adapters is not None or not caller.may_use_base:
        # Otherwise it could make a key that may do more than it may itself.
        raise Forbidden("A key that is limited to some adapters does not manage keys.")
    return caller


def _tenant(caller: Caller, asked: str | None) -> str | None:
    """Return the tenant whose keys are meant: the key of a tenant manages its own alone."""
    own = caller.confined_to
    if own is None:
        return asked
    if asked not in (None, own):
        raise InvalidRequest(f"This key manages the keys of {own} only.", param="tenant")
    return own


async def _new_key(context: HostContext, new: NewKey) -> Response:
    await _follow(context)
    entry = msgspec.structs.asdict(_entry(context, new.record))
    response = json_response(NewKeyEntry(**entry, key=new.text))
    response.headers["cache-control"] = "no-store"
    return response


async def _follow(context: HostContext) -> None:
    """Make this server know the change with the answer; others follow the registry."""
    await QUERIES.run(context.require_registry().follow_access)


def _entry(context: HostContext, key: KeyRecord) -> KeyEntry:
    rights = key.rights
    return KeyEntry(
        id=key.key_id,
        tenant=rights.tenant,
        scopes=sorted(rights.scopes),
        adapters=None if rights.adapters is None else list(rights.adapters),
        may_use_base=rights.may_use_base,
        note=key.note,
        state=key.state(time.time()),
        created_at=key.created_at,
        ends_at=key.ends_at,
        limits=context.quotas.limits_of_key(key.key_id),
    )
