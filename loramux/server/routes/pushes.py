"""Pushes: adapters that a trainer sends from memory, which answer the next request."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from loramux.errors import InvalidRequest, RegistryConflict, RequestTimeout
from loramux.registry.audit import Action, Event
from loramux.server.auth.audit import audited
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering
from loramux.server.http.routes import Route, Routes
from loramux.server.live.in_use import folders_in_use, forget_unloaded
from loramux.server.routes.push_intake import Limits, received
from loramux.server.routes.runtime_lora import VllmError, check_name, load_folder
from loramux.wire.pushes import AdapterVersion, Pushed

DEFAULT_WAIT_S, MAX_WAIT_S = 30, 600
_POLL_S = 0.02


def push_routes(context: HostContext) -> list[Route]:
    routes = Routes("adapters")
    if not context.options.allow_runtime_lora_updating:
        return routes.found

    @routes.post(
        "/v1/adapters/{name:path}:push",
        answering(Pushed, 400, 404, 409, 413, 415, 422, 503, 507, path_name="name"),
    )
    async def push(request: Call) -> Response:
        """Take a version of an adapter from the body, or from shared memory.

        The body is safetensors with adapter_config.json in the header `x-loramux-config`; a form
        with the parts `config` and `weights`; or JSON with `shm`, a folder in /dev/shm. The next
        request is answered by it, and the version before stays if anything is wrong.
        """
        name = request.path_params["name"]
        asked = _version_asked(request)
        event = Event(Action.LOAD, context.tenant_of(request.caller), name, {"source": "push"})
        async with audited(context.database, request, event):
            pushed = await _push(context, request, name, asked)
            event.details["cid"] = pushed.cid
        return json_response(pushed)

    @routes.get(
        "/v1/adapters/{name:path}/version",
        answering(AdapterVersion, 400, 404, 408, 503, path_name="name"),
    )
    async def version(request: Call) -> Response:
        """Return content id and version of a name; with `min_version` it waits for that one."""
        name, least = request.path_params["name"], _number(request, "min_version")
        wait_s = _number(request, "timeout_s")
        deadline = time.monotonic() + min(DEFAULT_WAIT_S if wait_s is None else wait_s, MAX_WAIT_S)
        while True:
            found = await _version(context, request, name)
            if found is not None and found.version >= (least or 0):
                return json_response(found)
            if least is None:
                raise NotServed(f"The adapter `{name}` does not exist.", param="name")
            if time.monotonic() > deadline or await request.is_disconnected():
                raise RequestTimeout(f"{name} has no version {least} yet.")
            await asyncio.sleep(_POLL_S)

    return routes.found


async def _push(context: HostContext, http: Call, name: str, asked: int | None) -> Pushed:
    began, folders = time.perf_counter(), context.pushes
    limits = Limits(
        file_bytes=context.options.sources.limits.max_file_bytes,
        body_bytes=context.options.max_body_bytes,
    )
    async with received(http, folders, limits) as staged:
        received_s = time.perf_counter() - began
        async with context.name_locks.held(name):
            version = _next_version(folders.last_version(name), asked, name)
            folder = folders.place(staged, name)
            try:
                await check_name(context, name)
                card = await load_folder(context, name, str(folder), is_real=False)
            except VllmError as error:
                folders.discard(folder)
                raise InvalidRequest(error.info.message, param="name") from error
            except BaseException:
                folders.discard(folder)
                raise
            used = folders_in_use(context)
            folders.bound(name, folder, version=version, cid=card.cid, used=used)
            forget_unloaded(context)
    return Pushed(
        name=name,
        version=version,
        cid=card.cid,
        bytes=card.num_bytes,
        rank=card.rank,
        warnings=list(card.warnings),
        received_s=round(received_s, 6),
        seconds=round(time.perf_counter() - began, 6),
    )


async def _version(context: HostContext, http: Call, name: str) -> AdapterVersion | None:
    host = context.host_with(name)
    if not context.view_of(http.caller).sees_given(name) or host.names.find(name) is None:
        return None
    given = await host.names.identify(name)
    if given is None or given.cid is None:
        return None
    version = context.pushes.version_of(name, given.cid)
    return AdapterVersion(name=name, version=version, cid=given.cid)


def _next_version(last: int, asked: int | None, name: str) -> int:
    if asked is not None and asked <= last:
        raise RegistryConflict(
            f"{name} is at version {last} already, and a push of version {asked} came later."
        )
    return last + 1 if asked is None else asked


def _version_asked(http: Call) -> int | None:
    return _number(http, "version")


def _number(http: Call, name: str) -> int | None:
    text = http.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):  # noqa: PLR2004  (exact in JSON)
        raise InvalidRequest(f"{name} must be a whole number.", param=name)
    return int(text)
