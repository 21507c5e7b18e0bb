"""LoRAX's POST /embed: the embedding of one text."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loramux.server.body import json_response
from loramux.server.checked_fields import read_fields, read_inner
from loramux.server.context import Context
from loramux.server.embeddings import Inputs, default_body, embeddings, encoded
from loramux.server.families.lorax_select import select_adapter
from loramux.server.families.lorax_wire import Source
from loramux.server.generation import RouteKind

KIND = RouteKind(id_prefix="embd", prompt_param="inputs", default_max_tokens=0, pools=True)


class EmbedParameters(Source, kw_only=True):
    truncate: int | None = None


class EmbedRequest(Struct, kw_only=True):
    inner: ClassVar = ("parameters", EmbedParameters)
    inputs: str
    parameters: dict[str, Any] | None = None


async def embed(context: Context, request: Request) -> Response:
    body = await read_fields(context, request, EmbedRequest, generates=False)
    parameters = read_inner(context, request, "parameters", body.parameters, EmbedParameters)
    name = parameters.adapter_id or ""
    selected = await select_adapter(context, request, parameters, name) if name else None
    inputs = Inputs(texts=[body.inputs], kind=KIND, selected=selected, adapter=name)
    fields = default_body(truncate_prompt_tokens=parameters.truncate)
    found = await embeddings(context, request, fields, inputs)
    return json_response({"embeddings": encoded(found.vectors[0], None)})
