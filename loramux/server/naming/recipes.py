"""Opens versions of the registry: adapters with files, sums of them, and combinations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from loramux.errors import AdapterRefused, InvalidRequest
from loramux.registry.records import RecipePart, Resolved, VersionRecipe
from loramux.server.naming.combinations import Combinations
from loramux.server.naming.names import AdapterNames, NamedAdapter, full_name


async def open_version(
    names: AdapterNames, combinations: Combinations | None, resolved: Resolved, text: str
) -> tuple[NamedAdapter, ...]:
    """Return the adapters of a version, which the host has afterwards.

    It is one adapter, except for a sum, whose parts are returned with their weights. `text` is the
    name in the request.
    """
    recipe = resolved.recipe
    if recipe is None:
        await names.pull(resolved)
        return (NamedAdapter(text, resolved.cid, resolved=resolved),)
    if recipe.is_sum:
        await _pull_all(names, map(_resolved_part, recipe.parts))
        names.add_sum(resolved)
        return tuple(
            NamedAdapter(
                f"{part} of {full_name(resolved)}",
                part.cid,
                resolved=_resolved_part(part),
                weight=part.weight,
                part_of=resolved,
            )
            for part in recipe.parts
        )
    return (await _open_combination(names, combinations, resolved, text),)


async def _open_combination(
    names: AdapterNames, combinations: Combinations | None, resolved: Resolved, text: str
) -> NamedAdapter:
    stored = resolved.recipe
    assert stored is not None, "the version is a recipe"
    if combinations is None:
        raise InvalidRequest(
            f"{full_name(resolved)} is a recipe by {stored.recipe.method.name}, and this server "
            "makes no combinations.",
            param="model",
        )
    if not combinations.is_ready(stored.recipe):
        await _pull_all(names, map(_resolved_part, stored.parts))
    try:
        card = await combinations.add(stored.recipe)
    except AdapterRefused as error:
        reason = f"{full_name(resolved)}: {_with_names(error.reason, stored)}"
        raise AdapterRefused(error.code, reason, fix=error.fix) from error
    combined = NamedAdapter(text, card.cid, resolved=resolved, recipe=stored.recipe)
    names.add_combination(combined)
    return combined


def _with_names(reason: str, recipe: VersionRecipe) -> str:
    for part in recipe.parts:
        reason = reason.replace(part.cid, str(part))
    return reason


def _resolved_part(part: RecipePart) -> Resolved:
    if part.adapter is None:
        return Resolved(cid=part.cid)
    return Resolved(
        cid=part.cid, tenant=part.adapter.tenant, name=part.adapter.name, version=part.version
    )


async def _pull_all(names: AdapterNames, parts: Iterable[Resolved]) -> None:
    """Pull all parts at once; raise the first failure after all have ended."""
    results = await asyncio.gather(*map(names.pull, parts), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
