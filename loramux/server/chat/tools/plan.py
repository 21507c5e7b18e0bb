"""What the tools of a chat request change: its prompt, its grammar, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loramux.backend.text import TextCodec
from loramux.base.threads import GRAMMAR_CHECKS
from loramux.errors import InvalidRequest
from loramux.server.chat.conversation import Tools
from loramux.server.chat.structured.check import require_enforceable
from loramux.server.chat.tools.definitions import ToolChoice, read_tools
from loramux.server.chat.tools.families import Family, find_family, template_of
from loramux.server.chat.tools.grammar import call_grammar
from loramux.server.chat.tools.messages import render_messages
from loramux.server.chat.tools.parser import CallParser
from loramux.types.grammar import Grammar, GrammarOptions
from loramux.types.sampling import SamplingParams

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
