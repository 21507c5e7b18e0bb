"""Scores of pairs of texts: by a cross-encoder, or by the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.generate.asked import TextPair
from loramux.server.generate.embeddings import Inputs, Pooled, cosine, embeddings, scores
from loramux.server.generate.generation import RouteKind
from loramux.server.http.call import Call
from loramux.types.pooling import Pooling
from loramux.wire.pooling import PoolingBody


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
