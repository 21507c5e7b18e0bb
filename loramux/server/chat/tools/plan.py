"""What the tools of a chat request change: its prompt, its grammar, and how it is answered."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loramux.backend.text import TextCodec
from loramux.base.threads import GRAMMAR_CHECKS
from loramux.engine.grammar.library import schema_options
from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import Tools
from loramux.server.chat.structured.check import require_enforceable
from loramux.server.chat.tools.definitions import ToolChoice, read_tools
from loramux.server.chat.tools.families import (
    TEXT_BEGIN,
    TEXT_END,
    Family,
    find_family,
    template_of,
    token_of,
)
from loramux.server.chat.tools.parser import CallParser
from loramux.types.grammar import Grammar, GrammarOptions
from loramux.types.sampling import SamplingParams

_NO_SYSTEM = "System role not supported"
_SHORT_ID_LENGTH = 9

Message = dict[str, Any]


def render_messages(
    messages: Sequence[Message],
    family: Family,
    tools: Sequence[Mapping[str, Any]],
    template: str,
) -> list[Message]:
    """Return the messages for the template; `tools` are listed if it does not read them."""
    if family.reads_tools:
        return [_with_short_ids(message) if family.short_ids else message for message in messages]
    written = [_as_text(message, family) for message in messages]
    return _with_tool_list(written, tools, template) if tools else written


def _with_short_ids(message: Message) -> Message:
    """Replace the ids of calls, of which the template takes nine letters and digits only."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])}
            if isinstance(call, dict) and isinstance(call.get("id"), str)
            else call
            for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]


def _as_text(message: Message, family: Family) -> Message:
    """Write calls and results as text, for a template that knows neither."""
    calls = message.get("tool_calls")
    if message.get("role") == "tool":
        result = {"tool_result": {"content": message.get("content")}}
        return {"role": "user", "content": json.dumps(result, ensure_ascii=False)}
    if not isinstance(calls, list) or not calls:
        return message
    written = [_call_text(call, family) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    text = [message["content"]] if isinstance(message.get("content"), str) else []
    return {**rest, "content": "\n".join(filter(None, [*text, *written]))}


def _call_text(call: Any, family: Family) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = function.get("name", "")
    return f"{family.before_name}{name}{family.before_arguments}{arguments}{family.after_call}"


def _with_tool_list(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], template: str
) -> list[Message]:
    listed = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'To call one, answer {"tool_call": {"name": its name, "arguments": its arguments}}. '
        f"To answer without one, answer {TEXT_BEGIN}your text{TEXT_END} as JSON."
    )
    first = messages[0] if messages else {}
    wants_user = _NO_SYSTEM in template
    if isinstance(first.get("content"), str) and (
        first.get("role") == "system" or (wants_user and first.get("role") == "user")
    ):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "user" if wants_user else "system", "content": text}, *messages]


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


_MAX_NOTES = 1000


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request calls tools."""

    family: Family
    choice: ToolChoice
    grammar: str
    has_schema: bool
    """Whether an answer without calls follows a schema."""

    def parser(self) -> CallParser:
        return CallParser(self.family, is_raw=self.has_schema)

    @property
    def notes(self) -> str:
        """Why schemas are enforced in part only, for a header of the reply; empty: none is."""
        notes = "; ".join(f"{tool}: {why}" for tool, why in self.choice.dropped.items())
        # A header holds printable ASCII alone.
        return "".join(c if " " <= c <= "~" else "?" for c in notes[:_MAX_NOTES])


async def plan_tools(
    given: Tools,
    whitespace: GrammarOptions,
    params: SamplingParams,
    codec: TextCodec,
    *,
    override: str | None,
) -> ToolPlan | None:
    """Return the plan of a chat with tools that may be called; raises InvalidRequest.

    `override`: the family, in place of that of the chat template.
    """
    if not given.tools and given.choice is None:
        return None
    tools = None if given.tools is None else [dict(tool) for tool in given.tools]
    family = find_family(codec, override)

    def work() -> ToolPlan | None:
        choice = read_tools(tools, given.choice, whitespace)
        if choice is None:
            return None
        content = _content_schema(params) if choice.mode == "auto" else None
        grammar = call_grammar(
            family,
            choice,
            codec,
            is_parallel=given.is_parallel,
            content=content,
        )
        require_enforceable(grammar, "tools")
        return ToolPlan(family, choice, grammar.encode(), content is not None)

    return await GRAMMAR_CHECKS.run(work)


def prompt_of(
    given: Sequence[dict[str, Any]],
    plan: ToolPlan | None,
    codec: TextCodec,
    *,
    override: str | None,
) -> tuple[Sequence[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages and the tools for the chat template."""
    has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in given)
    if plan is None and not has_calls:
        return given, None
    family = find_family(codec, override) if plan is None else plan.family
    listed = () if plan is None else plan.choice.listed
    messages = render_messages(given, family, listed, template_of(codec))
    tools = [dict(tool) for tool in listed] if family.reads_tools and listed else None
    return messages, tools


def _content_schema(params: SamplingParams) -> Grammar | None:
    """Return the schema that the body asks for beside its tools."""
    if params.grammar is None:
        return None
    grammar = Grammar.decode(params.grammar)
    if grammar.kind != "json_schema":
        raise InvalidRequest(
            "With tools that may be called, an answer can follow a JSON schema, and no other "
            "grammar: leave out the tools or the grammar.",
            param="tools",
        )
    return grammar
