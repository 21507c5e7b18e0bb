"""JSON schemas of requests: limits, and what is changed before a schema becomes a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from loramux.errors import InvalidRequest, suggest

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE_SCHEMA = (
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
        (_NAMED_SCHEMAS, lambda value: isinstance(value, dict), "an object of schemas"),
        (
            _LISTS_OF_SCHEMAS,
            lambda value: isinstance(value, list) and bool(value),
            "a list of schemas",
        ),
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
    for key in _NAMED_SCHEMAS:
        inner = schema.get(key)
        for name, one in inner.items() if isinstance(inner, dict) else ():
            yield from _schemas(one, f"{place}.{key}.{name}")
    for key in (*_LISTS_OF_SCHEMAS, "items"):
        inner = schema.get(key)
        for number, one in enumerate(inner if isinstance(inner, list) else ()):
            yield from _schemas(one, f"{place}.{key}[{number}]")
    for key in _ONE_SCHEMA:
        if key in schema and not isinstance(schema[key], list):
            yield from _schemas(schema[key], f"{place}.{key}")


Schema = dict[str, Any]

_SPEAKS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
)
"""Keywords by which a schema says what other properties an object may have."""
_UNIONS = ("anyOf", "oneOf")
_TOGETHER = ("if", "then", "else")
_INNER_ONE = ("items", "additionalItems", "additionalProperties", "unevaluatedItems")
_INNER_LISTS = ("items", "prefixItems")
_INNER_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def close_objects(root: Schema) -> None:
    """Close the objects of a schema in place, those of `#/$defs` included.

    A schema with references other than pointers into itself is left as it is.
    """
    closer = _Closer(root)
    if closer.is_local:
        closer.close_all()


class _Closer:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self.is_local = True
        self._values: list[Schema] = []
        """Schemas that are all of what describes a value; the others are parts of one of them."""
        self._visit(root, is_whole=True)
        self._parts: set[int] = set()
        """Ids of the schemas that describe a value together with others."""
        for schema in self._values:
            if _is_composed(schema):
                self._mark(schema)

    def close_all(self) -> None:
        for schema in self._values:
            if id(schema) not in self._parts:
                self._close(schema)

    def _visit(self, schema: Any, *, is_whole: bool) -> None:
        if not isinstance(schema, dict):
            return
        if is_whole:
            self._values.append(schema)
        if "$ref" in schema and self._target(schema) is None:
            self.is_local = False
        is_union = is_whole and not _is_composed(schema)
        for key in _UNIONS:
            for branch in _listed(schema, key):
                self._visit(branch, is_whole=is_union)
        for part in _parts_together(schema):
            self._visit(part, is_whole=False)
        for inner in _inner(schema):
            self._visit(inner, is_whole=True)

    def _mark(self, schema: Schema) -> None:
        for part in (self._target(schema), *_parts(schema)):
            if isinstance(part, dict) and id(part) not in self._parts:
                self._parts.add(id(part))
                self._mark(part)

    def _close(self, schema: Schema) -> None:
        if not _is_composed(schema):
            target = self._target(schema)
            if target is not None:
                if id(target) in self._parts:
                    names = self._names(schema, set())
                    schema["allOf"] = [{"$ref": schema.pop("$ref")}]
                    _limit(schema, names)
            elif not any(_listed(schema, key) for key in _UNIONS) and _declares(schema):
                _limit(schema, self._names(schema, set()))
            return
        unions = [key for key in _UNIONS if _listed(schema, key)]
        if len(unions) == 1 and "$ref" not in schema and not list(_parts_together(schema)):
            self._close_branches(schema, unions[0])
        else:
            _limit(schema, self._names(schema, set()))

    def _close_branches(self, schema: Schema, key: str) -> None:
        """Close each branch with its names and those of the schema around it."""
        if schema.keys() & _SPEAKS:
            return
        own = _own_names(schema)
        branches = [one if isinstance(one, dict) else {"allOf": [one]} for one in schema[key]]
        for branch in branches:
            names = self._names(branch, set())
            if "$ref" in branch:
                branch["allOf"] = [{"$ref": branch.pop("$ref")}, *_listed(branch, "allOf")]
            _limit(branch, None if names is None else own | names)
        schema[key] = branches

    def _names(self, schema: Any, seen: set[int]) -> dict[str, None] | None:
        """Return the names of all parts, in order; None: a part says what else there may be."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return {}
        seen.add(id(schema))
        if schema.keys() & _SPEAKS:
            return None
        names = _own_names(schema)
        for part in (self._target(schema), *_parts(schema)):
            found = self._names(part, seen)
            if found is None:
                return None
            names |= found
        return names

    def _target(self, schema: Any) -> Schema | None:
        """Return the schema that `$ref` names by a pointer into this document."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        is_pointer = reference == "#" or reference.startswith("#/")
        return found if is_pointer and isinstance(found, dict) else None


def _is_composed(schema: Schema) -> bool:
    """Whether a value follows several parts of the schema together."""
    unions = sum(bool(_listed(schema, key)) for key in _UNIONS)
    num_parts = unions + ("$ref" in schema) + _declares(schema)
    return num_parts > 1 or any(True for _ in _parts_together(schema))


def _declares(schema: Schema) -> bool:
    return "properties" in schema or bool(schema.get("required"))


def _limit(schema: Schema, names: dict[str, None] | None) -> None:
    """Allow no properties but these; None, or a need for more of them, leaves it open."""
    if names is None or schema.keys() & _SPEAKS:
        return
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(names):
        return
    own = schema.get("properties")
    declared: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    schema["properties"] = declared | {name: {} for name in names if name not in declared}
    schema["additionalProperties"] = False


def _own_names(schema: Schema) -> dict[str, None]:
    declared, required = schema.get("properties"), schema.get("required")
    names = [*declared] if isinstance(declared, dict) else []
    if isinstance(required, list):
        names += [name for name in required if isinstance(name, str)]
    return dict.fromkeys(names)


def _parts(schema: Schema) -> Iterator[Any]:
    """Yield the schemas inside that describe the same value."""
    for key in _UNIONS:
        yield from _listed(schema, key)
    yield from _parts_together(schema)


def _parts_together(schema: Schema) -> Iterator[Any]:
    yield from _listed(schema, "allOf")
    for key in _TOGETHER:
        if key in schema:
            yield schema[key]
    dependent = schema.get("dependentSchemas")
    if isinstance(dependent, dict):
        yield from dependent.values()


def _inner(schema: Schema) -> Iterator[Any]:
    """Yield the schemas of values inside of the value, and definitions."""
    for key in _INNER_ONE:
        yield schema.get(key)
    for key in _INNER_LISTS:
        yield from _listed(schema, key)
    for key in _INNER_NAMED:
        named = schema.get(key)
        if isinstance(named, dict):
            yield from named.values()


def _listed(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


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
