"""Writes one choice of a chat reply: its text, and its calls if the request has tools."""

from __future__ import annotations

from collections.abc import Iterable

from loramux.backend import Delta
from loramux.server.tools.parser import Arguments, CallBegin, Piece, Text
from loramux.server.tools.plan import ToolPlan
from loramux.server.wire import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from loramux.types.request import FinishReason

CALLED = "tool_calls"


class ChatWriter:
    """Turns the deltas of the engine into those of a stream."""

    def __init__(self, plan: ToolPlan | None) -> None:
        self._parser = None if plan is None else plan.parser()

    def begin(self) -> ChatDelta:
        """Return the first delta, which names the role."""
        return ChatDelta(role="assistant", content="" if self._parser is None else None)

    def write(self, delta: Delta) -> list[ChatDelta]:
        """Return the deltas of new text; without tools there is always one."""
        if self._parser is None:
            return [ChatDelta(content=delta.text)]
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.flush()
        return [_delta_of(piece) for piece in pieces]

    def finish_reason(self, reason: FinishReason) -> str:
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return CALLED if has_calls and reason is FinishReason.STOP else reason.value


def write_message(plan: ToolPlan | None, text: str, finish_reason: str) -> tuple[ChatMessage, str]:
    """Return the message of a complete answer, and its finish reason."""
    if plan is None:
        return ChatMessage(content=text), finish_reason
    parser = plan.parser()
    message = _message_of([*parser.push(text), *parser.flush()])
    is_called = parser.num_calls > 0 and finish_reason == FinishReason.STOP
    return message, CALLED if is_called else finish_reason


def _message_of(pieces: Iterable[Piece]) -> ChatMessage:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for piece in pieces:
        match piece:
            case Text(text=text):
                texts.append(text)
            case CallBegin(id=call_id, name=name):
                calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments="")))
            case Arguments(text=text):
                calls[-1].function.arguments += text
    content = "".join(texts)
    if not calls:
        return ChatMessage(content=content)
    return ChatMessage(content=content if content.strip() else None, tool_calls=calls)


def _delta_of(piece: Piece) -> ChatDelta:
    match piece:
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
