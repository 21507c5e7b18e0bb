"""Which adapter a request means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.errors import InvalidRequest
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.wire import GenerationRequest

MAX_WEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class Selected:
    model: str
    """The name that the answer shows: the adapter's, or the base's."""
    adapter: str | None
    weight: float = 1.0


def select(context: Context, request: GenerationRequest) -> Selected:
    """`adapters` decides where it is given, `model` otherwise; either must name what is here."""
    named = select_model(context, request.model)
    if request.adapters is None:
        if request.adapter_weights is not None:
            raise _refusal("adapter_weights needs adapters to go with.", "adapter_weights")
        return named
    weights = _weights(request.adapters, request.adapter_weights)
    if not request.adapters:
        is_base = named.adapter is None
        return named if is_base else Selected(context.base_names[0], None)
    if len(request.adapters) > 1:
        raise _refusal(
            f"adapters names {len(request.adapters)} adapters, but composing several in one "
            "request is not supported yet: name one.",
            "adapters",
        )
    name = request.adapters[0]
    if name not in context.backend.adapters:
        raise NotServed(f"The adapter `{name}` does not exist.", param="adapters")
    return Selected(name, name, weights[0])


def select_model(context: Context, model: str | None) -> Selected:
    if model is None:
        return Selected(context.base_names[0], None)
    if model in context.base_names:
        return Selected(model, None)
    if model in context.backend.adapters:
        return Selected(model, model)
    raise NotServed(f"The model `{model}` does not exist.", param="model")


def _weights(adapters: Sequence[str], weights: Sequence[float] | None) -> Sequence[float]:
    if weights is None:
        return [1.0] * len(adapters)
    if len(weights) != len(adapters):
        raise _refusal(
            f"adapter_weights has {len(weights)} entries for {len(adapters)} adapters.",
            "adapter_weights",
        )
    for weight in weights:
        if not -MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise _refusal(
                f"adapter_weights must be in [-{MAX_WEIGHT:g}, {MAX_WEIGHT:g}], got {weight:g}.",
                "adapter_weights",
            )
    return weights


def _refusal(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)
