"""Finds what is no JSON schema at all, such as an unknown type: it would be ignored in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from loramux.errors import InvalidRequest, suggest

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)


def check_wellformed(schema: object, place: str, param: str) -> None:
    """Raise InvalidRequest, with the place, for what no JSON schema has.

    Limit the depth of the schema before.
    """
    for where, value in _schemas(schema, place):
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise InvalidRequest(f"{where} must be a JSON schema, an object.", param=param)
        _check_one(value, where, param)


def _check_one(schema: dict[str, Any], where: str, param: str) -> None:
    declared = schema.get("type", [])
    for kind in declared if isinstance(declared, list) else [declared]:
        if kind not in TYPES:
            hint = suggest(kind, list(TYPES)) if isinstance(kind, str) else ""
            raise InvalidRequest(
                f"{where}.type: JSON schemas have no type {kind!r}. {hint}".strip(), param=param
            )
    wanted: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
        (_OF_NAMES, lambda value: isinstance(value, dict), "an object of schemas"),
        (_OF_LISTS, lambda value: isinstance(value, list) and bool(value), "a list of schemas"),
        (("enum",), lambda value: isinstance(value, list), "a list of values"),
        (("required",), _is_names, "a list of names"),
    )
    for keys, is_right, what in wanted:
        for key in keys:
            if key in schema and not is_right(schema[key]):
                raise InvalidRequest(f"{where}.{key} must be {what}.", param=param)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _schemas(schema: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield a schema and all schemas in it, each with its place; a parent comes first."""
    yield place, schema
    if not isinstance(schema, dict):
        return
    for key in _OF_NAMES:
        inner = schema.get(key)
        for name, one in inner.items() if isinstance(inner, dict) else ():
            yield from _schemas(one, f"{place}.{key}.{name}")
    for key in (*_OF_LISTS, "items"):
        inner = schema.get(key)
        for number, one in enumerate(inner if isinstance(inner, list) else ()):
            yield from _schemas(one, f"{place}.{key}[{number}]")
    for key in _OF_ONE:
        if key in schema and not isinstance(schema[key], list):
            yield from _schemas(schema[key], f"{place}.{key}")
