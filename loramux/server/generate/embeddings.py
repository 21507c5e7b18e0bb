"""Vectors of inputs, for the routes of every API that asks for embeddings or scores."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from loramux.backend.text import ModelCard
from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.asked import Asked, Prompt, generation_body
from loramux.server.generate.generation import Generation, RouteKind, collect, run
from loramux.server.generate.prompts import split_prompts
from loramux.server.generate.receipt_draft import receipt_draft
from loramux.server.generate.requests import open_asked
from loramux.server.generate.sampling import Truncation, check_kept
from loramux.server.generate.selection import ModelReference
from loramux.server.http.call import Call
from loramux.server.http.streaming import until_gone
from loramux.server.naming.names import Selected
from loramux.types.pooling import Pooling, check_dimensions
from loramux.types.vectors import Vector, embedding_of, scores_of, vector_of
from loramux.wire.pooling import EmbeddingInput, EncodingFormat, PoolingBody
from loramux.wire.text import Usage

EMBEDDING = RouteKind(id_prefix="embd", prompt_param="input", default_max_tokens=0, pools=True)
_COPIED = (
    *("model", "adapters", "adapter_weights", "combination", "density", "majority_sign_method"),
    *("combination_seed", "svd_rank", "timeout", "cache_salt", "user"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What vectors are asked of, and how long they are."""

    texts: Sequence[Prompt]
    dimensions: int | None = None
    kind: RouteKind = EMBEDDING
    selected: ModelReference | Selected | None = None
    """None: what the body names."""
    normalizes: bool | None = None
    """Whether embeddings get the length 1; None: as the model is configured."""
    is_raw: bool = False
    """The outputs of a classification head are not turned into probabilities."""
    adapter: str = ""
    """The adapter as a body of another API names it, for receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """The vectors of a request: embeddings, or scores of a classifier."""

    vectors: list[Vector]
    usage: Usage
    generation: Generation


def split_input(given: EmbeddingInput) -> list[str | list[int]]:
    """Convert the four forms of an input to a list of texts or of token ids."""
    return split_prompts(given, param="input")


async def embeddings(context: Context, http: Call, body: PoolingBody, inputs: Inputs) -> Pooled:
    """Compute embeddings; raise InvalidRequest if the model has none."""
    context.require_known()
    card = context.backend.card
    pooling = embedding_kind(card)
    check_dimensions(inputs.dimensions, card.pooling, hidden_size(card))
    found = await _pool(context, http, body, inputs, pooling)
    model = card.pooling
    if inputs.normalizes is not None:
        model = replace(model, normalize=inputs.normalizes)
    found_vectors = [embedding_of(vector, model, inputs.dimensions) for vector in found.pooled]
    return Pooled(vectors=found_vectors, usage=found.usage, generation=found.generation)


async def scores(context: Context, http: Call, body: PoolingBody, inputs: Inputs) -> Pooled:
    """Compute the scores of a sequence classifier."""
    context.require_known()
    model = context.backend.card.pooling
    if model.pooling is not Pooling.HEAD:
        raise InvalidRequest(
            "The model is not a sequence classifier: start the server with one, such as a "
            "checkpoint whose architecture ends with ForSequenceClassification.",
            param="model",
        )
    found = await _pool(context, http, body, inputs, Pooling.HEAD)
    to_vector = vector_of if inputs.is_raw else partial(scores_of, model=model)
    vectors = [to_vector(vector) for vector in found.pooled]
    return Pooled(vectors=vectors, usage=found.usage, generation=found.generation)


def embedding_kind(card: ModelCard) -> Pooling:
    """Return how the model pools; raise InvalidRequest if it has no embeddings."""
    model = card.pooling
    if model.pooling is Pooling.HEAD:
        raise InvalidRequest(
            "This is not an embedding model but a sequence classifier: post to /classify or "
            "/score, or start the server with an embedding model.",
            param="model",
        )
    if model.pooling is None:
        raise InvalidRequest(model.refusal or "This is not an embedding model.", param="model")
    return model.pooling


def hidden_size(card: ModelCard) -> int:
    assert card.shapes is not None, "the engine has started"
    return card.shapes.hidden_size


def encoded(vector: Vector, form: EncodingFormat | None) -> list[float] | str:
    """Return a vector as JSON numbers, or as base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def cosine(one: Vector, other: Vector) -> float:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    pooled: list[bytes]
    usage: Usage
    generation: Generation


async def _pool(
    context: Context, http: Call, body: PoolingBody, inputs: Inputs, pooling: Pooling
) -> _Run:
    fields = {name: getattr(body, name) for name in _COPIED}
    check_kept(body.truncate_prompt_tokens)
    asked = Asked(
        kind=inputs.kind,
        body=generation_body(**fields, max_tokens=0, seed=0),
        prompts=inputs.texts,
        pooling=pooling,
        selected=inputs.selected,
        name=inputs.adapter,
        truncation=Truncation(body.truncate_prompt_tokens, body.truncation_side == "right"),
        add_special_tokens=body.add_special_tokens is not False,
    )
    with receipt_draft(context.receipts, context.base_identity, http) as draft:
        generation = await open_asked(context, http, draft, asked)
    choices, usage = await until_gone(http, collect(generation, run(context, generation)))
    return _Run([choice.pooled for choice in choices], usage, generation)


def default_body(**fields: object) -> PoolingBody:
    """Return a body of another API in the words of the own one."""
    return msgspec.convert(fields, PoolingBody)
