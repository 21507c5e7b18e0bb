"""Clients of a fleet: they stream greedy answers, and compare each with PEFT's."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import torch
from peft import PeftModel

NUM_TOKENS = 24
"""Compared with PEFT's."""
LONG = 160
PROMPT = [5, 6, 7, 8]
REFUSALS = (429, 502, 503, 504)


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    tokens = list(PROMPT)
    model.eval()
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def expected_tokens(model: Any, adapters: dict[str, str]) -> dict[str, list[int]]:
    """Return PEFT's greedy tokens by adapter; those of the base under an empty name."""
    found = {"": greedy(model)}
    tuned: Any = None
    for name, path in adapters.items():
        if tuned is None:
            tuned = PeftModel.from_pretrained(model, path, adapter_name=name)
        else:
            tuned.load_adapter(path, adapter_name=name)
        tuned.set_adapter(name)
        found[name] = greedy(tuned)
    tuned.unload()
    return found


def body_of(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


def ask(url: str, name: str) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json=body_of(name), timeout=60)


def tokens_of(told: httpx2.Response) -> list[int]:
    assert told.status_code == 200, told.text
    return list(told.json()["choices"][0]["token_ids"])


@dataclass
class Traffic:
    url: str
    expected: dict[str, list[list[int]]]
    """The answers that are right, by name."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _is_on: bool = True

    @contextmanager
    def flowing(self, num_clients: int) -> Iterator[Traffic]:
        """Asks from a thread of its own while the block runs."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run(num_clients)))
        thread.start()
        try:
            yield self
        finally:
            self._is_on = False
            thread.join()

    async def _run(self, num_clients: int) -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client, seed) for seed in range(num_clients)))

    async def _ask_on(self, client: httpx2.AsyncClient, seed: int) -> None:
        names = list(self.expected)
        for name in itertools.islice(itertools.cycle(names), seed, None):
            if not self._is_on:
                return
            began = time.monotonic()
            try:
                await self._ask(client, name, began)
            except httpx2.HTTPError as error:
                self.outcomes["cut"] += 1
                self.faults.append(f"{name}: cut with {error!r}")

    async def _ask(self, client: httpx2.AsyncClient, name: str, began: float) -> None:
        # Some streams are open for longer than it takes a replica to be left out.
        length = LONG if self.outcomes.total() % 3 == 0 else NUM_TOKENS
        body, events = body_of(name, stream=True, max_tokens=length), list[str]()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                content = (await answer.aread()).decode()
                self.outcomes[f"status {answer.status_code}"] += 1
                if answer.status_code not in REFUSALS:
                    self.faults.append(f"{name}: {answer.status_code} {content[:200]}")
                await asyncio.sleep(0.2)
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    if not events:
                        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    events.append(line.removeprefix("data: "))
        self._check(name, events)

    def _check(self, name: str, events: Sequence[str]) -> None:
        is_done = bool(events) and events[-1] == "[DONE]"
        if not is_done and '"error"' not in "".join(events[-1:]):
            self.outcomes["cut silently"] += 1
            self.faults.append(f"{name}: a stream was cut silently")
            return
        chunks = [json.loads(event) for event in events[:-1]]
        tokens = [t for one in chunks for c in one["choices"] for t in c.get("token_ids") or ()]
        right = self.expected[name]
        if is_done and len(tokens) not in (NUM_TOKENS, LONG):
            self.faults.append(f"{name}: {len(tokens)} tokens")
        if tokens[:NUM_TOKENS] not in [one[: len(tokens)] for one in right]:
            self.faults.append(f"{name}: {tokens} instead of {right}")
        self.outcomes["complete" if is_done else "ended with an error event"] += 1
