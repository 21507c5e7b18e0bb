"""Resolves the names in a request to the base, a given adapter, or an adapter of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loramux.adapters.identity import CID_PREFIX, is_digest_start
from loramux.adapters.peft.folder import short_base_name
from loramux.errors import AdapterNotFound, AdapterRefused, InvalidRequest
from loramux.registry.records import Resolved
from loramux.server.context import Context
from loramux.server.errors import NotServed
from loramux.server.names import Selected, full_name
from loramux.server.serving_bodies import RunRequest
from loramux.server.wire import GenerationRequest

MAX_WEIGHT = 100.0


@dataclass(frozen=True, slots=True)
class Asker:
    """The tenant and user of a request: they decide where a bare name is looked up, and which
    version of a split alias serves it."""

    tenant: str = ""
    user: str | None = None

    @property
    def sticky_key(self) -> str | None:
        return self.user or self.tenant or None


ANONYMOUS = Asker()


async def select(
    context: Context, request: GenerationRequest, *, asker: Asker = ANONYMOUS
) -> Selected:
    """`adapters` takes precedence over `model`; both must name something that is served."""
    if isinstance(request, RunRequest):
        return await _select_artifact(context, request.artifact, asker)
    selected = await select_model(context, request.model, asker=asker)
    if request.adapters is None:
        if request.adapter_weights is not None:
            raise InvalidRequest(
                "adapter_weights needs adapters to go with.", param="adapter_weights"
            )
        return selected
    weights = _weights(request.adapters, request.adapter_weights)
    if not request.adapters:
        return selected if selected.cid is None else Selected(context.base_names[0])
    if len(request.adapters) > 1:
        raise InvalidRequest(
            f"adapters names {len(request.adapters)} adapters, but composing several in one "
            "request is not supported yet: name one.",
            param="adapters",
        )
    name = request.adapters[0]
    found = await find_named(context, name, param="adapters", asker=asker)
    if found is None or found.cid is None:
        raise _unknown(context, f"The adapter `{name}`", "adapters")
    return replace(found, weight=weights[0])


async def select_model(
    context: Context, model: str | None, *, asker: Asker = ANONYMOUS
) -> Selected:
    if model is None:
        return Selected(context.base_names[0])
    found = await find_named(context, model, param="model", asker=asker)
    if found is None:
        raise _unknown(context, f"The model `{model}`", "model")
    return found


async def find_named(
    context: Context,
    text: str,
    *,
    param: str,
    asker: Asker = ANONYMOUS,
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
    resolved = await _resolve(context, text, param, asker)
    if resolved is None:
        return _find_by_cid(context, text, param)
    if own_base_only:
        _require_own_base(context, resolved)
    await context.names.pull(resolved)
    return Selected(text, resolved.cid, resolved=resolved)


async def _select_artifact(context: Context, artifact: str, asker: Asker) -> Selected:
    found = await find_named(context, artifact, param="artifact", asker=asker, own_base_only=True)
    if found is None:
        raise _unknown(context, f"The artifact `{artifact}`", "artifact")
    return found


async def _resolve(context: Context, text: str, param: str, asker: Asker) -> Resolved | None:
    if context.registry is None:
        return None
    try:
        return await context.registry.resolve(
            text, sticky_key=asker.sticky_key, tenant=asker.tenant
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
