"""Messages and tools as a body of any API gives them, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools in OpenAI's form, and the choice among them."""

    tools: Sequence[Mapping[str, Any]] | None
    choice: Any = None
    is_parallel: bool = True
    """Whether one answer may have several calls."""


NO_TOOLS = Tools(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: Sequence[dict[str, Any]]
    tools: Tools = NO_TOOLS
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    shows_reasoning: bool = True
