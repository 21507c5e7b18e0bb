"""The adapters that a request for images means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from loramux.errors import InvalidRequest
from loramux.server.generate.selection import ModelReference, check_base, find_named, select
from loramux.server.images.context import ImageContext
from loramux.server.images.names import Chosen, UnknownAdapter
from loramux.server.naming.names import NamedAdapter, Selected, check_distinct
from loramux.types.caller import Caller
from loramux.types.composition import check_count, check_weights


async def choose(
    context: ImageContext,
    caller: Caller,
    model: str | None,
    adapters: Sequence[str] | None,
    weights: Sequence[float] | None,
) -> Chosen:
    """Return the adapters that the own routes mean: none are the default, [] is the base.

    `model` may also be the name of an adapter.
    """
    selected = await select(context, ModelReference(model=model), caller=caller)
    if selected.adapters and adapters:
        raise InvalidRequest(
            f"`model` is the adapter {selected.model}, and `adapters` names others: name the base "
            "in `model`.",
            param="adapters",
        )
    if adapters is None:
        if weights is not None:
            raise InvalidRequest("adapter_weights needs adapters.", param="adapter_weights")
        if selected.adapters:
            chosen = tuple(_by_default(context, one) for one in selected.adapters)
            return _allowed(context, chosen, caller)
        default = context.names.default
        adapters = [] if default is None else [default]
    return await _find_all(context, caller, adapters, weights)


async def choose_deployed(
    context: ImageContext,
    caller: Caller,
    deployment: str,
    adapters: Sequence[str],
    weights: Sequence[float] | None,
) -> Chosen:
    """Return the adapters that sheaf's routes mean: [] is the default.

    There, the name of the deployment as the only adapter is the base.
    """
    names = context.names
    if list(adapters) == [deployment] and names.find(deployment) is None:
        return _allowed(context, (), caller)
    if not adapters and names.default is not None:
        adapters = [names.default]
    if adapters and not names.given() and context.registry is None:
        raise UnknownAdapter(
            f"Request specifies adapters {list(adapters)} but deployment '{deployment}' has no "
            "LoRA configured."
        )
    return await _find_all(context, caller, adapters, weights, deployment)


async def _find_all(
    context: ImageContext,
    caller: Caller,
    names: Sequence[str],
    weights: Sequence[float] | None,
    deployment: str | None = None,
) -> Chosen:
    check_count(len(names), param="adapters")
    if weights is not None and len(weights) != len(names):
        raise InvalidRequest(
            f"adapter_weights length ({len(weights)}) must match adapters length ({len(names)})",
            param="adapter_weights",
        )
    check_weights(weights or (), param="adapter_weights")
    results = await asyncio.gather(
        *(find_named(context, name, param="adapters", caller=caller) for name in names),
        return_exceptions=True,
    )
    unknown = [name for name, found in zip(names, results, strict=True) if found is None]
    if unknown:
        raise _unknown(context, caller, unknown, deployment)
    chosen: list[NamedAdapter] = []
    for index, found in enumerate(results):
        if isinstance(found, BaseException):
            raise found
        for one in found or ():
            factor = weights[index] if weights is not None else _default_weight(context, one)
            chosen.append(replace(one, weight=factor * one.weight))
    check_count(len(chosen), param="adapters")
    check_weights((one.weight for one in chosen), param="adapter_weights")
    check_distinct(chosen, param="adapters")
    return _allowed(context, tuple(chosen), caller)


def _allowed(context: ImageContext, chosen: Chosen, caller: Caller) -> Chosen:
    """Raise Forbidden if the base alone would draw and the caller may not use it.

    Raises InvalidRequest for adapters that cannot be added up.
    """
    check_base(Selected("", chosen), caller)
    context.names.check_alone(chosen, param="adapters")
    return chosen


def _by_default(context: ImageContext, one: NamedAdapter) -> NamedAdapter:
    """Give an adapter that was named alone its weight; terms of a sum keep theirs."""
    is_alone = one.given == one.text and one.weight == 1
    return replace(one, weight=_default_weight(context, one)) if is_alone else one


def _default_weight(context: ImageContext, one: NamedAdapter) -> float:
    return 1.0 if one.given is None else context.names.weight_of(one.given)


def _unknown(
    context: ImageContext, caller: Caller, unknown: Sequence[str], deployment: str | None
) -> UnknownAdapter:
    view = context.view_of(caller)
    known = sorted(one.name for one in context.names.given() if view.sees_given(one.name))
    return UnknownAdapter(
        f"Unknown adapter(s) {list(unknown)}; deployment "
        f"'{deployment or context.base_names[0]}' has: {known}{context.missed_registry}"
    )
