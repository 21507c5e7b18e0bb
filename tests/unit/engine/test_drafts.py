"""Answers with drafts that the model verifies equal answers without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loramux.engine.engine import Engine
from loramux.scheduler.sequence import Sequence
from loramux.types.request import Request, Selection, TokenEvent
from tests.device_factory import device_engine, two_adapters
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.model_factory import tiny_transformers_model
from tests.unit.scheduler.scheduler_factory import Counts

Choices = dict[tuple[str, int], list[TokenEvent]]
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "n": 2, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 1.0, "logprobs": 1},
)


class KnownAnswers(Counts):
    """Proposes what the model said before, and at times something else."""

    def __init__(self, known: Choices) -> None:
        self._known = known
        self._chance = random.Random(3)
        self.accepted: list[int] = []
        self.num_rejected = 0

    def awaits(self, sequence: Sequence) -> bool:
        return True

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        events = self._known[sequence.request.request_id, sequence.index]
        start = len(sequence.output_token_ids)
        drafts = [event.token_id or 0 for event in events[start:]][: self._chance.randint(0, 5)]
        return [9 if self._chance.random() < 0.15 else token for token in drafts][:limit]

    def verified(self, sequence: Sequence, *, num_drafts: int, num_accepted: int) -> None:
        self.accepted.append(num_accepted)
        self.num_rejected += num_drafts - num_accepted


def answer(engine: Engine, requests: list[Request]) -> Choices:
    for request in requests:
        engine.add(request)
    found: Choices = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found.setdefault((event.request_id, event.index), []).append(event)
        engine.check_integrity()
    return found


def described(events: list[TokenEvent]) -> Iterator[Any]:
    for event in events:
        yield event.token_id, event.finish_reason, event.stop_token_id
        for entry in (event.logprob, *(event.prompt_logprobs or ())):
            if entry is not None:
                yield entry.token_id, entry.rank, pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_verified_drafts_change_no_answer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    adapters = two_adapters(model, tmp_path)
    if kind == "cpu":
        engine = make_engine(model, tmp_path / "model", max_batch_tokens=64)
    else:
        settings = {"max_sequences": 16, "max_batch_tokens": 64}
        engine = device_engine(monkeypatch, model, tmp_path / "model", **settings)[0]
    cids = [engine.register_adapter(folder).cid for folder in adapters]
    selections: list[Selection] = [(), ((cids[0], 1.0),), ((cids[1], 0.5),)]
    requests = [
        make_request(
            f"{number}",
            make_prompt(5 + number, seed=number),
            selections[number % 3],
            max_tokens=8 + number % 5,
            seed=number,
            **params,
        )
        for number, params in enumerate(PARAMS)
    ]
    expected = answer(engine, requests)
    # A stop token in the middle of accepted drafts.
    middle = expected["1", 0][4].token_id or 0
    stopped = replace(requests[1].params, stop_token_ids=(middle,))
    requests.append(replace(requests[1], request_id="stopped", params=stopped))
    known = expected | {("stopped", 0): expected["1", 0]}
    expected |= answer(engine, requests[-1:])
    drafts = engine.scheduler.drafts = KnownAnswers(known)
    found = answer(engine, requests)
    for choice, events in expected.items():
        assert list(described(found[choice])) == list(described(events)), choice
    assert max(drafts.accepted) > 3 and drafts.num_rejected > 5
    assert expected["stopped", 0][-1].finish_reason == "stop"
