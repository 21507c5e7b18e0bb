"""Makes the recipe of a version from other versions of the registry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from loramux.adapters.peft.folder import short_base_name
from loramux.adapters.recipe import SUM_METHOD, CombinationOptions, make_recipe
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.registry.names import AdapterName, Reference
from loramux.registry.records import Content, Resolved
from loramux.registry.resolve import find_route
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import recipes as recipe_rows
from loramux.types.composition import check_count, check_weights

Term = tuple[Reference, float]
"""A version of the registry, and its weight."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A version with files."""

    version_id: int
    cid: str
    name: str
    base_model: str | None
    weight: float


def make_content(
    connection: Connection,
    terms: Sequence[Term],
    options: CombinationOptions,
    *,
    any_base: bool = False,
) -> tuple[Content, tuple[int, ...]]:
    """Return the content of a recipe version, and the ids of the versions that it is made of.

    A sum of sums becomes one sum. Raises InvalidRequest for other nested recipes, and
    AdapterRefused for parts that record different bases, unless `any_base`.
    """
    parts = [part for term in terms for part in _find_parts(connection, term, options)]
    if len(parts) > len(terms):
        parts = _add_up(parts)
    if options.method == SUM_METHOD:
        _check_sum(parts, options)
    _check_modalities(connection, parts, options)
    recipe = make_recipe([part.cid for part in parts], [part.weight for part in parts], options)
    if not any_base:
        _check_bases(parts)
    content = Content(
        cid=recipe.cid,
        manifest=recipe.to_dict(),
        size_bytes=0,
        base_model=next((part.base_model for part in parts if part.base_model), None),
    )
    return content, tuple(part.version_id for part in parts)


def _check_modalities(
    connection: Connection, parts: Iterable[_Part], options: CombinationOptions
) -> None:
    """Refuses adapters of different kinds of models, and of images other recipes than sums."""
    found = {adapter_rows.find_modality(connection, part.cid) for part in parts}
    if len(found) > 1:
        raise InvalidRequest(
            "Some parts are for a text model and others for an image model. Name parts of one "
            "kind.",
            param="adapters",
        )
    if found == {"image"} and options.method != SUM_METHOD:
        raise InvalidRequest(
            f"Adapters of image models are added up, not combined by {options.method}.",
            param="combination",
        )


def _find_parts(connection: Connection, term: Term, options: CombinationOptions) -> Iterable[_Part]:
    """Yield the version of a term, or the parts of a sum within a sum."""
    reference, weight = term
    route = find_route(connection, reference)
    if len(route.choices) > 1:
        raise InvalidRequest(
            f"{reference} is split among several versions, and a recipe needs one. Name a version "
            f"of {route.adapter}.",
            param="adapters",
        )
    resolved = route.choices[0].resolved
    adapter, version = _name_of(connection, resolved)
    row = adapter_rows.get_adapter(connection, adapter)
    found = adapter_rows.get_version(connection, row, adapter, version)
    nested = recipe_rows.recipe_of(connection, found.id)
    if nested is None:
        yield _Part(found.id, found.cid, f"{adapter}@{version}", found.base_model, weight)
        return
    if not nested.is_sum or options.method != SUM_METHOD:
        raise InvalidRequest(
            f"{adapter}@{version} is itself a recipe, {nested}. Only a sum may have recipes as "
            "parts, and only sums. Name the parts, or write it to a version with files first: "
            "loramux merge … --push.",
            param="adapters",
        )
    for part in nested.parts:
        assert part.adapter is not None and part.version is not None
        row = adapter_rows.get_adapter(connection, part.adapter)
        found = adapter_rows.get_version(connection, row, part.adapter, part.version)
        yield _Part(found.id, part.cid, str(part), found.base_model, weight * part.weight)


def _name_of(connection: Connection, resolved: Resolved) -> tuple[AdapterName, str]:
    if resolved.tenant is None or resolved.name is None or resolved.version is None:
        return adapter_rows.names_of(connection, resolved.cid)[0]
    return AdapterName(resolved.tenant, resolved.name), resolved.version


def _add_up(parts: Iterable[_Part]) -> list[_Part]:
    """Add the weights of parts with one CID, which the sums in a sum may share."""
    found: dict[str, _Part] = {}
    for part in parts:
        weight = part.weight + (found[part.cid].weight if part.cid in found else 0.0)
        first = found.get(part.cid, part)
        found[part.cid] = _Part(first.version_id, part.cid, first.name, first.base_model, weight)
    return list(found.values())


def _check_sum(parts: Sequence[_Part], options: CombinationOptions) -> None:
    """Refuses a sum that no request could name."""
    if options.dtype != "float32":
        raise InvalidRequest(
            "dtype has no meaning for a sum, whose parts are added as they are. Leave it out.",
            param="dtype",
        )
    check_count(len(parts), param="adapters")
    check_weights((part.weight for part in parts), param="weights")


def _check_bases(parts: Sequence[_Part]) -> None:
    seen: dict[str, str] = {}
    for part in parts:
        if part.base_model is not None:
            seen.setdefault(short_base_name(part.base_model), part.name)
    if len(seen) > 1:
        found = " and ".join(f"{name} on {base[:200]!r}" for base, name in list(seen.items())[:2])
        raise AdapterRefused(
            "other_base",
            f"The adapters were trained on different bases: {found}.",
            fix="Combine adapters of one base. If both names mean the same base, allow other base "
            "names (any_base).",
        )
