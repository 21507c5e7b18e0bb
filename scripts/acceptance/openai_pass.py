"""The openai client against a running server: one check per thing that programs do first.

python openai_pass.py REPORT URL BASE ADAPTER...
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAI

QUESTION = "What is the capital of France?"
BEGINNING = "Once upon a time, in a small village by the sea, there lived"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@dataclass
class QuickPass:
    client: OpenAI
    base: str
    adapters: list[str]

    def chat(self, **fields: Any) -> Any:
        given = {"model": self.base, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        return self.client.chat.completions.create(**given | fields)

    def complete(self, **fields: Any) -> Any:
        given = {"model": self.base, "prompt": BEGINNING, "max_tokens": 12, "temperature": 0}
        return self.client.completions.create(**given | fields)

    def check_models(self) -> None:
        models = {model.id: model.model_dump() for model in self.client.models.list()}
        assert list(models) == [self.base, *self.adapters], list(models)
        for name in self.adapters:
            assert models[name]["parent"] == self.base, models[name]
            assert self.client.models.retrieve(name).id == name

    def check_chat_with_a_string_and_with_parts(self) -> None:
        whole, parts = self.chat(), self.chat(messages=PARTS)
        assert whole.choices[0].message.content, whole
        assert whole.choices[0].message.content == parts.choices[0].message.content
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    def check_each_model_answers_for_itself(self) -> None:
        answers = [self.complete(model=name) for name in (self.base, *self.adapters)]
        assert [answer.model for answer in answers] == [self.base, *self.adapters]
        texts = {answer.choices[0].text for answer in answers}
        assert len(texts) == len(answers), texts

    def check_streams_equal_the_whole_answer(self) -> None:
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        whole = self.chat()
        assert text == whole.choices[0].message.content, text
        assert chunks[-1].usage == whole.usage, chunks[-1]
        pieces = [choice.text for chunk in self.complete(stream=True) for choice in chunk.choices]
        assert "".join(pieces) == self.complete().choices[0].text != "", pieces

    def check_logprobs(self) -> None:
        entries = self.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        # Greedy: the token taken is the likeliest one.
        assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)
        logprobs = self.complete(logprobs=2).choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)

    def check_two_choices(self) -> None:
        for answer in (self.chat(n=2, temperature=1), self.complete(n=2, temperature=1)):
            assert [choice.index for choice in answer.choices] == [0, 1], answer

    def check_seed(self) -> None:
        first, again, other = (
            self.complete(temperature=1.5, seed=seed).choices[0].text for seed in (7, 7, 8)
        )
        assert first == again != other, (first, again, other)

    def check_stop(self) -> None:
        word = self.complete().choices[0].text.split()[1]
        choice = self.complete(stop=[word]).choices[0]
        assert word not in choice.text and choice.finish_reason == "stop", choice

    def check_max_completion_tokens(self) -> None:
        answer = self.chat(max_tokens=None, max_completion_tokens=3)
        assert answer.usage.completion_tokens == 3, answer.usage
        assert answer.choices[0].finish_reason == "length"

    def check_unknown_model(self) -> None:
        for ask in (self.chat, self.complete):
            try:
                ask(model="no-such-model")
            except NotFoundError:
                continue
            raise AssertionError("an unknown model was answered")


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        traceback.print_exc()
        return False
    return True


def main() -> None:
    report, url, base, *adapters = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    quick_pass = QuickPass(client, base, adapters)
    outcomes: dict[str, list[str]] = {"passed": [], "failed": []}
    for name in (name for name in dir(QuickPass) if name.startswith("check_")):
        outcome = "passed" if passes(getattr(quick_pass, name)) else "failed"
        print(outcome, name)
        outcomes[outcome].append(name)
    Path(report).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
