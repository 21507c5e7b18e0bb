"""Routes that change the registry: push, promote, rollback, split and rechange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from msgspec import UNSET
from starlette.responses import Response

from loramux.adapters.recipe import CombinationOptions, check_options, check_weights
from loramux.adapters.signature import parse_signatures
from loramux.base.threads import FETCHES, QUERIES
from loramux.config.paths import FETCH_FOLDER
from loramux.errors import AdapterNotFound, InvalidRequest, SourceForbidden
from loramux.registry.audit import Action, Event
from loramux.registry.names import AdapterName, CidReference, parse_adapter_name
from loramux.registry.records import AliasState
from loramux.registry.registry import Registry
from loramux.server.auth.audit import actor_of, recording_refusal
from loramux.server.context import HostContext
from loramux.server.http.body import json_response, read_json
from loramux.server.http.call import Call
from loramux.server.http.openapi import answering, changing
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import named_event, stream_events
from loramux.server.live.lists import alias_entry
from loramux.server.live.warming import warm_up
from loramux.server.naming.combinations import open_version
from loramux.server.naming.names import full_name
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.sources import fetched_folder, local_folder
from loramux.server.naming.view import View, unknown_adapter
from loramux.sources.download import Progress
from loramux.sources.parse import is_remote, lasting_name
from loramux.sources.refusals import SourceCode
from loramux.store.library import AdapterLibrary, Pushed
from loramux.types.composition import compose
from loramux.wire.registry import (
    AliasEntry,
    PromoteRequest,
    PushedEntry,
    PushRequest,
    RecipeBody,
    Removed,
    RollbackRequest,
    SplitRequest,
)

EVENT_STREAM = "text/event-stream"
INTERVAL_S = 0.25
Report = Callable[[Progress], None]


def no_report(progress: Progress) -> None:
    """Ignores the progress."""


async def progress_events(
    push: Callable[[Report], Awaitable[PushedEntry]],
) -> AsyncGenerator[bytes, None]:
    """Yield `progress` events while the push runs, and then `done` with its result.

    A push goes on when the client has disconnected, as one without events does.
    """
    newest = Progress(0, None)
    shown: Progress | None = None

    def report(progress: Progress) -> None:
        nonlocal newest
        newest = progress

    task = asyncio.ensure_future(push(report))
    # Reading the exception keeps asyncio from reporting it if no reader is left.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    while not task.done():
        await asyncio.wait({task}, timeout=INTERVAL_S)
        if not task.done() and newest != shown:
            shown = newest
            sizes = {"received_bytes": shown.received_bytes, "total_bytes": shown.total_bytes}
            yield named_event("progress", sizes)
    yield named_event("done", task.result())


T = TypeVar("T")


def registry_routes(context: HostContext) -> list[Route]:
    routes = Routes("registry")

    @routes.post("/v1/adapters", changing(PushRequest, PushedEntry))
    async def push_adapter(request: Call) -> Response:
        """Copy an adapter into the store under a name and a version, or store a recipe.

        With `Accept: text/event-stream` the answer is its progress, and then the result.
        """
        registry = context.require_registry()
        body = await _read(context, request, PushRequest)
        library = registry.library.acting(actor_of(request))
        view = context.view_of(request.caller)
        event = Event(Action.PUSH, _tenant_in(body.reference, view), body.reference)

        async def push(progress: Report) -> PushedEntry:
            async with recording_refusal(context.database, request, event):
                pushed = await FETCHES.run(_push, context, library, body, view, progress)
            registry.forget([AdapterName(pushed.tenant, pushed.name)])
            return _pushed_entry(pushed)

        if EVENT_STREAM in request.headers.get("accept", ""):
            return await stream_events(request, progress_events(push))
        return json_response(await push(no_report))

    @routes.delete(
        "/v1/adapters/{name:path}", answering(Removed, 400, 404, 409, 503, path_name="name")
    )
    async def remove_adapter(request: Call) -> Response:
        """Remove a version (name@1.4.2), an alias (name@prod), or the adapter with all of them."""
        registry = context.require_registry()
        reference = request.path_params["name"]
        view = context.view_of(request.caller)
        event = Event(Action.DELETE, _tenant_in(reference, view), reference)
        async with recording_refusal(context.database, request, event):
            parsed = view.parse(reference)
            await QUERIES.run(registry.registry.acting(actor_of(request)).remove, str(parsed))
        registry.forget([parsed.adapter])
        return json_response(Removed(id=reference))

    _add_alias_routes(routes, context)
    return routes.found


def _add_alias_routes(routes: Routes, context: HostContext) -> None:
    @routes.post("/v1/adapters/{name:path}/promote", changing(PromoteRequest, AliasEntry, "name"))
    async def promote_adapter(request: Call) -> Response:
        """Move an alias to a version; running requests finish on the old one."""
        body = await _read(context, request, PromoteRequest)
        change = _AliasChange(context, request)
        await change.warm([body.version] if body.warm else [])
        return await change.run(
            lambda registry, name: registry.promote(
                name, body.version, alias=body.alias, if_revision=body.if_revision
            )
        )

    @routes.post("/v1/adapters/{name:path}/split", changing(SplitRequest, AliasEntry, "name"))
    async def split_adapter(request: Call) -> Response:
        """Split the requests of an alias among versions; a user always gets the same one."""
        body = await _read(context, request, SplitRequest)
        change = _AliasChange(context, request)
        await change.warm(list(body.weights) if body.warm else [])
        return await change.run(
            lambda registry, name: registry.split(
                name, body.weights, alias=body.alias, if_revision=body.if_revision
            )
        )

    @routes.post("/v1/adapters/{name:path}/rollback", changing(RollbackRequest, AliasEntry, "name"))
    async def rollback_adapter(request: Call) -> Response:
        """Move an alias back to its previous state."""
        body = await _read(context, request, RollbackRequest)
        change = _AliasChange(context, request)
        revision = body.if_revision
        if body.warm:
            # The alias moves only if its previous state is still what was warmed.
            warmed_at = await change.warm_previous(body.alias)
            revision = warmed_at if revision is None else revision
        return await change.run(
            lambda registry, name: registry.rollback(name, alias=body.alias, if_revision=revision)
        )


REVISION_HEADER = "x-loramux-revision"
"""Newest revision of the registry after a change."""


class _AliasChange:
    """A change of one alias of the adapter in the path."""

    def __init__(self, context: HostContext, request: Call) -> None:
        self._context = context
        self._registry: RegistryAdapters = context.require_registry()
        self._request = request
        view = context.view_of(request.caller)
        home = view.tenant if view.is_confined else context.receipts.home_tenant
        adapter = parse_adapter_name(request.path_params["name"], home_tenant=home)
        self._name = view.parse(str(adapter)).adapter

    async def warm(self, versions: list[str]) -> None:
        for version in versions:
            resolved = await self._registry.resolve(f"{self._name}@{version}")
            host = self._context.host_of(resolved.modality)
            host.require_ready()
            opened = await open_version(
                host.names, host.combinations, resolved, full_name(resolved)
            )
            await warm_up(host, compose((one.cid, one.weight) for one in opened))

    async def warm_previous(self, alias: str) -> int:
        """Warm the previous targets of the alias, and return its current revision."""
        registry = self._registry.registry
        current, previous = await QUERIES.run(registry.previous, str(self._name), alias=alias)
        await self.warm([target.version for target in previous.targets])
        return current.revision

    async def run(self, change: Callable[[Registry, str], AliasState]) -> Response:
        registry = self._context.require_registry().registry.acting(actor_of(self._request))
        state = await QUERIES.run(change, registry, str(self._name))
        self._registry.forget([self._name])
        response = json_response(alias_entry(state))
        # A routes waits until every replica reports it.
        response.headers[REVISION_HEADER] = str(await QUERIES.run(registry.revision))
        return response


def _push(
    context: HostContext, library: AdapterLibrary, body: PushRequest, view: View, progress: Report
) -> Pushed:
    reference = str(view.parse(body.reference))
    if isinstance(body.recipe, RecipeBody):
        _refuse_source(body)
        return _push_recipe(library, reference, body.recipe, view)
    if not isinstance(body.source, str):
        raise InvalidRequest("Give a source to push, or a recipe.", param="source")
    if view.is_confined and not is_remote(body.source):
        raise SourceForbidden(
            SourceCode.NOT_ALLOWED,
            "The key of a tenant may not name folders of the server.",
            fix="Push from the hub, a bucket or https.",
        )
    options = context.options
    area = library.store.root.parent / FETCH_FOLDER
    roots, sources = options.allowed_roots, options.sources
    with fetched_folder(body.source, roots, sources, area, progress=progress) as folder:
        source = body.source
        if is_remote(source):
            source = lasting_name(source, folder, sources)
        else:
            source = str(local_folder(source, roots))
        signatures = () if body.signature is UNSET else parse_signatures(body.signature)
        return library.push(
            folder,
            reference,
            source=source,
            signatures=signatures,
            modality=None if body.modality is UNSET else body.modality,
        )


def _tenant_in(reference: str, view: View) -> str:
    """Return the tenant in whose log an attempt belongs; the reference may be invalid."""
    is_named = "/" in reference and not view.is_confined
    return reference.partition("/")[0] if is_named else view.tenant


def _refuse_source(body: PushRequest) -> None:
    if body.source is not UNSET:
        raise InvalidRequest(
            "A recipe has no files, and so no source. Give one of them.", param="source"
        )


def _push_recipe(library: AdapterLibrary, reference: str, body: RecipeBody, view: View) -> Pushed:
    weights = [1.0] * len(body.adapters) if body.weights is None else body.weights
    check_weights(len(body.adapters), weights)
    options = check_options(
        CombinationOptions(
            method=body.combination,
            density=body.density,
            majority_sign_method=body.majority_sign_method,
            seed=body.seed,
            svd_rank=body.svd_rank,
        )
    )
    parts = [_part(library.registry, text, view) for text in body.adapters]
    terms = list(zip(parts, weights, strict=True))
    return library.push_recipe(terms, reference, options, any_base=body.any_base)


def _part(registry: Registry, text: str, view: View) -> str:
    """Return a part of a recipe with its tenant; raise AdapterNotFound for one not in view."""
    if view.is_whole:
        return text
    reference = registry.parse(text, home_tenant=view.tenant if view.is_confined else None)
    if isinstance(reference, CidReference):
        found = registry.find_cid(reference, view.tenant if view.is_confined else None)
        named = [f"{name}@{one.version}" for name, one in found]
        seen = [name for name in named if view.allows_name(name)]
        if not seen:
            raise AdapterNotFound(f"No version in the registry has the content id {reference}.")
        return text if view.caller.is_operator else seen[0]
    if not view.allows(reference):
        raise unknown_adapter(reference.adapter)
    return str(reference)


def _pushed_entry(pushed: Pushed) -> PushedEntry:
    return PushedEntry(
        id=f"{pushed.tenant}/{pushed.name}@{pushed.version}",
        version=pushed.version,
        cid=pushed.cid,
        bytes=pushed.size_bytes,
        is_new=pushed.is_new,
        recipe=UNSET if pushed.recipe is None else pushed.recipe.to_dict(),
        signed_by=pushed.signed_by or UNSET,
        modality="image" if pushed.modality == "image" else UNSET,
    )


async def _read(context: HostContext, request: Call, kind: type[T]) -> T:
    body, _ = await read_json(request, kind, max_bytes=context.options.max_body_bytes)
    return body
