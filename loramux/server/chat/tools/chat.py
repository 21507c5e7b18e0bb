"""How a chat is put to the model, and how its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from loramux.backend.text import TextCodec
from loramux.server.chat.conversation import Conversation
from loramux.server.chat.tools.parser import CallParser
from loramux.server.chat.tools.plan import ToolPlan, plan_tools, prompt_of
from loramux.server.chat.tools.reasoning import ReasoningSplitter, find_reasoning
from loramux.server.context import ServerOptions
from loramux.types.grammar import Grammar, GrammarOptions, ReasoningMarks
from loramux.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    tools: ToolPlan | None = None
    reasoning: ReasoningMarks | None = None
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the text of an answer is its content."""
        return self.tools is None and self.reasoning is None

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the engine; marks are read from the text, so it has them."""
        if self.is_plain:
            return params
        grammar = params.grammar if self.tools is None else self.tools.grammar
        if grammar is not None and self.reasoning is not None:
            after = replace(Grammar.decode(grammar), reasoning=self.reasoning)
            grammar = after.encode()
        return replace(params, grammar=grammar, skip_special_tokens=False)

    def call_parser(self) -> CallParser | None:
        return None if self.tools is None else self.tools.parser()

    def splitter(self) -> ReasoningSplitter | None:
        marks = self.reasoning
        return None if marks is None else ReasoningSplitter(is_open=marks.is_open)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    messages: Sequence[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    """What the chat template reads."""
    reply: ReplyFormat

    @property
    def notes(self) -> str | None:
        """Why schemas of tools are enforced in part only, for a header of the reply."""
        return None if self.reply.tools is None else self.reply.tools.notes or None


async def plan_chat(
    options: ServerOptions,
    chat: Conversation,
    whitespace: GrammarOptions,
    params: SamplingParams,
    codec: TextCodec,
) -> ChatPlan:
    """`whitespace`: what the schemas of tools allow in arguments."""
    override = options.tool_call_parser
    plan = await plan_tools(chat.tools, whitespace, params, codec, override=override)
    messages, tools = prompt_of(chat.messages, plan, codec, override=override)
    reply = ReplyFormat(
        plan,
        find_reasoning(options.reasoning_parser, codec),
        shows_reasoning=chat.shows_reasoning,
    )
    return ChatPlan(messages, tools, reply)
