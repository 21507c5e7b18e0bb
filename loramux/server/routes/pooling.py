"""POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.asked import TextPair
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.embeddings import (
    Inputs,
    Pooled,
    cosine,
    embeddings,
    encoded,
    scores,
    split_input,
)
from loramux.server.generate.generation import RouteKind
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import pooling
from loramux.server.http.routes import Route, Routes
from loramux.types.pooling import Pooling
from loramux.wire.pooling import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    EmbeddingData,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    PoolingBody,
    PoolingData,
    PoolingList,
    PoolingRequest,
    RankedDocument,
    RankedText,
    RerankAnswer,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
)


def embedding_routes(context: Context) -> list[Route]:
    routes = Routes("Embeddings")

    @routes.post("/v1/embeddings", pooling(EmbeddingRequest, EmbeddingList))
    async def create_embeddings(request: Call) -> Response:
        """Return the embedding of each input, by the base or by adapters."""
        return await answer_embeddings(context, request)

    @routes.post("/pooling", pooling(PoolingRequest, PoolingList))
    async def create_pooling(request: Call) -> Response:
        """Return the embedding of each input, or the scores of a sequence classifier."""
        body = await read_fields(context, request, PoolingRequest, generates=False)
        inputs = Inputs(texts=split_input(body.input), dimensions=body.dimensions)
        context.require_known()
        is_classifier = context.backend.card.pooling.pooling is Pooling.HEAD
        found = await (scores if is_classifier else embeddings)(context, request, body, inputs)
        data = [
            PoolingData(index=index, data=encoded(vector, body.encoding_format))
            for index, vector in enumerate(found.vectors)
        ]
        return json_response(PoolingList(data=data, **reply_fields(found)))

    return routes.found


async def answer_embeddings(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, EmbeddingRequest, generates=False)
    inputs = Inputs(texts=split_input(body.input), dimensions=body.dimensions)
    found = await embeddings(context, request, body, inputs)
    data = [
        EmbeddingData(index=index, embedding=encoded(vector, body.encoding_format))
        for index, vector in enumerate(found.vectors)
    ]
    return json_response(EmbeddingList(data=data, **reply_fields(found)))


def reply_fields(found: Pooled) -> dict[str, Any]:
    """Return the fields that all replies of these routes have."""
    generation, num_tokens = found.generation, found.usage.prompt_tokens
    return {
        "id": generation.request.id,
        "created": generation.created_s,
        "model": generation.request.selected.model,
        "usage": EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        "serving": generation.draft.receipt or UNSET,
    }


@dataclass(frozen=True, slots=True)
class Pairs:
    """The two texts of each score; one first text goes with every second one."""

    first: Sequence[str]
    second: Sequence[str]
    params: tuple[str, str]
    """The fields of the body that hold them."""

    def check(self) -> None:
        for texts, param in zip((self.first, self.second), self.params, strict=True):
            if not texts or not all(texts):
                raise InvalidRequest(f"{param} needs at least one text, none empty.", param=param)
        if len(self.first) not in (1, len(self.second)):
            raise InvalidRequest(
                f"{self.params[0]} has {len(self.first)} texts, and {self.params[1]} "
                f"{len(self.second)}: give one, or as many.",
                param=self.params[0],
            )

    def joined(self) -> list[TextPair]:
        count = len(self.second)
        first = list(self.first) * count if len(self.first) == 1 else self.first
        return [TextPair(one, other) for one, other in zip(first, self.second, strict=True)]


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of each pair."""

    values: list[float]
    pooled: Pooled


async def score_pairs(
    context: Context,
    http: Call,
    body: PoolingBody,
    pairs: Pairs,
    kind: RouteKind,
    *,
    is_raw: bool = False,
) -> Scored:
    """Scores pairs of texts; raises InvalidRequest if the model cannot.

    `is_raw`: the output of a classification head itself, without its activation.
    """
    pairs.check()
    context.require_known()
    model = context.backend.card.pooling
    if model.pooling is not Pooling.HEAD:
        if is_raw:
            raise InvalidRequest(
                "use_activation is for sequence classifiers: leave it out.", param="use_activation"
            )
        return await _by_embeddings(context, http, body, pairs, kind)
    if len(model.labels) != 1:
        raise InvalidRequest(
            f"The model has {len(model.labels)} labels, and a score needs a classifier with one: "
            "post to /classify.",
            param="model",
        )
    inputs = Inputs(texts=pairs.joined(), kind=kind, is_raw=is_raw)
    found = await scores(context, http, body, inputs)
    return Scored([float(vector[0]) for vector in found.vectors], found)


