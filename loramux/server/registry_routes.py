"""The registry over HTTP: push, promote, roll back, split, remove."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.adapters.library import Pushed
from loramux.backend import Job
from loramux.registry.names import AdapterName, parse_adapter_name, parse_name_reference
from loramux.registry.records import AliasState, Resolved
from loramux.registry.registry import Registry
from loramux.server.body import json_response, read_json
from loramux.server.context import Context
from loramux.server.local_sources import fetched_folder
from loramux.server.openapi import answering, changing
from loramux.server.registry_adapters import RegistryAdapters
from loramux.server.registry_bodies import (
    AliasEntry,
    PromoteRequest,
    PushedEntry,
    PushRequest,
    Removed,
    RollbackRequest,
    SplitRequest,
    alias_entry,
)
from loramux.types import SamplingParams

T = TypeVar("T")


def registry_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["registry"])

    @router.post("/v1/adapters", **changing(PushRequest, PushedEntry))
    async def push_adapter(request: Request) -> Response:
        """Copies an adapter into the store, and gives it a name and a version."""
        registry = context.require_registry()
        asked = await _read(context, request, PushRequest)
        pushed = await asyncio.to_thread(_push, context, registry, asked)
        registry.forget([AdapterName(pushed.tenant, pushed.name)])
        return json_response(_pushed_entry(pushed))

    @router.delete(
        "/v1/adapters/{name:path}", **answering(Removed, 400, 404, 409, 503, path_name="name")
    )
    async def remove_adapter(request: Request) -> Response:
        """A version (name@1.4.2), an alias (name@prod), or the adapter with all of both."""
        registry = context.require_registry()
        reference = request.path_params["name"]
        await asyncio.to_thread(registry.registry.remove, reference)
        registry.forget([parse_name_reference(reference, home_tenant=_home(context)).adapter])
        return json_response(Removed(id=reference))

    _add_moves(router, context)
    return router


def _add_moves(router: APIRouter, context: Context) -> None:
    @router.post("/v1/adapters/{name:path}/promote", **changing(PromoteRequest, AliasEntry, "name"))
    async def promote_adapter(request: Request) -> Response:
        """Moves an alias to a version; requests that have begun finish on theirs."""
        asked = await _read(context, request, PromoteRequest)
        move = _Move(context, request)
        await move.warm([asked.version] if asked.warm else [])
        return await move.run(
            lambda registry, name: registry.promote(
                name, asked.version, alias=asked.alias, if_revision=asked.if_revision
            )
        )

    @router.post("/v1/adapters/{name:path}/split", **changing(SplitRequest, AliasEntry, "name"))
    async def split_adapter(request: Request) -> Response:
        """Shares an alias between versions; the same user always gets the same one."""
        asked = await _read(context, request, SplitRequest)
        move = _Move(context, request)
        await move.warm(list(asked.weights) if asked.warm else [])
        return await move.run(
            lambda registry, name: registry.split(
                name, asked.weights, alias=asked.alias, if_revision=asked.if_revision
            )
        )

    @router.post(
        "/v1/adapters/{name:path}/rollback", **changing(RollbackRequest, AliasEntry, "name")
    )
    async def rollback_adapter(request: Request) -> Response:
        """Moves an alias back to what it named before."""
        asked = await _read(context, request, RollbackRequest)
        move = _Move(context, request)
        return await move.run(
            lambda registry, name: registry.rollback(
                name, alias=asked.alias, if_revision=asked.if_revision
            )
        )


class _Move:
    """A change of one alias of the adapter that the path names."""

    def __init__(self, context: Context, request: Request) -> None:
        self._context = context
        self._registry: RegistryAdapters = context.require_registry()
        self._name = parse_adapter_name(request.path_params["name"], home_tenant=_home(context))

    async def warm(self, versions: list[str]) -> None:
        for version in versions:
            resolved = await self._registry.resolve(f"{self._name}@{version}")
            await warm(self._context, self._registry, resolved)

    async def run(self, change: Callable[[Registry, str], AliasState]) -> Response:
        state = await asyncio.to_thread(change, self._registry.registry, str(self._name))
        self._registry.forget([self._name])
        return json_response(alias_entry(state))


async def warm(context: Context, registry: RegistryAdapters, resolved: Resolved) -> None:
    """Really generates a token with the adapter, which is on the device afterwards."""
    context.require_ready()
    await registry.make_known(context.backend, resolved)
    job = Job(
        request_id=f"warm-{uuid.uuid4().hex}",
        prompt_token_ids=(1,),
        params=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        adapter=resolved.cid,
        timeout_s=context.options.probe_timeout_s,
    )
    async for _ in context.backend.submit(job):
        pass


def _push(context: Context, registry: RegistryAdapters, asked: PushRequest) -> Pushed:
    with fetched_folder(asked.source, context.options.allowed_roots) as folder:
        return registry.library.push(folder, _full_reference(context, asked.reference))


def _full_reference(context: Context, reference: str) -> str:
    return str(parse_name_reference(reference, home_tenant=_home(context)))


def _pushed_entry(pushed: Pushed) -> PushedEntry:
    return PushedEntry(
        id=f"{pushed.tenant}/{pushed.name}@{pushed.version}",
        version=pushed.version,
        cid=pushed.cid,
        bytes=pushed.size_bytes,
        is_new=pushed.is_new,
    )


def _home(context: Context) -> str:
    return context.receipts.home_tenant


async def _read(context: Context, request: Request, kind: type[T]) -> T:
    asked, _ = await read_json(request, kind, max_bytes=context.options.max_body_bytes)
    return asked
