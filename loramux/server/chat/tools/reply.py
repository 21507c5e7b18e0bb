"""How a chat is answered: with calls, with reasoning, or with text alone."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from loramux.server.chat.tools.parser import CallParser
from loramux.server.chat.tools.plan import ToolPlan
from loramux.server.chat.tools.reasoning import ReasoningSplitter
from loramux.types.grammar import Grammar, ReasoningMarks
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
