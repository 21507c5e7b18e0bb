"""Resolves the names in a request to the base, a given adapter, or an adapter of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loramux.adapters.identity import CID_PREFIX, is_digest_start
from loramux.adapters.peft.folder import short_base_name
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest
from loramux.registry.records import Resolved
from loramux.server.caller import ANONYMOUS, Caller
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.names import Selected, full_name

MAX_WEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The fields of a body that name a model: `model` and `adapters`, or `artifact`."""

    model: str | None = None
    adapters: Sequence[str] | None = None
    adapter_weights: Sequence[float] | None = None
    artifact: str | None = None

    def __str__(self) -> str:
        return self.artifact or "+".join(self.adapters or ()) or self.model or ""


async def select(
    context: Context, reference: ModelReference, *, caller: Caller = ANONYMOUS
) -> Selected:
    """`adapters` takes precedence over `model`; both must name something that is served."""
    if reference.artifact is not None:
        return await _select_artifact(context, reference.artifact, caller)
    selected = await select_model(context, reference.model, caller=caller)
    if reference.adapters is None:
        if reference.adapter_weights is not None:
            raise InvalidRequest(
                "adapter_weights needs adapters to go with.", param="adapter_weights"
            )
        return selected
    weights = _weights(reference.adapters, reference.adapter_weights)
    if not reference.adapters:
        return selected if selected.cid is None else Selected(context.base_names[0])
    if len(reference.adapters) > 1:
        raise InvalidRequest(
            f"adapters names {len(reference.adapters)} adapters, but composing several in one "
            "request is not supported yet: name one.",
            param="adapters",
        )
    name = reference.adapters[0]
    found = await find_named(context, name, param="adapters", caller=caller)
    if found is None or found.cid is None:
        raise _unknown(context, f"The adapter `{name}`", "adapters")
    return replace(found, weight=weights[0])


async def select_model(
    context: Context, model: str | None, *, caller: Caller = ANONYMOUS
) -> Selected:
    if model is None:
        return Selected(context.base_names[0])
    found = await find_named(context, model, param="model", caller=caller)
    if found is None:
        raise _unknown(context, f"The model `{model}`", "model")
    return found


async def find_named(
    context: Context,
    text: str,
    *,
    param: str,
    caller: Caller = ANONYMOUS,
    own_base_only: bool = False,
) -> Selected | None:
    """Returns what the name selects, or None; the host has the adapter of a registry afterwards.

    With own_base_only, an adapter that records another base is refused even if its shapes fit.
    """
    if text in context.base_names:
        return Selected(text)
    given = context.names.find(text)
    if given is not None:
        return Selected(text, given.cid, given.name)
    resolved = await _resolve(context, text, param, caller)
    if resolved is None:
        return _find_by_cid(context, text, param)
    if own_base_only:
        _require_own_base(context, resolved)
    await context.names.pull(resolved)
    return Selected(text, resolved.cid, resolved=resolved)


async def _select_artifact(context: Context, artifact: str, caller: Caller) -> Selected:
    found = await find_named(context, artifact, param="artifact", caller=caller, own_base_only=True)
    if found is None:
        raise _unknown(context, f"The artifact `{artifact}`", "artifact")
    return found


async def _resolve(context: Context, text: str, param: str, caller: Caller) -> Resolved | None:
    if context.registry is None:
        return None
    try:
        return await context.registry.resolve(
            text, sticky_key=caller.sticky_key, tenant=caller.tenant
        )
    except AdapterNotFound:
        return None
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from error


def _require_own_base(context: Context, resolved: Resolved) -> None:
    recorded, card = resolved.base_model, context.backend.card
    if recorded is None:
        return
    own = {short_base_name(name) for name in (card.name, card.path, *context.base_names)}
    if short_base_name(recorded) not in own:
        raise AdapterRefused(
            "other_base",
            f"{full_name(resolved)} was made for the base {recorded[:200]!r}, and this server has "
            f"{context.base_names[0]!r}.",
            fix="Send it to a server of its own base.",
        )


def _find_by_cid(context: Context, text: str, param: str) -> Selected | None:
    """Finds a given adapter by its CID or a unique prefix of it."""
    digits = text.removeprefix(CID_PREFIX)
    if not is_digest_start(digits):
        return None
    found = {
        given.cid: given.name
        for given in context.names.given()
        if given.cid.startswith(CID_PREFIX + digits)
    }
    if len(found) > 1:
        raise InvalidRequest(
            f"{len(found)} content ids begin with {CID_PREFIX}{digits}. Give more digits.",
            param=param,
        )
    return next((Selected(text, cid, name) for cid, name in found.items()), None)


def _weights(adapters: Sequence[str], weights: Sequence[float] | None) -> Sequence[float]:
    if weights is None:
        return [1.0] * len(adapters)
    if len(weights) != len(adapters):
        raise InvalidRequest(
            f"adapter_weights has {len(weights)} entries for {len(adapters)} adapters.",
            param="adapter_weights",
        )
    for weight in weights:
        if not -MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"adapter_weights must be in [-{MAX_WEIGHT:g}, {MAX_WEIGHT:g}], got {weight:g}.",
                param="adapter_weights",
            )
    return weights


def _unknown(context: Context, what: str, param: str) -> NotServed:
    return NotServed(f"{what} does not exist.{context.missed_registry}", param=param)
