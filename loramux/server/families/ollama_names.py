"""Names of models as Ollama has them."""

from __future__ import annotations

from loramux.errors import AdapterNotFound
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.generate.near_names import hint_for
from loramux.server.generate.requests import note_no_model
from loramux.server.generate.selection import ModelReference, select
from loramux.server.http.call import Call
from loramux.server.naming.names import Selected

LATEST = ":latest"


async def select_tagged(context: Context, request: Call, name: str) -> Selected:
    """Find a model whose name may have the tag `latest`."""
    context.require_ready()
    for candidate in dict.fromkeys((name, name.removesuffix(LATEST))):
        try:
            reference = ModelReference(candidate)
            found = await select(context, reference, caller=request.caller)
        except (NotServed, AdapterNotFound):
            continue
        if reference.names_nothing and not found.adapters:
            note_no_model(context, request, "model")
        return found
    view = context.view_of(request.caller)
    hint = await hint_for(context, view, name.removesuffix(LATEST))
    raise NotServed(f"model '{name}' not found{'.' if hint else ''}{hint}", param="model")
