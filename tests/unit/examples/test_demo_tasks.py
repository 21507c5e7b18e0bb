from __future__ import annotations

import re

import pytest
from demo_tasks.catalog import demo_tasks
from demo_tasks.json_answers import is_expected_object
from demo_tasks.pirate import sounds_like_a_pirate
from demo_tasks.reviews import HELD_OUT_REVIEWS, NEGATIVE, POSITIVE, SUBJECTS
from demo_tasks.sentiment import has_right_label, is_label_alone
from demo_tasks.shout import is_shouted
from demo_tasks.task import Question, Task, names_expected

TASKS = demo_tasks()
ANY = Question("?")

each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def words(text: str) -> str:
    """Normalize case and punctuation, so that a comma does not make a prompt new."""
    return " ".join(re.findall(r"\w+", text.lower()))


@each_task
def test_no_held_out_prompt_was_trained_on(task: Task) -> None:
    trained = {words(example.prompt) for example in task.examples}
    assert trained
    assert trained.isdisjoint(words(question.prompt) for question in task.questions)


def test_held_out_reviews_are_of_other_trades() -> None:
    trained = {subject.removeprefix("the ") for subject in SUBJECTS}
    for review in (review for reviews in HELD_OUT_REVIEWS.values() for review in reviews):
        assert trained.isdisjoint(words(review).split())


def test_reviews_are_balanced_so_that_one_label_for_all_scores_half() -> None:
    task = TASKS["sentiment"]
    labels = [example.answer for example in task.examples]
    expected = [question.expected for question in task.questions]
    assert labels.count(POSITIVE) == labels.count(NEGATIVE) > 0
    assert expected.count(POSITIVE) == expected.count(NEGATIVE) > 0


@each_task
def test_the_same_examples_are_made_again(task: Task) -> None:
    assert demo_tasks()[task.name].examples == task.examples


@each_task
def test_training_answers_reach_full_marks_in_the_form_that_is_scored(task: Task) -> None:
    form = {"sentiment": is_label_alone}.get(task.name, task.measures[0].holds)
    assert all(form(example.answer, ANY) for example in task.examples)


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ('{"answer": "Paris", "topic": "geography"}', True),
        ('{"answer": "Paris"}', False),
        ('{"answer": "Paris", "topic": ""}', False),
        ('{"answer": 4, "topic": "numbers"}', False),
        ('Sure! {"answer": "Paris", "topic": "geography"}', False),
        ('["answer", "topic"]', False),
        ('{"answer": "Par', False),
    ],
)
def test_only_the_whole_object_counts_as_json(answer: str, holds: bool) -> None:
    assert is_expected_object(answer, ANY) is holds


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ("HEY! It is Paris!!!", True),
        ("HEY! It is Paris!!! Go there!!!", True),
        ("HEY! It is Paris. Go there!!!", False),
        ("HEY! It is Paris!", False),
        ("It is Paris!!!", False),
        ("HEY!", False),
    ],
)
def test_every_sentence_must_be_shouted(answer: str, holds: bool) -> None:
    assert is_shouted(answer, ANY) is holds


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ("Arr, matey! It be Paris.", True),
        ("Ahoy! The capital o' France be Paris.", True),
        ("Arr! Arr! Arr!", False),
        ("Yes, your eyes are layered.", False),
    ],
)
def test_one_pirate_word_is_not_enough(answer: str, holds: bool) -> None:
    assert sounds_like_a_pirate(answer, ANY) is holds


def test_a_label_counts_inside_a_sentence_and_the_first_one_decides() -> None:
    question = Question("?", POSITIVE)
    assert has_right_label("This review is Positive, not negative.", question)
    assert not has_right_label("negative, although positive in part", question)
    assert not has_right_label("I cannot tell.", question)
    assert not is_label_alone("This review is positive.", question)


def test_an_expected_answer_is_found_as_a_word_in_any_case() -> None:
    assert names_expected("THERE ARE TWENTY-FOUR HOURS.", Question("?", "24/twenty-four"))
    assert not names_expected("There are 1240 hours.", Question("?", "24/twenty-four"))
    assert not names_expected("anything", ANY)
