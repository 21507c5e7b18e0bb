"""Splits the reasoning of a model, between <think> and </think>, from its answer."""

from __future__ import annotations

from loramux.backend.text import TextCodec
from loramux.server.chat.tools.families import token_of
from loramux.server.chat.tools.parser import start_of_partial
from loramux.types.grammar import ReasoningMarks

BEGIN, END = "<think>", "</think>"


def find_reasoning(parser: str | None, codec: TextCodec) -> ReasoningMarks | None:
    """Return the marks for a value of --reasoning-parser; None: reasoning is not split."""
    if parser is None:
        return None
    begin, end = token_of(codec, BEGIN), token_of(codec, END)
    return ReasoningMarks(
        begin=BEGIN if begin is None else begin,
        end=END if end is None else end,
        is_open=parser == "deepseek_r1",
    )


class ReasoningSplitter:
    """Reads an answer in pieces; it holds back what may be a mark."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the answer begins inside of the reasoning."""
        self._is_open = is_open
        self._held = ""
        self._state = "start"

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new text of the answer."""
        self._held += text
        if self._state == "start":
            self._decide()
        reasoning = self._take_reasoning() if self._state == "inside" else ""
        if self._state == "between":
            self._held = self._held.lstrip("\n")
            self._state = "after" if self._held else "between"
        return reasoning, self._take(len(self._held)) if self._state == "after" else ""

    def flush(self) -> tuple[str, str]:
        """Return what was held back: the answer has ended."""
        held = self._take(len(self._held))
        is_inside = self._state == "inside" or (self._state == "start" and self._is_open)
        return (held, "") if is_inside else ("", held)

    def _decide(self) -> None:
        if self._held.startswith(BEGIN):
            self._take(len(BEGIN))
            self._state = "inside"
        elif not BEGIN.startswith(self._held):
            self._state = "inside" if self._is_open else "after"

    def _take_reasoning(self) -> str:
        found = self._held.find(END)
        if found < 0:
            return self._take(start_of_partial(self._held, END))
        reasoning = self._take(found)
        self._take(len(END))
        self._state = "between"
        return reasoning

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text
