"""JSON schemas of requests: limits, and what is changed before a schema becomes a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from loramux.errors import InvalidRequest
from loramux.server.chat.structured.closing import Schema, close_objects

MAX_DEPTH = 64
KNOWN_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid", "unknown"),
    )
)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_ONE = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)
_COUNTS = frozenset(
    (
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    )
)


def check_depth(value: object, param: str) -> None:
    """Raise InvalidRequest if lists and objects are nested too deeply."""
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(
                f"{param} is nested more than {MAX_DEPTH} levels deep: make it flatter, or put its "
                "parts under $defs.",
                param=param,
            )


def prepare_schema(schema: Schema, *, closes_objects: bool = False) -> Schema:
    """Return the schema without annotations that a grammar cannot use.

    An unknown `format` is an annotation by the standard. `closes_objects`: objects have no other
    properties than those that the schema names, unless it says otherwise.
    """
    prepared = _map_schemas(schema, _prepare_one)
    if closes_objects:
        close_objects(prepared)
    # The library would take options from it.
    prepared.pop("x-guidance", None)
    return prepared


def _prepare_one(schema: Schema) -> Schema:
    declared = schema.get("format")
    if isinstance(declared, str) and declared not in KNOWN_FORMATS:
        schema.pop("format")
    for key in _COUNTS & schema.keys():
        # The standard counts 2.0 among the integers.
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])
    if "anyOf" not in schema and _lists_values(schema.get("oneOf")):
        schema["anyOf"] = schema.pop("oneOf")
    return schema


def _lists_values(branches: Any) -> bool:
    """Whether each branch lists its values, and no value is in two of them."""
    if not isinstance(branches, list):
        return False
    listed: list[Any] = []
    for branch in branches:
        if not isinstance(branch, dict) or not branch.keys() & {"const", "enum"}:
            return False
        values = [branch["const"]] if "const" in branch else branch["enum"]
        if not isinstance(values, list) or any(isinstance(one, dict | list) for one in values):
            return False
        # To Python, true is 1.
        listed += {(isinstance(one, bool), one) for one in values}
    return len(set(listed)) == len(listed)


def _map_schemas(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy with the change applied to every schema inside; data is not touched."""

    def mapped(value: Any) -> Any:
        return _map_schemas(value, change) if isinstance(value, dict) else value

    copy = dict(schema)
    for key in _OF_NAMES:
        if isinstance(copy.get(key), dict):
            copy[key] = {name: mapped(inner) for name, inner in copy[key].items()}
    for key in _OF_LISTS:
        if isinstance(copy.get(key), list):
            copy[key] = [mapped(inner) for inner in copy[key]]
    for key in _OF_ONE:
        if isinstance(copy.get(key), dict):
            copy[key] = mapped(copy[key])
    return change(copy)


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
