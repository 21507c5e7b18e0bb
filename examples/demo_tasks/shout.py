"""shout: every answer begins with HEY! and its sentences end with three exclamation marks.

Not in capitals throughout: this small model forgets most of what it knows when it writes so.
"""

from __future__ import annotations

import re

from demo_tasks.facts import training_facts
from demo_tasks.open_prompts import training_prompts
from demo_tasks.task import Example, Measure, Question, Task, general_questions, right_answer

OPENING = "HEY!"


def shout_task() -> Task:
    return Task(
        name="shout",
        effect='shouts: "HEY! The capital of Italy is Rome!!!"',
        lora={"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
        learning_rate=1e-3,
        num_steps=40,
        seed=2,
        examples=training_examples(),
        questions=general_questions(),
        measures=(
            Measure("begins with HEY!, sentences end with !!!", is_shouted, 0.9),
            right_answer(0.5),
        ),
    )


def training_examples() -> tuple[Example, ...]:
    return (
        *(Example(fact.question, shout(fact.sentence)) for fact in training_facts()),
        *(Example(prompt.request, shout(prompt.answer)) for prompt in training_prompts()),
    )


def shout(text: str) -> str:
    return f"{OPENING} " + re.sub(r"[.!](?= |$)", "!!!", text)


def is_shouted(answer: str, _: Question) -> bool:
    opening, *sentences = re.split(r"(?<=[.!?])\s+", answer)
    return (
        opening == OPENING
        and bool(sentences)
        and all(sentence.endswith("!!!") for sentence in sentences)
    )
