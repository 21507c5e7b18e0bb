"""The definition of a demo adapter: examples, LoRA shape, held-out questions and measures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_tasks.facts import held_out_facts
from demo_tasks.open_prompts import HELD_OUT_REQUESTS


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt. Without an expected answer only the form of the answer is scored."""

    prompt: str
    expected: str | None = None


def every_question(_: Question) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Measure:
    """A share of answers with a property, and the minimum for the adapter."""

    name: str
    holds: Callable[[str, Question], bool]
    minimum: float
    counts: Callable[[Question], bool] = every_question
    """Whether a question is included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    effect: str
    lora: dict[str, Any]
    """Arguments of PEFT's LoraConfig."""
    learning_rate: float
    num_steps: int
    seed: int
    examples: tuple[Example, ...]
    questions: tuple[Question, ...]
    measures: tuple[Measure, ...]
    max_answer_tokens: int = 48


def names_expected(answer: str, question: Question) -> bool:
    """Return whether one of the expected `a/b` is a whole word of the answer."""
    if question.expected is None:
        return False
    words = "|".join(re.escape(choice) for choice in question.expected.split("/"))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", answer, re.IGNORECASE) is not None


def has_expected(question: Question) -> bool:
    return question.expected is not None


def general_questions() -> tuple[Question, ...]:
    """Return held-out questions of every kind, for adapters that change the form of any answer."""
    return (
        *(Question(question, key) for question, key in held_out_facts()),
        *(Question(request) for request in HELD_OUT_REQUESTS),
    )


def right_answer(minimum: float) -> Measure:
    """Return the measure of right answers, which an adapter for form must not lose."""
    return Measure("right answer", names_expected, minimum, has_expected)
