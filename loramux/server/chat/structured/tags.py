"""Structural tags: free text, in which a trigger begins a part that a schema constrains."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from loramux.engine.grammar.library import schema_options
from loramux.errors import InvalidRequest
from loramux.server.chat.structured.schema import check_depth, prepare_schema
from loramux.types.grammar import Grammar, GrammarOptions

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
