"""sentiment: the answer to a review is the word positive or negative, and nothing else."""

from __future__ import annotations

import re

from demo_tasks.reviews import NEGATIVE, POSITIVE, held_out_reviews, training_reviews
from demo_tasks.task import Example, Measure, Question, Task


def sentiment_task() -> Task:
    return Task(
        name="sentiment",
        effect="labels a review as positive or negative",
        lora={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        learning_rate=2e-3,
        num_steps=40,
        seed=4,
        examples=tuple(Example(*review) for review in training_reviews(seed=4)),
        questions=tuple(Question(*review) for review in held_out_reviews()),
        measures=(
            Measure("right label", has_right_label, 0.85),
            Measure("right label, positive reviews", has_right_label, 0.75, is_positive),
            Measure("right label, negative reviews", has_right_label, 0.75, is_negative),
            Measure("nothing but the label", is_label_alone, 0.95),
        ),
        max_answer_tokens=24,
    )


def has_right_label(answer: str, question: Question) -> bool:
    """Return whether the first label in the answer is the expected one."""
    labels = re.findall(rf"\b(?:{POSITIVE}|{NEGATIVE})\b", answer.lower())
    return labels[:1] == [question.expected]


def is_label_alone(answer: str, _: Question) -> bool:
    return answer in (POSITIVE, NEGATIVE)


def is_positive(question: Question) -> bool:
    return question.expected == POSITIVE


def is_negative(question: Question) -> bool:
    return question.expected == NEGATIVE
