"""LoRAX's POST /embed, the embedding of one text; feature extraction as TEI and Hugging Face's
clients have it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.families.lorax_wire import Source, select_adapter
from loramux.server.generate.checked_fields import read_fields, read_inner
from loramux.server.generate.embeddings import Inputs, default_body, embeddings, encoded
from loramux.server.generate.generation import RouteKind
from loramux.server.http.body import json_response, read_body
from loramux.server.http.call import Call
from loramux.types.pooling import Pooling
from loramux.wire.pooling import EncodingFormat

KIND = RouteKind(id_prefix="embd", prompt_param="inputs", default_max_tokens=0, pools=True)


class EmbedParameters(Source, kw_only=True):
    truncate: int | None = None


class EmbedRequest(Struct, kw_only=True):
    inner: ClassVar = ("parameters", EmbedParameters)
    inputs: str
    parameters: dict[str, Any] | None = None


class FeatureRequest(Struct, kw_only=True):
    inner: ClassVar = ("parameters", EmbedParameters)
    inputs: str | list[str]
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    parameters: dict[str, Any] | None = None


_OF_GENERATIONS = {"parameters", "stream", "model"}
"""Fields of which a client that generates always sends one."""
_ALL_THAT_FIT = -1


async def asks_for_features(context: Context, request: Call) -> bool:
    """Whether a body of `inputs` is for embeddings, which the model has."""
    context.require_known()
    model = context.backend.card.pooling
    if model.pooling in (None, Pooling.HEAD):
        return False
    if not model.generates:
        return True
    raw = await read_body(request, context.options.max_body_bytes)
    request.facts.body = raw
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys()
    except (ValueError, RecursionError):
        return False
    return not given & _OF_GENERATIONS


async def extract_features(context: Context, request: Call) -> Response:
    """Return a list of embeddings, also of a single text."""
    body = await read_fields(context, request, FeatureRequest, generates=False)
    parameters = read_inner(context, request, "parameters", body.parameters, EmbedParameters)
    name = parameters.adapter_id or ""
    inputs = Inputs(
        texts=[body.inputs] if isinstance(body.inputs, str) else body.inputs,
        dimensions=body.dimensions,
        kind=KIND,
        selected=await select_adapter(context, request, parameters, name) if name else None,
        adapter=name,
        normalizes=body.normalize,
    )
    if not inputs.texts:
        raise InvalidRequest("inputs is an empty list: give at least one text.", param="inputs")
    fields = default_body(
        truncate_prompt_tokens=_ALL_THAT_FIT if body.truncate else parameters.truncate,
        truncation_side=(body.truncation_direction or "right").lower(),
    )
    found = await embeddings(context, request, fields, inputs)
    return json_response([encoded(vector, body.encoding_format) for vector in found.vectors])


async def embed(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, EmbedRequest, generates=False)
    parameters = read_inner(context, request, "parameters", body.parameters, EmbedParameters)
    name = parameters.adapter_id or ""
    selected = await select_adapter(context, request, parameters, name) if name else None
    inputs = Inputs(texts=[body.inputs], kind=KIND, selected=selected, adapter=name)
    fields = default_body(truncate_prompt_tokens=parameters.truncate)
    found = await embeddings(context, request, fields, inputs)
    return json_response({"embeddings": encoded(found.vectors[0], None)})
