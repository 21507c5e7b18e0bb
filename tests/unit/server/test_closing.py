"""Objects of a schema are closed unless it says otherwise."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from loramux.engine.grammar.library import definition
from loramux.server.chat.structured.schema import prepare_schema
from loramux.types.grammar import Grammar

INTEGER = {"type": "integer"}


def of(*names: str, **more: Any) -> dict[str, Any]:
    """Return a schema of an object with required integers."""
    properties = dict.fromkeys(names, INTEGER)
    return {"type": "object", "properties": properties, "required": list(names), **more}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    closed = prepare_schema(schema, closes_objects=True)
    grammar = Grammar.of_schema(closed)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), definition(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = list(json.dumps(value, separators=(",", ":")).encode())
    return bool(matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting())


A, B, AB = {"a": 1}, {"b": 1}, {"a": 1, "b": 1}
REF = {"$ref": "#/$defs/A"}
DEFS = {"$defs": {"A": of("a")}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        pytest.param(of("a"), [A], [AB, {}, {"a": 1, "\u00e9": 2}], id="plain"),
        pytest.param({"type": "object", "required": ["a"]}, [A], [{}, AB], id="required alone"),
        pytest.param({"type": "object"}, [{}, A], [], id="no names"),
        pytest.param(of("a", additionalProperties=True), [A, AB], [], id="open"),
        pytest.param(of("a", additionalProperties=INTEGER), [AB], [{"a": 1, "b": "x"}], id="typed"),
        pytest.param(
            of("a", patternProperties={"^b$": INTEGER}), [A, AB], [{"a": 1, "b": ""}], id="pattern"
        ),
        pytest.param(of("a", minProperties=2), [AB], [A], id="more are needed"),
        pytest.param(
            {"properties": {"o": of("a"), "l": {"items": of("b")}}, "type": "object"},
            [{"o": A, "l": [B]}],
            [{"o": AB}, {"l": [AB]}],
            id="nested",
        ),
        pytest.param({"anyOf": [of("a"), of("b")]}, [A, B], [AB], id="branches"),
        pytest.param({"oneOf": [of("a"), {"type": "null"}]}, [A, None], [AB], id="nullable"),
        pytest.param({"allOf": [of("a"), of("b")]}, [AB], [A, AB | {"c": 1}], id="all"),
        pytest.param({**DEFS, **REF}, [A], [AB], id="reference"),
        pytest.param(
            {**DEFS, "allOf": [REF, of("b")]}, [AB], [A, AB | {"c": 1}], id="all of a reference"
        ),
        pytest.param(
            {
                **DEFS,
                "type": "object",
                "properties": {"x": REF, "y": {"allOf": [REF], "description": "d"}},
            },
            [{"x": A, "y": A}],
            [{"x": AB}, {"y": AB}],
            id="a reference used twice",
        ),
        pytest.param(
            of("k", anyOf=[of("a"), of("b")]),
            [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
            [{"k": 1}, {"k": 1, "a": 1, "b": 1}, {"k": 1, "a": 1, "c": 1}],
            id="branches beside properties",
        ),
        pytest.param(
            {**DEFS, **of("k", anyOf=[REF, {"required": ["b"]}])},
            [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
            [{"k": 1}, {"k": 1, "a": 1, "c": 1}],
            id="a reference among branches beside properties",
        ),
        pytest.param(
            {"$defs": {"N": {**of("v"), "properties": {"v": INTEGER, "n": {"$ref": "#/$defs/N"}}}},
             "$ref": "#/$defs/N"},
            [{"v": 1}, {"v": 1, "n": {"v": 2}}],
            [{"v": 1, "n": {"v": 2, "w": 3}}],
            id="recursive",
        ),
        pytest.param(
            {"allOf": [of("a"), of("b", additionalProperties=INTEGER)]},
            [AB, AB | {"c": 1}],
            [A],
            id="all of an open one",
        ),
    ],
)  # fmt: skip
def test_closing(schema: dict[str, Any], taken: list[Any], refused: list[Any]) -> None:
    before = json.dumps(schema)
    assert [value for value in taken if not accepts(schema, value)] == []
    assert [value for value in refused if accepts(schema, value)] == []
    assert json.dumps(schema) == before


def test_a_schema_with_references_by_name_stays_as_it_is() -> None:
    schema = {"$defs": {"A": of("a", **{"$anchor": "x"})}, "allOf": [{"$ref": "#x"}, of("b")]}
    assert prepare_schema(schema, closes_objects=True) == prepare_schema(schema)
