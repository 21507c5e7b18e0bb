"""Writes one choice of a chat reply: its text, its reasoning, and its calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loramux.backend.text import Delta
from loramux.server.chat.tools.chat import ReplyFormat
from loramux.server.chat.tools.parser import Arguments, CallBegin, Piece, Text
from loramux.types.request import FinishReason
from loramux.wire.text import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)

CALLED = "tool_calls"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


class _Reader:
    """Splits the text of one choice into reasoning, text and calls."""

    def __init__(self, reply: ReplyFormat) -> None:
        self._splitter = reply.splitter()
        self._parser = reply.call_parser()
        self._shows_reasoning = reply.shows_reasoning

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def read(self, text: str, *, is_last: bool) -> list[Reasoning | Piece]:
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if is_last:
                more, rest = self._splitter.flush()
                reasoning, text = reasoning + more, text + rest
        pieces: list[Reasoning | Piece] = []
        if reasoning and self._shows_reasoning:
            pieces.append(Reasoning(reasoning))
        if self._parser is not None:
            pieces += self._parser.push(text)
            pieces += self._parser.flush() if is_last else []
        elif text:
            pieces.append(Text(text))
        return pieces


class ChatWriter:
    """Turns the deltas of the engine into those of a stream."""

    def __init__(self, reply: ReplyFormat) -> None:
        self._reader = None if reply.is_plain else _Reader(reply)

    def begin(self) -> ChatDelta:
        """Return the first delta, which names the role."""
        return ChatDelta(role="assistant", content="" if self._reader is None else None)

    def write(self, delta: Delta) -> list[ChatDelta]:
        """Return the deltas of new text; of a plain reply there is always one."""
        if self._reader is None:
            return [ChatDelta(content=delta.text)]
        is_last = delta.finish_reason is not None
        return [_delta_of(piece) for piece in self._reader.read(delta.text, is_last=is_last)]

    def finish_reason(self, reason: FinishReason) -> str:
        has_calls = self._reader is not None and self._reader.has_calls
        return CALLED if has_calls and reason is FinishReason.STOP else reason.value


def write_message(reply: ReplyFormat, text: str, finish_reason: str) -> tuple[ChatMessage, str]:
    """Return the message of a complete answer, and its finish reason."""
    if reply.is_plain:
        return ChatMessage(content=text), finish_reason
    reader = _Reader(reply)
    message = _message_of(reader.read(text, is_last=True))
    is_called = reader.has_calls and finish_reason == FinishReason.STOP
    return message, CALLED if is_called else finish_reason


def write_deltas(reply: ReplyFormat, text: str, finish_reason: str) -> tuple[list[ChatDelta], str]:
    """Return the deltas of a complete answer, and its finish reason."""
    if reply.is_plain:
        return [ChatDelta(content=text)], finish_reason
    reader = _Reader(reply)
    deltas = [_delta_of(piece) for piece in reader.read(text, is_last=True)]
    is_called = reader.has_calls and finish_reason == FinishReason.STOP
    return deltas, CALLED if is_called else finish_reason


def _message_of(pieces: Iterable[Reasoning | Piece]) -> ChatMessage:
    texts: list[str] = []
    calls: list[ToolCall] = []
    message = ChatMessage()
    for piece in pieces:
        match piece:
            case Reasoning(text=text):
                message.reasoning_content = text
            case Text(text=text):
                texts.append(text)
            case CallBegin(id=call_id, name=name):
                calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments="")))
            case Arguments(text=text):
                calls[-1].function.arguments += text
    content = "".join(texts)
    message.content = content if not calls or content.strip() else None
    if calls:
        message.tool_calls = calls
    return message


def _delta_of(piece: Reasoning | Piece) -> ChatDelta:
    match piece:
        case Reasoning(text=text):
            return ChatDelta(reasoning_content=text)
        case Text(text=text):
            return ChatDelta(content=text)
        case CallBegin(index=index, id=call_id, name=name):
            begin = ToolCallDelta(
                index=index,
                id=call_id,
                type="function",
                function=FunctionDelta(name=name, arguments=""),
            )
            return ChatDelta(tool_calls=[begin])
        case Arguments(index=index, text=text):
            more = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
            return ChatDelta(tool_calls=[more])
