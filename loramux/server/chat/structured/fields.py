"""From the fields of a body that constrain the answer to one Grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loramux.engine.grammar.library import schema_options
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.schema import check_depth, prepare_schema
from loramux.types.grammar import Grammar, GrammarOptions
from loramux.wire.text import ChatRequest, GenerationBody, StructuredOutputs

MAX_TAGS = 256


class Tag(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct):
    structures: list[Tag]
    triggers: list[str]


def structural_tag(value: Any, param: str, options: GrammarOptions) -> str:
    """Return the Lark grammar of {"structures": [{begin, schema, end}], "triggers": [text]}."""
    try:
        given = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"{param}: a structural tag has `structures` of begin, schema and end, and `triggers`: "
            f"{error}.",
            param=param,
        ) from error
    if not 0 < len(given.structures) <= MAX_TAGS:
        raise InvalidRequest(f"{param} needs 1 to {MAX_TAGS} structures.", param=param)
    json_options = schema_options(Grammar("lark", "", options))
    rules = []
    for number, tag in enumerate(given.structures):
        trigger = _trigger(tag, given.triggers, param)
        check_depth(tag.schema, param)
        schema = prepare_schema(tag.schema) if isinstance(tag.schema, dict) else {}
        parts = (
            _literal(tag.begin.removeprefix(trigger)),
            f"%json {json.dumps({**schema, 'x-guidance': json_options})}",
            _literal(tag.end),
        )
        rules.append(f"trigger_{number}[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag_{number}: trigger_{number} {' '.join(filter(None, parts))}")
    names = " | ".join(f"tag_{number}" for number in range(len(given.structures)))
    return "\n".join(
        ["%llguidance {}", f"start: ({names})* last", "last: TEXT", r"TEXT: /(.|\n)*/", *rules]
    )


def _trigger(tag: Tag, triggers: list[str], param: str) -> str:
    found = next((text for text in triggers if text and tag.begin.startswith(text)), None)
    if found is None:
        raise InvalidRequest(
            f"{param}: no trigger is the beginning of {tag.begin!r}. Add one to `triggers`.",
            param=param,
        )
    return found


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


MAX_GRAMMAR_BYTES = 1 << 19
MAX_PATTERN_BYTES = 1 << 16
"""Limit of regular expressions, and of grammars that are given as rules."""
MAX_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Strings, regular expressions and comments may contain the word too.
_LARK_PART = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\b\s*')
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
    asked = _response_format(body)
    if asked is not None:
        return replace(asked, options=json_options(body))
    others = [found for found in (_structured_outputs(body), _guided(body)) if found is not None]
    if len(others) > 1:
        raise InvalidRequest(
            f"{others[0].param} and {others[1].param} exclude each other: give one.",
            param=others[1].param,
        )
    return others[0] if others else None


def json_options(body: GenerationBody) -> GrammarOptions:
    """Return the whitespace that the body asks for, wherever its schema is."""
    given = body.structured_outputs or StructuredOutputs()
    is_free = given.disable_any_whitespace is False
    return GrammarOptions(
        whitespace="none" if given.disable_any_whitespace else "any" if is_free else "compact",
        whitespace_pattern=given.whitespace_pattern or _guided_fields(body).whitespace_pattern,
    )


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
            tags = structural_tag(_parsed(value, param), param, asked.options)
            return Grammar("lark", tags)
    return Grammar("lark", _lark(_text(value, param), param, asked.options))


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
    is_beside_tools = isinstance(body, ChatRequest) and bool(body.tools)
    param = None if is_beside_tools else "structured_outputs"
    return _one_of(body, given, _KINDS, param, prefix="structured_outputs.")


def _guided(body: GenerationBody) -> AskedConstraint | None:
    return _one_of(body, _guided_fields(body), _GUIDED[:-1], None, prefix="guided_")


def _guided_fields(body: GenerationBody) -> StructuredOutputs:
    fields = {kind: getattr(body, f"guided_{kind}") for kind in _GUIDED}
    if body.nvext is not None:
        fields |= {
            kind: body.nvext[f"guided_{kind}"] for kind in _GUIDED if f"guided_{kind}" in body.nvext
        }
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"nvext: {error}.", param="nvext") from error


def _one_of(
    body: GenerationBody,
    given: StructuredOutputs,
    kinds: tuple[str, ...],
    param: str | None,
    *,
    prefix: str,
) -> AskedConstraint | None:
    """Return the one constraint that is given; `param` None: there may be none."""
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
        json_options(body),
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


def _lark(text: str, param: str, options: GrammarOptions) -> str:
    """Return a Lark grammar; GBNF and EBNF (`root ::= …`) are converted."""
    if "::=" not in text:
        return _with_options(text, options)
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # The converter raises whatever its parser meets.
        raise InvalidRequest(
            f"{param} is not a valid GBNF grammar: {error}", param=param
        ) from error


def _with_options(lark: str, options: GrammarOptions) -> str:
    """Return a Lark grammar whose JSON schemas have the options, unless they have their own."""
    parts, start = [], 0
    for found in _LARK_PART.finditer(lark):
        if not found[0].startswith("%json") or found.start() < start:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # The library says what is wrong with it.
        if isinstance(schema, dict):
            schema = {"x-guidance": schema_options(Grammar("lark", "", options)), **schema}
            parts += [lark[start : found.start()], f"%json {json.dumps(schema)}"]
            start = end
    return "".join([*parts, lark[start:]])
