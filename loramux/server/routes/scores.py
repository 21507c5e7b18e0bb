"""Scores in vLLM's format: /score, /rerank and /classify, also under /v1 and /v2."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.checked_fields import read_fields
from loramux.server.generate.embeddings import Inputs, scores, split_input
from loramux.server.generate.generation import RouteKind
from loramux.server.generate.scores import Pairs, Scored, score_pairs
from loramux.server.http.body import json_response
from loramux.server.http.call import Call
from loramux.server.http.openapi import pooling
from loramux.server.http.routes import Route, Routes
from loramux.server.routes.embeddings import reply_fields
from loramux.wire.pooling import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    RankedDocument,
    RankedText,
    RerankAnswer,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
)

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
