"""Which adapter a request means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.errors import InvalidRequest
from loramux.registry.records import Resolved
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.naming import NOBODY, Asker, find_named
from loramux.server.registry_adapters import label_of
from loramux.server.serving_bodies import RunRequest
from loramux.server.wire import GenerationRequest

MAX_WEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class Selected:
    model: str
    """The name that the answer shows: the adapter's, or the base's."""
    adapter: str | None
    """The name by which the engine knows it."""
    weight: float = 1.0
    resolved: Resolved | None = None
    """What the registry said of it."""

    @property
    def label(self) -> str | None:
        """What shares and metrics call it, whatever its version; None: as the engine does."""
        return None if self.resolved is None else label_of(self.resolved)


async def select(
    context: Context, request: GenerationRequest, *, asker: Asker = NOBODY
) -> Selected:
    """`adapters` decides where it is given, `model` otherwise; either must name what is here."""
    if isinstance(request, RunRequest):
        return await _select_artifact(context, request.artifact, asker)
    named = await select_model(context, request.model, asker=asker)
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
    found = await find_named(context, name, param="adapters", asker=asker)
    if found is None or found.adapter is None:
        raise _unknown(context, f"The adapter `{name}`", "adapters")
    return Selected(name, found.adapter, weights[0], found.resolved)


async def select_model(context: Context, model: str | None, *, asker: Asker = NOBODY) -> Selected:
    if model is None:
        return Selected(context.base_names[0], None)
    found = await find_named(context, model, param="model", asker=asker)
    if found is None:
        raise _unknown(context, f"The model `{model}`", "model")
    return Selected(model, found.adapter, resolved=found.resolved)


async def _select_artifact(context: Context, artifact: str, asker: Asker) -> Selected:
    found = await find_named(context, artifact, param="artifact", asker=asker, own_base_only=True)
    if found is None:
        raise _unknown(context, f"The artifact `{artifact}`", "artifact")
    return Selected(artifact, found.adapter, resolved=found.resolved)


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


def _unknown(context: Context, what: str, param: str) -> NotServed:
    return NotServed(f"{what} does not exist.{context.missed_registry}", param=param)


def _refusal(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)
