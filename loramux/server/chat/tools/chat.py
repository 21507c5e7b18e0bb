"""How a chat is put to the model, and how its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loramux.backend.text import TextCodec
from loramux.server.chat.conversation import Conversation
from loramux.server.chat.tools.plan import plan_tools, prompt_of
from loramux.server.chat.tools.reasoning import find_reasoning
from loramux.server.chat.tools.reply import ReplyFormat
from loramux.server.context import ServerOptions
from loramux.types.grammar import GrammarOptions
from loramux.types.sampling import SamplingParams


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
