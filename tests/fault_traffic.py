"""Clients that send requests with known answers, and what came back."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

PROMPTS = ("The quick brown", "def add(a, b):", "Once")
NUM_TOKENS = 16
RECEIPT = "x-loramux-receipt"
# What a server may answer while a part of it is gone: too late, busy, away, disk full.
REFUSALS = frozenset({408, 429, 502, 503, 507})
TIMEOUT_S = 120.0
PAUSE_S = 0.05
RETRY_S = 0.2

Texts = Mapping[tuple[str, str], str]
"""(model, prompt) -> the answer, where a model is a name or a CID."""


@dataclass(frozen=True)
class Answered:
    """A request with a receipt."""

    model: str
    prompt: str
    text: str
    """None of it is wrong, but an interrupted answer is only its beginning."""


@dataclass
class Outcomes:
    """What became of all requests; safe for use by several threads."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    receipts: dict[str, Answered] = field(default_factory=dict)
    slowest_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def fault(self, message: str) -> None:
        with self._lock:
            self.faults.append(message)

    def keep(self, receipt_id: str | None, answered: Answered) -> None:
        if receipt_id is None:
            return
        with self._lock:
            if receipt_id in self.receipts:
                self.faults.append(f"two answers have the receipt {receipt_id}")
            self.receipts[receipt_id] = answered

    def took(self, seconds: float) -> None:
        with self._lock:
            self.slowest_s = max(self.slowest_s, seconds)

    def take_receipts(self) -> dict[str, Answered]:
        with self._lock:
            taken, self.receipts = self.receipts, {}
            return taken


class Asker:
    """Sends one request after another, and judges each answer by `texts`."""

    def __init__(
        self,
        client: httpx2.Client,
        outcomes: Outcomes,
        models: Mapping[str, list[str]],
        texts: Texts,
    ) -> None:
        """`models`: name in requests -> the models of `texts` that may answer."""
        self._client = client
        self._outcomes = outcomes
        self._models = models
        self._texts = texts

    def ask(self, chance: random.Random) -> None:
        model, prompt = chance.choice(sorted(self._models)), chance.choice(PROMPTS)
        kinds: list[Callable[[str, str], None]] = [
            self._ask_whole,
            self._ask_whole,
            self._ask_stream,
            self._leave_stream,
        ]
        kind = self._ask_nobody if chance.random() < 0.03 else chance.choice(kinds)
        began = time.monotonic()
        try:
            kind(model, prompt)
        except httpx2.HTTPError as error:
            self._outcomes.fault(f"{kind.__name__} {model}: no answer: {error!r}")
        self._outcomes.took(time.monotonic() - began)

    def _body(self, model: str, prompt: str, *, stream: bool) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    def _ask_whole(self, model: str, prompt: str) -> None:
        answer = self._client.post("/v1/completions", json=self._body(model, prompt, stream=False))
        receipt = answer.headers.get(RECEIPT)
        if answer.status_code != 200:
            self._refused(f"whole {model}", answer.status_code, answer.text)
            self._outcomes.keep(receipt, Answered(model, prompt, ""))
            return
        text = answer.json()["choices"][0]["text"]
        self._outcomes.count("whole")
        if receipt is None:
            self._outcomes.fault(f"{model}: an answer without a receipt")
        if text not in self._possible(model, prompt):
            self._outcomes.fault(f"{model} {prompt!r}: wrong answer {text!r}")
        self._outcomes.keep(receipt, Answered(model, prompt, text))

    def _ask_stream(self, model: str, prompt: str, *, max_events: int | None = None) -> None:
        text, is_done, has_error = "", False, False
        body = self._body(model, prompt, stream=True)
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            receipt = answer.headers.get(RECEIPT)
            if answer.status_code != 200:
                self._refused(f"stream {model}", answer.status_code, answer.read().decode())
                self._outcomes.keep(receipt, Answered(model, prompt, ""))
                return
            for number, event in enumerate(events_of(answer)):
                if event == "[DONE]":
                    is_done = True
                elif "error" in (part := json.loads(event)):
                    has_error = True
                elif part.get("choices"):
                    text += part["choices"][0]["text"]
                if number == max_events:
                    break
        self._outcomes.keep(receipt, Answered(model, prompt, text))
        if max_events is None and is_done == has_error:
            self._outcomes.fault(f"{model}: a stream ended with {is_done=} and {has_error=}")
        self._outcomes.count("stream" if is_done else "left" if max_events else "broken stream")
        possible = self._possible(model, prompt)
        if not any(text == one if is_done else one.startswith(text) for one in possible):
            self._outcomes.fault(f"{model} {prompt!r}: wrong stream {text!r}")

    def _leave_stream(self, model: str, prompt: str) -> None:
        self._ask_stream(model, prompt, max_events=2)

    def _ask_nobody(self, model: str, prompt: str) -> None:
        body = self._body("acme/nobody", prompt, stream=False)
        answer = self._client.post("/v1/completions", json=body)
        self._outcomes.keep(answer.headers.get(RECEIPT), Answered("acme/nobody", prompt, ""))
        if answer.status_code != 404:
            self._refused("nobody", answer.status_code, answer.text)

    def _possible(self, model: str, prompt: str) -> list[str]:
        return [self._texts[one, prompt] for one in self._models[model]]

    def _refused(self, what: str, status: int, text: str) -> None:
        self._outcomes.count(f"refused {status}")
        time.sleep(RETRY_S)
        if status not in REFUSALS:
            self._outcomes.fault(f"{what}: {status} {text[:300]}")


def events_of(answer: httpx2.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


class Traffic:
    """Threads that do one thing after another until the end of the context."""

    def __init__(self, works: list[Callable[[random.Random], None]], seed: int) -> None:
        self._works = works
        self._seed = seed
        self._open = threading.Event()
        self._is_over = False
        self._idle = [threading.Event() for _ in works]
        self._errors: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(len(self._works))
        ]
        self._open.set()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._open.set()
            for thread in threads:
                thread.join(TIMEOUT_S)
        assert not self._errors, self._errors

    @contextmanager
    def paused(self) -> Iterator[None]:
        """All requests have ended, and no other begins."""
        self._open.clear()
        try:
            for idle in self._idle:
                assert idle.wait(TIMEOUT_S), "a request has no answer"
            yield
        finally:
            self._open.set()

    def _run(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        try:
            while not self._is_over:
                if not self._open.is_set():
                    self._idle[number].set()
                    self._open.wait()
                    self._idle[number].clear()
                    continue
                self._works[number](chance)
                time.sleep(chance.uniform(0, PAUSE_S))
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._idle[number].set()
