"""The registry over HTTP: push, promote, roll back, split, remove."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loramux.config.paths import FETCH_FOLDER
from loramux.registry.names import AdapterName, parse_adapter_name, parse_name_reference
from loramux.registry.records import AliasState
from loramux.registry.registry import Registry
from loramux.server.body import json_response, read_json
from loramux.server.context import Context
from loramux.server.local_sources import fetched_folder
from loramux.server.openapi import answering, changing
from loramux.server.registry_adapters import RegistryAdapters
from loramux.server.warming import warm_up
from loramux.server.wire import (
    AliasEntry,
    PromoteRequest,
    PushedEntry,
    PushRequest,
    Removed,
    RollbackRequest,
    SplitRequest,
    alias_entry,
)
from loramux.sources.parse import lasting_name
from loramux.store.library import Pushed

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
        revision = asked.if_revision
        if asked.warm:
            # What was warmed is what the alias moves to, or it does not move.
            warmed_at = await move.warm_previous(asked.alias)
            revision = warmed_at if revision is None else revision
        return await move.run(
            lambda registry, name: registry.rollback(name, alias=asked.alias, if_revision=revision)
        )


class _Move:
    """A change of one alias of the adapter that the path names."""

    def __init__(self, context: Context, request: Request) -> None:
        self._context = context
        self._registry: RegistryAdapters = context.require_registry()
        self._name = parse_adapter_name(request.path_params["name"], home_tenant=_home(context))

    async def warm(self, versions: list[str]) -> None:
        for version in versions:
            self._context.require_ready()
            resolved = await self._registry.resolve(f"{self._name}@{version}")
            await self._context.names.pull(resolved)
            await warm_up(self._context, resolved.cid)

    async def warm_previous(self, alias: str) -> int:
        """The revision that the alias is at now."""
        registry = self._registry.registry
        current, previous = await asyncio.to_thread(registry.previous, str(self._name), alias=alias)
        await self.warm([target.version for target in previous.targets])
        return current.revision

    async def run(self, change: Callable[[Registry, str], AliasState]) -> Response:
        state = await asyncio.to_thread(change, self._registry.registry, str(self._name))
        self._registry.forget([self._name])
        return json_response(alias_entry(state))


def _push(context: Context, registry: RegistryAdapters, asked: PushRequest) -> Pushed:
    options = context.options
    area = registry.library.store.root.parent / FETCH_FOLDER
    with fetched_folder(asked.source, options.allowed_roots, options.sources, area) as folder:
        source = lasting_name(asked.source, folder, options.sources)
        reference = _full_reference(context, asked.reference)
        return registry.library.push(folder, reference, source=source)


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