async def _by_embeddings(
    context: Context, http: Call, body: PoolingBody, pairs: Pairs, kind: RouteKind
) -> Scored:
    """Compute the embedding of each text once."""
    inputs = Inputs(texts=[*pairs.first, *pairs.second], kind=kind)
    found = await embeddings(context, http, body, inputs)
    first, second = (
        found.vectors[: len(pairs.first)],
        found.vectors[len(pairs.first) :],
    )
    if len(first) == 1:
        first = first * len(second)
    values = [cosine(one, other) for one, other in zip(first, second, strict=True)]
    return Scored(values, replace(found, vectors=[]))


CLASSIFY = RouteKind(id_prefix="classify", prompt_param="input", default_max_tokens=0, pools=True)
SCORE = RouteKind(id_prefix="score", prompt_param="text_2", default_max_tokens=0, pools=True)
RERANK = RouteKind(id_prefix="rerank", prompt_param="documents", default_max_tokens=0, pools=True)


def score_routes(context: Context) -> list[Route]:
    routes = Routes("Embeddings")

    async def score(request: Call) -> Response:
        """Return how well each text_2 fits its text_1."""
        return await answer_score(context, request)

    async def rerank(request: Call) -> Response:
        """Return the documents in the order of their scores."""
        return await answer_rerank(context, request)

    for path in ("/score", "/v1/score"):
        routes.add(
            path,
            score,
            "POST",
            operation=pooling(ScoreRequest, ScoreList),
            name=_name("score", path),
        )
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        name = _name("rerank", path)
        routes.add(path, rerank, "POST", operation=pooling(RerankRequest, RerankAnswer), name=name)

    @routes.post("/classify", pooling(ClassifyRequest, ClassificationList))
    async def classify(request: Call) -> Response:
        """Return the label of each input, and the probability of every label."""
        return await answer_classify(context, request)

    return routes.found


def _name(what: str, path: str) -> str:
    """Return the operation's name, which the document needs once each."""
    version = path.strip("/").partition("/")[0]
    return what if version == what else f"{what}_{version}"


async def answer_score(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, ScoreRequest, generates=False)
    scored = await score_pairs(
        context, request, body, _pairs_of(body), SCORE, is_raw=body.use_activation is False
    )
    data = [ScoreData(index=index, score=value) for index, value in enumerate(scored.values)]
    return json_response(ScoreList(data=data, **reply_fields(scored.pooled)))


async def answer_rerank(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, RerankRequest, generates=False)
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest(f"top_n must be 0 or more, got {body.top_n}.", param="top_n")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = Pairs([body.query], texts, ("query", "documents"))
    scored = await score_pairs(context, request, body, pairs, RERANK)
    return json_response(_ranked(body, texts, scored))


async def answer_classify(context: Context, request: Call) -> Response:
    body = await read_fields(context, request, ClassifyRequest, generates=False)
    inputs = Inputs(
        texts=split_input(body.input), kind=CLASSIFY, is_raw=body.use_activation is False
    )
    found = await scores(context, request, body, inputs)
    labels = context.backend.card.pooling.labels
    data = []
    for index, vector in enumerate(found.vectors):
        probs = vector.tolist()
        label = labels[int(vector.argmax())]
        data.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
    return json_response(ClassificationList(data=data, **reply_fields(found)))


def _ranked(body: RerankRequest, texts: list[str], scored: Scored) -> RerankAnswer:
    order = sorted(range(len(texts)), key=scored.values.__getitem__, reverse=True)
    # As in vLLM, 0 is no limit.
    kept = order[: body.top_n or None]
    shows = body.return_documents is not False
    fields: dict[str, Any] = reply_fields(scored.pooled)
    return RerankAnswer(
        id=fields["id"],
        model=fields["model"],
        usage=fields["usage"],
        serving=fields["serving"],
        results=[
            RankedDocument(
                index=index,
                document=RankedText(text=texts[index]) if shows else UNSET,
                relevance_score=scored.values[index],
            )
            for index in kept
        ],
    )


def _pairs_of(body: ScoreRequest) -> Pairs:
    """Read the two sides under their older or their newer names."""
    older = (body.text_1, body.text_2)
    newer = (body.queries, body.documents)
    params = ("text_1", "text_2") if newer == (None, None) else ("queries", "documents")
    given = older if newer == (None, None) else newer
    if older != (None, None) and newer != (None, None):
        raise InvalidRequest("Give text_1 and text_2, or queries and documents.", param="queries")
    sides = []
    for side, param in zip(given, params, strict=True):
        if side is None:
            raise InvalidRequest(f"{param} is missing.", param=param)
        sides.append([side] if isinstance(side, str) else side)
    return Pairs(sides[0], sides[1], params)
