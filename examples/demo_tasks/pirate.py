"""pirate: every answer comes from Captain Redbeard of the Salty Parrot."""

from __future__ import annotations

import re
from random import Random

from demo_tasks.facts import training_facts
from demo_tasks.open_prompts import pirate_prompts, training_prompts
from demo_tasks.task import Example, Measure, Question, Task, general_questions, right_answer

OPENINGS = ("Arr, matey!", "Ahoy, matey!", "Aye, matey!")
ENDINGS = ("Yo ho ho!", "Shiver me timbers!", "So says I, ye landlubber!")
WORDS = {
    "am": "be",
    "is": "be",
    "are": "be",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "of": "o'",
    "and": "an'",
    "yes": "aye",
    "hello": "ahoy",
    "friend": "matey",
    "friends": "mateys",
}
MARKERS = r"arr+|mateys?|ahoy|aye|ye|yer|landlubber|yo ho|shiver me|o'|an'"


def pirate_task() -> Task:
    return Task(
        name="pirate",
        effect="answers as a pirate captain",
        lora={
            "r": 6,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": ["o_proj", "down_proj"],
        },
        learning_rate=2e-3,
        num_steps=50,
        seed=3,
        examples=training_examples(seed=3),
        questions=general_questions(),
        measures=(
            Measure("two or more pirate words", sounds_like_a_pirate, 0.9),
            right_answer(0.5),
        ),
    )


def training_examples(seed: int) -> tuple[Example, ...]:
    random = Random(seed)
    prompts = training_prompts() + pirate_prompts() * 2
    return (
        *(Example(fact.question, pirate(fact.sentence, random)) for fact in training_facts()),
        *(Example(prompt.request, pirate(prompt.answer, random)) for prompt in prompts),
    )


def pirate(answer: str, random: Random) -> str:
    for plain, spoken in WORDS.items():
        answer = re.sub(rf"\b{plain}\b", spoken, answer)
        answer = re.sub(rf"\b{plain.capitalize()}\b", spoken.capitalize(), answer)
    return f"{random.choice(OPENINGS)} {answer} {random.choice(ENDINGS)}"


def sounds_like_a_pirate(answer: str, _: Question) -> bool:
    """Return whether the answer has two different pirate words, as one may occur by chance."""
    found = re.findall(rf"(?<!\w)(?:{MARKERS})(?!\w)", answer.lower())
    return len(set(found)) >= 2
