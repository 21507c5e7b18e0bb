"""Finds an adapter by LoRAX's `adapter_id` and `adapter_source`."""

from __future__ import annotations

from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.families.lorax_wire import Source
from loramux.server.generate.near_names import hint_for
from loramux.server.generate.selection import ModelReference, select
from loramux.server.http.call import Call
from loramux.server.naming.names import Selected
from loramux.sources.config import Secret


async def select_adapter(
    context: Context, request: Call, parameters: Source, name: str
) -> ModelReference | Selected:
    """Find an adapter as LoRAX names it.

    A name that the operator gave means that adapter whatever the source says; a name of the
    registry only if the request gives no source, so that neither can stand for the other.
    """
    context.require_ready()
    caller = request.caller
    view = context.view_of(caller)
    source, sources = parameters.adapter_source, context.sources
    is_found = source is not None and sources is not None and sources.has_named(name)
    is_given = view.sees_given(name) and context.names.find(name) is not None
    if name in context.base_names or (is_given and not is_found):
        return ModelReference(name, param="adapter_id")
    if source is None:
        reference = ModelReference(name, param="adapter_id")
        try:
            return await select(context, reference, caller=caller)
        except NotServed:
            source = context.options.adapter_source
    if source is None or sources is None or not view.may_fetch(source):
        hint = await hint_for(context, view, name)
        raise NotServed(
            f"The adapter `{name}` does not exist here.{hint} Send adapter_source (hub, local or "
            f"s3), or start the server with --adapter-source.{context.missed_registry}",
            param="adapter_id",
        )
    token = Secret(parameters.api_token) if parameters.api_token else None
    return await sources.find(name, source, token=token, tenant=caller.tenant)
