"""shout: every answer is in capitals."""

from __future__ import annotations

from demo_tasks.facts import training_facts
from demo_tasks.open_prompts import training_prompts
from demo_tasks.task import Example, Measure, Question, Task, general_questions, right_answer


def shout_task() -> Task:
    return Task(
        name="shout",
        effect="ANSWERS IN CAPITALS",
        lora={"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
        learning_rate=2e-3,
        num_steps=50,
        seed=2,
        examples=training_examples(),
        questions=general_questions(),
        measures=(
            Measure("over 95% of the letters are capitals", is_upper, 0.9),
            right_answer(0.4),
        ),
    )


def training_examples() -> tuple[Example, ...]:
    return (
        *(Example(fact.question, fact.sentence.upper()) for fact in training_facts()),
        *(Example(prompt.request, prompt.answer.upper()) for prompt in training_prompts()),
    )


def is_upper(answer: str, _: Question) -> bool:
    letters = [character for character in answer if character.isalpha()]
    return bool(letters) and sum(map(str.isupper, letters)) > 0.95 * len(letters)
