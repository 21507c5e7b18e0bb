"""Whether a grammar has objects whose keys are not all declared, so that one could repeat."""

from __future__ import annotations

import json
import re
from typing import Any

from loramux.types.grammar import Grammar

_EMBEDDED = re.compile(r"%json\b\s*")
_DEFINITIONS = ("$defs", "definitions")
_BRANCHES = ("anyOf", "oneOf", "allOf")


def has_open_objects(grammar: Grammar) -> bool:
    """Return False only if the schemas of the grammar declare the keys of every object."""
    if grammar.kind == "regex":
        return False
    if grammar.kind == "json_schema":
        return not _is_closed(json.loads(grammar.text))
    for found in _EMBEDDED.finditer(grammar.text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar.text, found.end())
        except (ValueError, RecursionError):
            return True
        if not _is_closed(schema):
            return True
    return False


def has_key_patterns(grammar: Grammar) -> bool:
    """Whether the keys of an object may be few, so that an object can run out of them."""
    return '"patternProperties"' in grammar.text


def _is_closed(schema: Any) -> bool:
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return False
    if not all(_is_closed(one) for name in _DEFINITIONS for one in _values(schema.get(name, {}))):
        return False
    if "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema:
        return str(schema["$ref"]).startswith(("#/$defs/", "#/definitions/"))
    for name in _BRANCHES:
        if name in schema:
            return all(_is_closed(one) for one in _values(schema[name]))
    types = schema.get("type", ["object", "array"])
    types = types if isinstance(types, list) else [types]
    return ("object" not in types or _is_closed_object(schema)) and (
        "array" not in types or _is_closed_array(schema)
    )


def _is_closed_object(schema: dict[str, Any]) -> bool:
    return (
        schema.get("additionalProperties") is False
        and "patternProperties" not in schema
        and all(_is_closed(one) for one in _values(schema.get("properties", {})))
    )


def _is_closed_array(schema: dict[str, Any]) -> bool:
    return _is_closed(schema.get("items", True)) and all(
        _is_closed(one) for one in _values(schema.get("prefixItems", []))
    )


def _values(schemas: Any) -> list[Any]:
    """Return the schemas of a table or a list; anything else counts as one that allows all."""
    if isinstance(schemas, dict):
        return list(schemas.values())
    return schemas if isinstance(schemas, list) else [True]
