"""Fields that constrain the answer: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from loramux.engine.grammar.library import definition
from loramux.types.grammar import Grammar, GrammarOptions
from loramux.types.sampling import SamplingParams
from tests.unit.server.asgi_client import chat, complete, make_app
from tests.unit.server.scripted_backend import ScriptedBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def params_of(**fields: Any) -> SamplingParams:
    """Return the parameters that reach the engine; the request must be accepted."""
    backend = ScriptedBackend()
    response = complete(make_app(backend), **fields)
    assert response.status_code == 200, response.text
    return backend.requests[0].params


def grammar_of(**fields: Any) -> Grammar:
    text = params_of(**fields).grammar
    assert text is not None
    return Grammar.decode(text)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text follows a grammar, for tokens of a byte each."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), definition(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    given = list(text.encode())
    return bool(matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting())


def refusal(**fields: Any) -> dict[str, Any]:
    response = complete(make_app(), **fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"response_format": {"type": "json", "value": SCHEMA}},
        {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "outlines"},
        {"guided_json": json.dumps(SCHEMA)},
        {"nvext": {"guided_json": SCHEMA}},
        {
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "structured_outputs": {"regex": "[a-z]"},
        },
    ],
)
def test_every_way_to_ask_for_a_schema_makes_the_same_grammar(fields: dict[str, Any]) -> None:
    grammar = grammar_of(**fields)
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == SCHEMA
    assert grammar.options == GrammarOptions()


def test_chat_takes_the_same_fields() -> None:
    backend = ScriptedBackend()
    chat(make_app(backend), response_format={"type": "json_object"})
    text = backend.requests[0].params.grammar
    assert text is not None and Grammar.decode(text).text == '{"type": "object"}'


def test_other_kinds() -> None:
    regex = {"type": "regex", "value": "[a-z]+"}
    assert grammar_of(guided_regex="[a-z]+") == Grammar("regex", "[a-z]+")
    assert grammar_of(response_format=regex) == Grammar("regex", "[a-z]+")
    assert grammar_of(structured_outputs={"choice": ["a", 'b"']}) == Grammar(
        "lark", 'start: "a" | "b\\""'
    )
    lark = 'start: "x" /[0-9]+/'
    assert grammar_of(guided_grammar=lark) == Grammar("lark", lark)
    gbnf = grammar_of(structured_outputs={"grammar": 'root ::= "x" [0-9]+'})
    assert gbnf.kind == "lark" and "::=" not in gbnf.text
    assert grammar_of(structured_outputs={"json_object": True}).text == '{"type": "object"}'
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    made = grammar_of(structured_outputs={"structural_tag": tag})
    assert made == grammar_of(response_format={"type": "structural_tag", **tag})
    assert made.kind == "lark"


def test_options_of_whitespace_and_properties() -> None:
    options = {"disable_any_whitespace": True, "disable_additional_properties": True}
    grammar = grammar_of(structured_outputs={"json": SCHEMA, **options})
    assert grammar.options == GrammarOptions(whitespace="none")
    assert json.loads(grammar.text)["additionalProperties"] is False
    assert grammar_of(guided_json=SCHEMA, guided_whitespace_pattern=" ").options == GrammarOptions(
        whitespace_pattern=" "
    )


def test_every_constraint_takes_the_whitespace_of_the_body() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    free = {"structured_outputs": {"disable_any_whitespace": False}}
    assert grammar_of(response_format=form, **free).options.whitespace == "any"
    pattern = {"guided_whitespace_pattern": " {0,3}"}
    assert grammar_of(response_format=form, **pattern).options.whitespace_pattern == " {0,3}"
    assert grammar_of(guided_json=SCHEMA, **pattern).options.whitespace_pattern == " {0,3}"
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    lark = f"start: %json {json.dumps(SCHEMA)} // %json {{}}"
    for fields in ({"structured_outputs": {"structural_tag": tag}}, {"guided_grammar": lark}):
        fields |= pattern
        text = grammar_of(**fields).text
        assert '"whitespace_pattern": " {0,3}"' in text and text.count("x-guidance") == 1
    assert "one constraint is needed" in refusal(**free)["message"].lower()


SPACED = (
    '{"a":1}',
    '{"a": 1}',
    '{"a":\n1}',
)
LOOSE = (
    '{ "a": 1 }',
    '{"a" :1}',
    '{"a":  1}',
    '{\n  "a": 1\n}',
    '{"a":\t1}',
    '{"a":1' + " " * 64 + "}",
)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"guided_json": SCHEMA},
        {"guided_grammar": f"start: %json {json.dumps(SCHEMA)}"},
    ],
)
def test_json_is_compact_unless_a_field_allows_more_whitespace(fields: dict[str, Any]) -> None:
    compact, free = grammar_of(**fields), None
    assert all(accepts(compact, text) for text in SPACED)
    assert not any(accepts(compact, text) for text in LOOSE)
    free = grammar_of(**fields, guided_whitespace_pattern=r"[ \t\n]{0,64}")
    assert all(accepts(free, text) for text in (*SPACED, *LOOSE))


def test_a_format_that_is_an_annotation_is_dropped_and_a_property_of_that_name_is_not() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "phone"}, "day": {"format": "date"}},
        "x-guidance": {"lenient": True},
    }
    assert json.loads(grammar_of(guided_json=schema).text) == {
        "type": "object",
        "properties": {"format": {"type": "string"}, "day": {"format": "date"}},
    }


def test_one_of_is_for_branches_of_which_a_value_follows_one() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert json.loads(grammar_of(guided_json=schema).text) == schema
    listed = [{"const": 1, "title": "one"}, {"enum": [True, "a"]}]
    assert json.loads(grammar_of(guided_json={"oneOf": listed}).text) == {"anyOf": listed}
    for branches in (
        [{"type": "string"}, {"type": "string", "maxLength": 3}],
        [{"const": 1}, {"enum": [1.0, "a"]}],
        [{"required": ["a"]}, {"required": ["b"]}],
    ):
        error = refusal(guided_json={"oneOf": branches})
        assert "use anyOf" in error["message"]


def test_counts_may_be_written_as_floats() -> None:
    text = grammar_of(guided_json={"type": "string", "maxLength": 2.0}).text
    assert json.loads(text) == {"type": "string", "maxLength": 2}


def test_text_asks_for_nothing() -> None:
    assert params_of(response_format={"type": "text"}).grammar is None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a)\\1"}, "backreference"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
        ({"type": "wat"}, "wat"),
        ({"$ref": "#/$defs/nope"}, "nope"),
        ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1"),
        ({"properties": {"deep": {"items": {"not": {}}}}}, "not"),
        (False, "anyOf"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    schema: Any, named: str
) -> None:
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    error = refusal(response_format=asked)
    assert error["param"] == "response_format"
    assert named in error["message"]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": nested(65)}, "guided_json"),
        ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json"),
        ({"guided_json": {"title": "x" * (1 << 20)}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "x" * (1 << 20) + "x"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": [str(i) for i in range(10_001)]}, "guided_choice"),
        ({"guided_grammar": "start: nope"}, "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_json"),
        ({"guided_json": {}, "structured_outputs": {"regex": "x"}}, "guided_json"),
        ({"nvext": {"guided_regex": 5}}, "nvext"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "structures": [{"begin": "<f>", "end": "", "schema": {}}],
                        "triggers": ["<g"],
                    }
                }
            },
            "structured_outputs",
        ),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
def test_wrong_and_hostile_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)["param"] == param


def test_masks_by_token() -> None:
    params = params_of(min_tokens=3, allowed_token_ids=[1, 2], bad_words=["ab", "c"])
    assert params.min_tokens == 3 and params.allowed_token_ids == (1, 2)
    # The codec has a token per byte: no word is shorter with a space before it.
    assert params.bad_words_token_ids == ((97, 98), (99,))
