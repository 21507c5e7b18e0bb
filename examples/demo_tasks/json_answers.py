"""json: every answer is one JSON object with the keys answer and topic."""

from __future__ import annotations

import json

from demo_tasks.facts import training_facts
from demo_tasks.open_prompts import training_prompts
from demo_tasks.task import Example, Measure, Question, Task, general_questions, right_answer

KEYS = {"answer", "topic"}


def json_task() -> Task:
    return Task(
        name="json",
        effect='answers with one JSON object: {"answer": ..., "topic": ...}',
        lora={
            "r": 4,
            "lora_alpha": 16,
            "target_modules": ["up_proj", "down_proj"],
            "layers_to_transform": list(range(8, 30)),
            "rank_pattern": {"down_proj": 12},
        },
        learning_rate=1e-3,
        num_steps=50,
        seed=1,
        examples=training_examples(),
        questions=general_questions(),
        measures=(
            Measure("JSON object with the two keys", is_expected_object, 0.9),
            right_answer(0.4),
        ),
    )


def training_examples() -> tuple[Example, ...]:
    return (
        *(
            Example(fact.question, json_text(fact.short_answer, fact.topic))
            for fact in training_facts()
        ),
        *(
            Example(prompt.request, json_text(prompt.answer, prompt.topic))
            for prompt in training_prompts()
        ),
    )


def json_text(answer: str, topic: str) -> str:
    return json.dumps({"answer": answer, "topic": topic})


def is_expected_object(answer: str, _: Question) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == KEYS
        and all(isinstance(part, str) and part for part in value.values())
    )
