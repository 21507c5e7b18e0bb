"""Sums of adapters: how a request writes one, and the selection that it becomes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loramux.errors import InvalidRequest
from loramux.types.request import Selection

MAX_ADAPTERS = 8
MAX_WEIGHT = 100.0
_WEIGHT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*", re.ASCII)

Term = tuple[str, float]
"""The name of an adapter, and its weight."""


def parse_sum(text: str) -> list[Term] | None:
    """Return the terms of a sum such as `a+0.3*b`; None if the text is a single plain name.

    A term is a name, or a weight, `*` and a name. A sum with an empty name is no sum either.
    """
    terms: list[Term] = []
    at = 0
    while True:
        weight = _WEIGHT.match(text, at)
        start = at if weight is None else weight.end()
        stop = text.find("+", start)
        name = text[start : None if stop < 0 else stop].strip()
        if not name:
            return None
        terms.append((name, 1.0 if weight is None else float(weight[1])))
        if stop < 0:
            return None if terms == [(text.strip(), 1.0)] else terms
        at = stop + 1


def sum_text(terms: Iterable[Term]) -> str:
    """Return the text of which parse_sum() makes the terms."""
    return "+".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in terms)


def check_count(num_adapters: int, *, param: str) -> None:
    if num_adapters > MAX_ADAPTERS:
        raise InvalidRequest(
            f"The request names {num_adapters} adapters, and one request may add up to "
            f"{MAX_ADAPTERS}. Name fewer.",
            param=param,
        )


def check_weights(weights: Iterable[float], *, param: str) -> None:
    """Raise InvalidRequest for a weight that is too large or not a number."""
    for weight in weights:
        if not -MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"{param}: the weight of an adapter must be in [-{MAX_WEIGHT:g}, {MAX_WEIGHT:g}], "
                f"got {weight:g}.",
                param=param,
            )


def compose(parts: Iterable[tuple[str, float]]) -> Selection:
    """Return the selection of (CID, weight) pairs, none of which may occur twice.

    It is sorted by CID, so that the order of the request changes neither the rounding nor the key
    of the prefix cache. Adapters of weight 0 add nothing and are left out.
    """
    return tuple(sorted((cid, float(weight)) for cid, weight in parts if weight != 0))


def find_repeated(cids: Sequence[str]) -> tuple[int, int] | None:
    """Return the positions of the first CID that occurs twice; None if all are distinct."""
    seen: dict[str, int] = {}
    for position, cid in enumerate(cids):
        if cid in seen:
            return seen[cid], position
        seen[cid] = position
    return None


@dataclass(frozen=True, slots=True)
class SumPart:
    """An adapter of a sum as the check of what may be added sees it."""

    name: str
    weight: float
    only_alone: str
    """AdapterCard.only_alone"""


def check_alone(
    parts: Iterable[SumPart], *, param: str = "adapters", takes_weights: bool = False
) -> None:
    """Raise InvalidRequest if an adapter that can only be used alone is in a sum or weighted.

    `takes_weights`: those that are alone may have any weight.
    """
    used = [part for part in parts if part.weight != 0]
    for part in used:
        if not part.only_alone or (len(used) == 1 and (takes_weights or part.weight == 1)):
            continue
        how = "in a sum with other adapters" if len(used) > 1 else f"with weight {part.weight:g}"
        raise InvalidRequest(
            f"The adapter `{part.name}` cannot be used {how}: {part.only_alone}. Name it alone"
            f"{'' if takes_weights else ', without a weight'}.",
            param=param,
        )


def check_sum(parts: Sequence[tuple[str, float]], *, param: str = "adapters") -> Selection:
    """compose() of parts that a program gave; raises InvalidRequest unless they are a sum."""
    check_count(len(parts), param=param)
    check_weights((weight for _, weight in parts), param=param)
    cids = [cid for cid, _ in parts]
    repeated = find_repeated(cids)
    if repeated is not None:
        raise InvalidRequest(f"The adapter {cids[repeated[0]]} is named twice.", param=param)
    return compose(parts)
