"""Score the demo adapters and the base on held-out prompts in one batch.

    python examples/evaluate_adapters.py [--adapters FOLDER] [--json] [--answers]

The exit status is 1 if an adapter misses one of its minimums.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from demo_tasks.catalog import demo_tasks
from demo_tasks.task import Measure, Question, Task

from loramux import LLM, LoRARequest, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
BASE = "base"

Asked = tuple[str, str]
"""The name of the adapter, or BASE, and the prompt."""
Answers = Mapping[Asked, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measure of one adapter; its values are shares from 0 to 1."""

    adapter: str
    measure: str
    base: float
    with_adapter: float
    minimum: float
    num_prompts: int

    @property
    def ok(self) -> bool:
        return self.with_adapter >= self.minimum


def main() -> int:
    parser = argparse.ArgumentParser(description="Score the demo adapters on held-out prompts.")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder with the adapters")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--answers", action="store_true", help="print every answer first")
    arguments = parser.parse_args()
    tasks = list(demo_tasks().values())
    answers = ask(LLM(), token_limits(tasks), arguments.adapters)
    if arguments.answers:
        print_answers(answers)
    figures = [figure for task in tasks for figure in score(task, answers)]
    if arguments.json:
        print(json.dumps([{**asdict(figure), "ok": figure.ok} for figure in figures], indent=2))
    else:
        print_table(figures)
    return 0 if all(figure.ok for figure in figures) else 1


def token_limits(tasks: Sequence[Task]) -> dict[Asked, int]:
    """Map every held-out prompt, for its adapter and for the base, to its token limit."""
    return {
        (name, question.prompt): task.max_answer_tokens
        for task in tasks
        for question in task.questions
        for name in (BASE, task.name)
    }


def ask(llm: LLM, limits: dict[Asked, int], folder: Path) -> dict[Asked, str]:
    """Return the greedy answers, generated in one batch."""
    names = sorted({name for name, _ in limits} - {BASE})
    adapters = {
        name: LoRARequest(name, number, str(folder / name))
        for number, name in enumerate(names, start=1)
    }
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for _, prompt in limits],
        [SamplingParams(temperature=0, max_tokens=limit) for limit in limits.values()],
        lora_request=[adapters.get(name) for name, _ in limits],
        use_tqdm=sys.stderr.isatty(),
    )
    texts = (output.outputs[0].text.strip() for output in outputs)
    return dict(zip(limits, texts, strict=True))


def score(task: Task, answers: Answers) -> list[Figure]:
    figures = []
    for measure in task.measures:
        questions = [question for question in task.questions if measure.counts(question)]
        figures.append(
            Figure(
                adapter=task.name,
                measure=measure.name,
                base=share(measure, questions, BASE, answers),
                with_adapter=share(measure, questions, task.name, answers),
                minimum=measure.minimum,
                num_prompts=len(questions),
            )
        )
    return figures


def share(measure: Measure, questions: Sequence[Question], name: str, answers: Answers) -> float:
    num_held = sum(
        measure.holds(answers[name, question.prompt], question) for question in questions
    )
    return num_held / len(questions)


def print_answers(answers: Answers) -> None:
    for (name, prompt), answer in answers.items():
        print(f"{name:9} {prompt!r} -> {answer!r}")
    print()


def print_table(figures: Sequence[Figure]) -> None:
    columns = "{:10} {:41} {:>6} {:>8} {:>8} {:>8}"
    heads = ("adapter", "measured on held-out prompts", "base", "adapter", "minimum", "prompts")
    print(columns.format(*heads))
    for figure in figures:
        shares = (figure.base, figure.with_adapter, figure.minimum)
        texts = [f"{share:.0%}" for share in shares]
        line = columns.format(figure.adapter, figure.measure, *texts, figure.num_prompts)
        print(line if figure.ok else f"{line}  MISSED")


if __name__ == "__main__":
    sys.exit(main())
