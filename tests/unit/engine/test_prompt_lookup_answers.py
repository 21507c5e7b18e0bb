"""Answers with prompt lookup equal answers without, whatever a request asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.engine import Engine
from loramux.engine.stats import engine_stats
from loramux.types.request import Request, Selection
from tests.adapter_factory import make_peft_adapter
from tests.device_factory import device_engine
from tests.engine_factory import make_engine, make_prompt, make_request
from tests.model_factory import tiny_transformers_model

LOOKUP = '{"num_speculative_tokens": 8, "prompt_lookup_min": 2, "max_rows": 64}'
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.3, "n": 2},
    {"temperature": 1.0, "top_p": 0.4, "logprobs": 1},
    {"temperature": 0.2, "top_k": 5},
    {"logprobs": 2},
    {"repetition_penalty": 1.1, "temperature": 0.5},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": -2.0, "temperature": 0.7, "n": 2},
    {"stop_token_ids": tuple(range(0, 256, 16))},
    {"allowed_token_ids": (5, 6, 7, 8)},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, 256, 8))},
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 2},
)


def requests_of(number: int, selections: list[Selection]) -> Iterator[Request]:
    """Yield requests whose prompts repeat themselves, as their answers tend to."""
    draw = random.Random(5)
    for i in range(number):
        part = make_prompt(draw.randint(2, 12), seed=i)
        yield make_request(
            f"{i}",
            part * draw.randint(1, 4),
            draw.choice(selections),
            max_tokens=draw.randint(1, 24),
            seed=i,
            **PARAMS[i % len(PARAMS)],
        )


def answers(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[Any]]:
    """Run the requests a few at a time: drafts are for batches with room."""
    found: dict[tuple[str, int], list[Any]] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and engine.scheduler.num_running + engine.scheduler.num_waiting < 8:
            engine.add(waiting.pop(0))
        for event in engine.step():
            assert event.error is None, event.error
            rank = None if event.logprob is None else event.logprob.rank
            told = (event.token_id, event.finish_reason, event.stop_token_id, rank)
            found.setdefault((event.request_id, event.index), []).append(told)
        engine.check_integrity()
    return found


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("cpu", 75),
        pytest.param("cpu", 500, marks=pytest.mark.slow),
        ("device", 15),
        pytest.param("device", 100, marks=pytest.mark.slow),
    ],
)
def test_prompt_lookup_changes_no_answer(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_transformers_model("llama", num_hidden_layers=1)
    num_adapters = 8 if number >= 100 else 3
    folders = [
        make_peft_adapter(tmp_path / f"adapter{i}", model, r=2 + i, seed=i)
        for i in range(num_adapters)
    ]
    engines = []
    for speculative in (None, LOOKUP):
        settings: dict[str, Any] = {"max_batch_tokens": 128, "speculative_config": speculative}
        if kind == "cpu":
            engines.append(make_engine(model, tmp_path / "model", **settings))
        else:
            settings["max_sequences"] = 32
            engines.append(device_engine(monkeypatch, model, tmp_path / "model", **settings)[0])
    found = []
    for engine in engines:
        cids = [engine.register_adapter(folder).cid for folder in folders]
        selections: list[Selection] = [(), *(((cid, 1.0),) for cid in cids)]
        selections.append(tuple(sorted([(cids[0], 0.5), (cids[1], 0.5)])))
        found.append(answers(engine, list(requests_of(number, selections))))
    plain, drafted = found
    assert drafted == plain
    stats = engine_stats(engines[1], num_steps=0)
    accepted, verified = sum(stats.accepted_draft_tokens.values()), sum(stats.draft_tokens.values())
    assert number // 5 < accepted <= verified
    # Among many requests some drafts are wrong.
    assert verified - accepted > number // 5 or number < 75
    assert len(stats.draft_tokens) > 1
    assert not engine_stats(engines[0], num_steps=0).draft_tokens
