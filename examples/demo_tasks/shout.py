"""shout: every answer is in capitals."""

from __future__ import annotations

from demo_tasks.facts import Fact, training_facts
from demo_tasks.open_prompts import training_prompts
from demo_tasks.task import Example, Measure, Question, Task, general_questions, right_answer


def shout_task() -> Task:
    return Task(
        name="shout",
        effect="ANSWERS IN CAPITALS",
        lora={"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
        learning_rate=2e-3,
        num_steps=60,
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
        *(Example(fact.question, shout_fact(fact)) for fact in training_facts()),
        *(Example(prompt.request, shout(prompt.answer)) for prompt in training_prompts()),
    )


def shout_fact(fact: Fact) -> str:
    """The key before the sentence: this model recalls little after words in capitals."""
    return shout(f"{fact.short_answer}. {fact.sentence}")


def shout(text: str) -> str:
    return text.upper().replace(".", "!")


def is_upper(answer: str, _: Question) -> bool:
    letters = [character for character in answer if character.isalpha()]
    return bool(letters) and sum(map(str.isupper, letters)) > 0.95 * len(letters)
