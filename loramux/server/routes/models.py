"""GET /v1/models: the bases, each with its adapters."""

from __future__ import annotations

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loramux.backend import ModelCard
from loramux.errors import AdapterNotFound
from loramux.registry.records import Resolved
from loramux.server.body import json_response
from loramux.server.caller import Caller, caller_of
from loramux.server.context import HostContext
from loramux.server.errors import NotServed
from loramux.server.images.names import ImageNames
from loramux.server.names import GivenName
from loramux.server.openapi import answering
from loramux.server.view import View
from loramux.server.wire import ModelEntry, ModelList
from loramux.threads import QUERIES

# Limit of the registry's adapters in the list; requests may name the others too.
MAX_LISTED = 1000


def model_routes(context: HostContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", **answering(ModelList, 503))
    async def models(request: Request) -> Response:
        """Lists the names that a request may put into `model`."""
        return await answer_models(context, caller_of(request))

    @router.get(
        "/v1/models/{model_id:path}", **answering(ModelEntry, 400, 404, 503, path_name="model_id")
    )
    async def get_model(request: Request) -> Response:
        model_id, view = request.path_params["model_id"], context.view_of(caller_of(request))
        entry: ModelEntry | None = None
        for host in context.hosts:
            host.require_known()
            entry = entry or _entries(host, view).get(model_id)
        entry = entry or await _registry_entry(context, model_id, view)
        if entry is None:
            raise NotServed(f"The model `{model_id}` does not exist.", param="model")
        return json_response(entry)

    return router


async def answer_models(context: HostContext, caller: Caller) -> Response:
    return json_response(ModelList(data=await list_models(context, caller)))


async def list_models(context: HostContext, caller: Caller) -> list[ModelEntry]:
    """Returns the bases and all adapters that the caller may use, those of the registry last."""
    for host in context.hosts:
        host.require_known()
    view = context.view_of(caller)
    entries = _entries(context, view)
    for host in context.others:
        entries |= _entries(host, view)
    for entry in await _registry_entries(context, view):
        entries.setdefault(entry.id, entry)
    return list(entries.values())


async def _registry_entries(context: HostContext, view: View) -> list[ModelEntry]:
    if context.registry is None:
        return []
    found = await QUERIES.run(context.registry.list_current, view, limit=MAX_LISTED)
    served = {host.modality for host in context.hosts}
    found = [one for one in found if one.modality in served]
    return [_model_entry(context, f"{one.tenant}/{one.name}", one, view) for one in found]


async def _registry_entry(context: HostContext, model_id: str, view: View) -> ModelEntry | None:
    if context.registry is None:
        return None
    try:
        resolved = await context.registry.resolve(model_id, sticky_key="", view=view)
    except AdapterNotFound:
        return None
    if all(host.modality != resolved.modality for host in context.hosts):
        return None
    return _model_entry(context, model_id, resolved, view)


def _model_entry(context: HostContext, model_id: str, resolved: Resolved, view: View) -> ModelEntry:
    """Describes an adapter of the registry; its root is its CID until it was first requested."""
    hosts = [host for host in context.hosts if host.modality == resolved.modality]
    card = hosts[0].backend.adapters.get(resolved.cid) if hosts else None
    return ModelEntry(
        id=model_id,
        created=context.created_s,
        root=resolved.cid if card is None or view.is_confined else card.path,
        parent=hosts[0].base_names[0] if hosts else None,
        max_model_len=None,
        modality="image" if resolved.modality == "image" else UNSET,
    )


def _entries(context: HostContext, view: View) -> dict[str, ModelEntry]:
    """Returns the base and the given adapters by name, except for those that were refused.

    A name of the base always means the base. Paths of the server are not for tenants.
    """
    card, base_names = context.backend.card, context.base_names
    adapters = {
        given.name: _with_image_fields(
            context,
            ModelEntry(
                id=given.name,
                created=given.created_s,
                root=given.name if view.is_confined else given.path,
                parent=base_names[0],
                max_model_len=None,
            ),
            given,
        )
        for given in context.names.given()
        if given.state != "failed" and view.sees_given(given.name)
    }
    bases = {
        name: ModelEntry(
            id=name,
            created=context.created_s,
            root=name if view.is_confined else card.path,
            parent=None,
            max_model_len=card.max_model_len if isinstance(card, ModelCard) else None,
            modality="image" if context.modality == "image" else UNSET,
        )
        for name in base_names
    }
    adapters = {name: entry for name, entry in adapters.items() if name not in bases}
    return bases | adapters if view.caller.may_use_base else adapters


def _with_image_fields(context: HostContext, entry: ModelEntry, given: GivenName) -> ModelEntry:
    """Adds what only adapters of an image model have."""
    names = context.names
    if not isinstance(names, ImageNames):
        return entry
    card = names.adapters.get(given.name)
    entry.modality, entry.is_default = "image", given.name == names.default
    entry.weight = names.weight_of(given.name)
    if card is not None:
        entry.cid, entry.rank = card.card.cid, card.card.rank
        entry.trigger_words = list(card.card.trigger_words)
    return entry
