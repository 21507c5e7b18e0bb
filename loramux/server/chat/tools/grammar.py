"""The grammar of an answer that may or must call tools."""

from __future__ import annotations

import json
import re

from loramux.backend.text import TextCodec
from loramux.engine.grammar.library import schema_options
from loramux.server.chat.tools.definitions import ToolChoice
from loramux.server.chat.tools.families import TEXT_BEGIN, TEXT_END, Family, token_of
from loramux.types.grammar import Grammar

# Text may hold these tokens, with which some models mark their reasoning.
_REASONING_MARKS = ("<think>", "</think>")
_ANY_STRING = Grammar.of_schema({"type": "string"})


def call_grammar(
    family: Family,
    choice: ToolChoice,
    codec: TextCodec,
    *,
    is_parallel: bool,
    content: Grammar | None = None,
) -> Grammar:
    """Return the grammar of calls, and of text where the choice allows it.

    `content`: the JSON schema that an answer without calls follows.
    """
    texts = _Texts(family, codec)
    is_single = family.one_call or choice.is_named or not is_parallel
    again = "" if is_single else f"({texts.rule(family.separator + family.before_name)} call)*"
    rules = [
        "%llguidance {}",
        f"calls: call {again} {texts.rule(family.closing)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(choice.tools))),
    ]
    for number, tool in enumerate(choice.tools):
        before = texts.rule(tool.name + family.before_arguments)
        after = texts.rule(family.after_call)
        rules.append(f"call_{number}: {before} arguments_{number} {after}")
        rules.append(f"arguments_{number}: {_json_rule(tool.grammar)}")
    calls = f"{texts.rule(family.begin)} calls"
    if choice.mode == "required":
        rules.append(f"start: {calls}")
    elif content is not None or family.wraps_text:
        value = _json_rule(content or _ANY_STRING)
        if family.wraps_text:
            value = f"{_quoted(TEXT_BEGIN)} {value} {_quoted(TEXT_END)}"
        rules += [f"start: {calls} | value", f"value: {value}"]
    else:
        rules += texts.mixed(calls)
    return Grammar("lark", "\n".join(rules))


class _Texts:
    """Writes fixed texts as Lark; marks that are tokens of the model are written by their ids."""

    def __init__(self, family: Family, codec: TextCodec) -> None:
        self._family = family
        tokens = {mark: token_of(codec, mark) for mark in family.marks}
        self._tokens = {mark: token for mark, token in tokens.items() if token is not None}
        self._marks = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        found = (token_of(codec, mark) for mark in _REASONING_MARKS)
        self._reasoning = [token for token in found if token is not None]

    def rule(self, text: str) -> str:
        """Return the symbols of a fixed text; an empty one has none."""
        parts, start = [], 0
        for found in self._marks.finditer(text):
            parts += [_quoted(text[start : found.start()]), f"<[{self._tokens[found[0]]}]>"]
            start = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[start:])]))

    def mixed(self, calls: str) -> list[str]:
        """Return the rules of an answer that is text, calls, or text before calls."""
        family = self._family
        if not family.text_precedes:
            first = re.escape(family.begin[0])
            return [f"start: {calls} | text", *self._text(f"/([^{first}](.|\\n)*)?/")]
        # A call begins wherever its mark is, so that text has none.
        mark = family.marks[0]
        text = self._text(f"/(.|\\n)*/ & ~/(.|\\n)*{_pattern(mark)}(.|\\n)*/")
        if mark in self._tokens:
            return [f"start: text ({calls})?", *text]
        rest = self.rule(family.begin.removeprefix(mark))
        return [
            f"start: text | trigger {rest} calls",
            f"trigger[lazy]: /(.|\\n)*/ {_quoted(mark)}",
            *text,
        ]

    def _text(self, pattern: str) -> list[str]:
        marks = " | ".join(f"<[{token}]>" for token in self._reasoning)
        more = f" (({marks}) MORE)*" if marks else ""
        return [f"text: TEXT{more}", f"TEXT: {pattern}", "MORE: /(.|\\n)*/"]


def _json_rule(grammar: Grammar) -> str:
    schema = {**json.loads(grammar.text), "x-guidance": schema_options(grammar)}
    return f"%json {json.dumps(schema)}"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
