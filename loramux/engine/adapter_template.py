"""The chat template of an adapter, which is rendered with a time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

TEMPLATE_SECONDS = 1.0
# The file names that jinja2 gives to the code of templates without a file.
_CODE_NAMES = frozenset({"<template>", "<unknown>"})


class TemplateTimeout(Exception):
    """A template ran for longer than its time limit."""


@dataclass(frozen=True, slots=True)
class AdapterTemplate:
    """The template of an adapter that shares the vocabulary of the base."""

    text: str | Mapping[str, str] | None
    """One template, or templates by name, of which tool_use is for requests with tools."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The named special tokens, such as eos_token, that its templates may use."""

    def choose(self, *, has_tools: bool) -> str:
        """Returns the template for a request; raises ValueError if there is none for it."""
        if isinstance(self.text, str):
            return self.text
        texts = self.text or {}
        chosen = texts.get("tool_use") if has_tools else None
        chosen = texts.get("default") if chosen is None else chosen
        if chosen is None:
            raise ValueError("it has no template with the name 'default'")
        return chosen


@contextmanager
def template_deadline(seconds: float) -> Iterator[None]:
    """Raises TemplateTimeout from a template that runs for longer, in this thread.

    The trace function sees every line of templates, and no line of other code.
    """
    ends_s = time.monotonic() + seconds

    def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > ends_s:
            raise TemplateTimeout(f"it ran for more than {seconds:g} s")
        return trace_lines

    def trace_calls(frame: FrameType, event: str, argument: object) -> Any:
        return trace_lines if frame.f_code.co_filename in _CODE_NAMES else None

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        yield
    finally:
        sys.settrace(before)
