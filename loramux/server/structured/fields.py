"""From the fields of a body that constrain the answer to one Grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from loramux.errors import InvalidRequest
from loramux.server.structured.schema import check_depth, prepare_schema
from loramux.server.structured.tags import structural_tag
from loramux.server.wire import GenerationBody, StructuredOutputs
from loramux.types.grammar import Grammar, GrammarOptions

MAX_GRAMMAR_BYTES = 1 << 19
MAX_PATTERN_BYTES = 1 << 16
"""Limit of regular expressions, and of grammars that are given as rules."""
MAX_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class AskedConstraint:
    """A constraint as a body asks for it."""

    kind: str
    """One of json, regex, choice, grammar, json_object and structural_tag."""
    value: Any
    param: str
    """The field that asks."""
    options: GrammarOptions = GrammarOptions()
    closes_objects: bool = False


def find_constraint(body: GenerationBody) -> AskedConstraint | None:
    """Return what constrains the answer; response_format takes precedence."""
    others = [found for found in (_structured_outputs(body), _guided(body)) if found is not None]
    asked = _response_format(body)
    if asked is not None:
        return asked
    if len(others) > 1:
        raise InvalidRequest(
            f"{others[0].param} and {others[1].param} exclude each other: give one.",
            param=others[1].param,
        )
    return others[0] if others else None


def make_grammar(asked: AskedConstraint) -> Grammar:
    """Return the grammar of a constraint; raises InvalidRequest beyond the limits."""
    param, value = asked.param, asked.value
    if isinstance(value, str):
        is_rules = asked.kind in ("regex", "grammar")
        check_size(value, param, MAX_PATTERN_BYTES if is_rules else MAX_GRAMMAR_BYTES)
    match asked.kind:
        case "json_object":
            return Grammar("json_schema", json.dumps(ANY_OBJECT), asked.options)
        case "json":
            return Grammar("json_schema", schema_text(value, asked), asked.options)
        case "regex":
            return Grammar("regex", _text(value, param))
        case "choice":
            return Grammar("lark", choice_lark(value, param))
        case "structural_tag":
            return Grammar("lark", structural_tag(_parsed(value, param), param), asked.options)
    return Grammar("lark", _lark(_text(value, param), param))


def schema_text(value: Any, asked: AskedConstraint) -> str:
    """Return the text of a schema that a request gave as an object, a Boolean or JSON text."""
    value = _parsed(value, asked.param)
    if isinstance(value, bool):
        value = {} if value else {"enum": []}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{asked.param} must be a JSON schema, an object.", param=asked.param)
    check_depth(value, asked.param)
    prepared = prepare_schema(value, closes_objects=asked.closes_objects)
    text = json.dumps(prepared, ensure_ascii=False, separators=(",", ":"))
    check_size(text, asked.param)
    return text


def choice_lark(choices: Any, param: str) -> str:
    """Return the grammar of one of several texts."""
    if not isinstance(choices, list) or not choices or not all(map(_is_text, choices)):
        raise InvalidRequest(f"{param} must be a list of strings that are not empty.", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"{param} has {len(choices)} choices; at most {MAX_CHOICES} are allowed.", param=param
        )
    text = "start: " + " | ".join(json.dumps(choice) for choice in choices)
    check_size(text, param)
    return text


def check_size(text: str, param: str, limit: int = MAX_GRAMMAR_BYTES) -> None:
    size = len(text.encode(errors="replace"))
    if size > limit:
        raise InvalidRequest(f"{param} has {size} bytes; at most {limit} are allowed.", param=param)


def _response_format(body: GenerationBody) -> AskedConstraint | None:
    given = body.response_format
    if given is None:
        return None
    kind, param = given.get("type"), "response_format"
    if kind == "text":
        return None
    value = given.get("value")  # TGI's word for the schema or the expression.
    if kind in ("json_object", "json"):
        schema = given.get("schema", value)
        if schema is None:
            return AskedConstraint("json_object", True, param)
        return AskedConstraint("json", schema, param)
    if kind == "regex":
        return AskedConstraint("regex", value, param)
    if kind == "json_schema":
        inner = given.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
        if schema is None:
            raise InvalidRequest(
                "response_format of type json_schema needs the schema in json_schema.schema.",
                param=param,
            )
        return AskedConstraint("json", schema, param)
    if kind == "structural_tag":
        return AskedConstraint("structural_tag", given, param)
    raise InvalidRequest(
        "response_format.type must be text, json_object, json_schema, regex or structural_tag, "
        f"got {kind!r}.",
        param=param,
    )


def _structured_outputs(body: GenerationBody) -> AskedConstraint | None:
    given = body.structured_outputs
    if given is None:
        return None
    return _one_of(given, _KINDS, "structured_outputs", prefix="structured_outputs.")


def _guided(body: GenerationBody) -> AskedConstraint | None:
    fields = {kind: getattr(body, f"guided_{kind}") for kind in _GUIDED}
    if body.nvext is not None:
        fields |= {
            kind: body.nvext[f"guided_{kind}"] for kind in _GUIDED if f"guided_{kind}" in body.nvext
        }
    try:
        given = msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"nvext: {error}.", param="nvext") from error
    return _one_of(given, _GUIDED[:-1], None, prefix="guided_")


def _one_of(
    given: StructuredOutputs, kinds: tuple[str, ...], param: str | None, *, prefix: str
) -> AskedConstraint | None:
    named = [kind for kind in kinds if getattr(given, kind) not in (None, False)]
    if kinds is _KINDS and given.json is False:
        named = ["json", *named]
    if not named and param is None:
        return None
    if len(named) != 1:
        names = ", ".join(f"{prefix}{kind}" for kind in named or kinds)
        wrong = "constraints exclude each other" if named else "one constraint is needed of"
        raise InvalidRequest(
            f"{wrong}: {names}.".capitalize(), param=param or f"{prefix}{named[0]}"
        )
    return AskedConstraint(
        named[0],
        getattr(given, named[0]),
        param or f"{prefix}{named[0]}",
        GrammarOptions(
            any_whitespace=not given.disable_any_whitespace,
            whitespace_pattern=given.whitespace_pattern,
        ),
        closes_objects=bool(given.disable_additional_properties),
    )


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}.", param=param) from error


def _text(value: Any, param: str) -> str:
    if not _is_text(value):
        raise InvalidRequest(f"{param} must be a string that is not empty.", param=param)
    return str(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _lark(text: str, param: str) -> str:
    """Return a Lark grammar; GBNF and EBNF (`root ::= …`) are converted."""
    if "::=" not in text:
        return text
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # The converter raises whatever its parser meets.
        raise InvalidRequest(
            f"{param} is not a valid GBNF grammar: {error}", param=param
        ) from error
