"""Routes that change the registry: push, promote, rollback, split and rechange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loramux.adapters.recipe import CombinationOptions, check_options, check_weights
from loramux.config.paths import FETCH_FOLDER
from loramux.errors import InvalidRequest
from loramux.registry.names import AdapterName, parse_adapter_name, parse_name_reference
from loramux.registry.records import AliasState
from loramux.registry.registry import Registry
from loramux.server.body import json_response, read_json
from loramux.server.context import Context
from loramux.server.local_sources import fetched_folder, local_folder
from loramux.server.names import full_name
from loramux.server.openapi import answering, changing
from loramux.server.recipes import open_version
from loramux.server.registry_adapters import RegistryAdapters
from loramux.server.warming import warm_up
from loramux.server.wire_registry import (
    AliasEntry,
    PromoteRequest,
    PushedEntry,
    PushRequest,
    RecipeBody,
    Removed,
    RollbackRequest,
    SplitRequest,
    alias_entry,
)
from loramux.sources.parse import is_remote, lasting_name
from loramux.store.library import Pushed
from loramux.threads import FETCHES, QUERIES
from loramux.types.composition import compose

T = TypeVar("T")


def registry_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["registry"])

    @router.post("/v1/adapters", **changing(PushRequest, PushedEntry))
    async def push_adapter(request: Request) -> Response:
        """Copies an adapter into the store under a name and a version, or stores a recipe."""
        registry = context.require_registry()
        body = await _read(context, request, PushRequest)
        pushed = await FETCHES.run(_push, context, registry, body)
        registry.forget([AdapterName(pushed.tenant, pushed.name)])
        return json_response(_pushed_entry(pushed))

    @router.delete(
        "/v1/adapters/{name:path}", **answering(Removed, 400, 404, 409, 503, path_name="name")
    )
    async def remove_adapter(request: Request) -> Response:
        """Removes a version (name@1.4.2), an alias (name@prod), or the adapter with all of them."""
        registry = context.require_registry()
        reference = request.path_params["name"]
        await QUERIES.run(registry.registry.remove, reference)
        registry.forget([parse_name_reference(reference, home_tenant=_home(context)).adapter])
        return json_response(Removed(id=reference))

    _add_alias_routes(router, context)
    return router


def _add_alias_routes(router: APIRouter, context: Context) -> None:
    @router.post("/v1/adapters/{name:path}/promote", **changing(PromoteRequest, AliasEntry, "name"))
    async def promote_adapter(request: Request) -> Response:
        """Moves an alias to a version; running requests finish on the old one."""
        body = await _read(context, request, PromoteRequest)
        change = _AliasChange(context, request)
        await change.warm([body.version] if body.warm else [])
        return await change.run(
            lambda registry, name: registry.promote(
                name, body.version, alias=body.alias, if_revision=body.if_revision
            )
        )

    @router.post("/v1/adapters/{name:path}/split", **changing(SplitRequest, AliasEntry, "name"))
    async def split_adapter(request: Request) -> Response:
        """Splits the requests of an alias among versions; a user always gets the same one."""
        body = await _read(context, request, SplitRequest)
        change = _AliasChange(context, request)
        await change.warm(list(body.weights) if body.warm else [])
        return await change.run(
            lambda registry, name: registry.split(
                name, body.weights, alias=body.alias, if_revision=body.if_revision
            )
        )

    @router.post(
        "/v1/adapters/{name:path}/rollback", **changing(RollbackRequest, AliasEntry, "name")
    )
    async def rollback_adapter(request: Request) -> Response:
        """Moves an alias back to its previous state."""
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


class _AliasChange:
    """A change of one alias of the adapter in the path."""

    def __init__(self, context: Context, request: Request) -> None:
        self._context = context
        self._registry: RegistryAdapters = context.require_registry()
        self._name = parse_adapter_name(request.path_params["name"], home_tenant=_home(context))

    async def warm(self, versions: list[str]) -> None:
        for version in versions:
            self._context.require_ready()
            resolved = await self._registry.resolve(f"{self._name}@{version}")
            names, combinations = self._context.names, self._context.combinations
            opened = await open_version(names, combinations, resolved, full_name(resolved))
            await warm_up(self._context, compose((one.cid, one.weight) for one in opened))

    async def warm_previous(self, alias: str) -> int:
        """Warm the previous targets of the alias, and return its current revision."""
        registry = self._registry.registry
        current, previous = await QUERIES.run(registry.previous, str(self._name), alias=alias)
        await self.warm([target.version for target in previous.targets])
        return current.revision

    async def run(self, change: Callable[[Registry, str], AliasState]) -> Response:
        state = await QUERIES.run(change, self._registry.registry, str(self._name))
        self._registry.forget([self._name])
        return json_response(alias_entry(state))


def _push(context: Context, registry: RegistryAdapters, body: PushRequest) -> Pushed:
    reference = _full_reference(context, body.reference)
    if isinstance(body.recipe, RecipeBody):
        _refuse_source(body)
        return _push_recipe(registry, reference, body.recipe)
    if not isinstance(body.source, str):
        raise InvalidRequest("Give a source to push, or a recipe.", param="source")
    options = context.options
    area = registry.library.store.root.parent / FETCH_FOLDER
    with fetched_folder(body.source, options.allowed_roots, options.sources, area) as folder:
        source = body.source
        if is_remote(source):
            source = lasting_name(source, folder, options.sources)
        else:
            source = str(local_folder(source, options.allowed_roots))
        return registry.library.push(folder, reference, source=source)


def _refuse_source(body: PushRequest) -> None:
    if body.source is not UNSET:
        raise InvalidRequest(
            "A recipe has no files, and so no source. Give one of them.", param="source"
        )


def _push_recipe(registry: RegistryAdapters, reference: str, body: RecipeBody) -> Pushed:
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
    terms = list(zip(body.adapters, weights, strict=True))
    return registry.library.push_recipe(terms, reference, options, any_base=body.any_base)


def _full_reference(context: Context, reference: str) -> str:
    return str(parse_name_reference(reference, home_tenant=_home(context)))


def _pushed_entry(pushed: Pushed) -> PushedEntry:
    return PushedEntry(
        id=f"{pushed.tenant}/{pushed.name}@{pushed.version}",
        version=pushed.version,
        cid=pushed.cid,
        bytes=pushed.size_bytes,
        is_new=pushed.is_new,
        recipe=UNSET if pushed.recipe is None else pushed.recipe.to_dict(),
    )


def _home(context: Context) -> str:
    return context.receipts.home_tenant


async def _read(context: Context, request: Request, kind: type[T]) -> T:
    body, _ = await read_json(request, kind, max_bytes=context.options.max_body_bytes)
    return body
