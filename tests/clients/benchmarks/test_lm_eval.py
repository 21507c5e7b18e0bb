"""lm-eval on the server's completions: likelihoods of choices, and texts up to a stop string."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.benchmarks.conftest import Run
from tests.clients.live import RANDOM_ADAPTERS, Live

CLIENT = "lm_eval"
shows = pytest.mark.shows


@shows("text", "adapters")
@pytest.mark.parametrize("model", ["random-2"])
def test_two_tasks(live: Live, run_program: Run, tmp_path: Path, model: str) -> None:
    assert model in RANDOM_ADAPTERS
    before = live.generated_tokens(model)
    run_program(
        "lm_eval",
        *("--model", "local-completions", "--batch_size", "2", "--output_path", str(tmp_path)),
        *(
            "--model_args",
            f"model={model},base_url={live.v1}/completions,num_concurrent=4",
        ),
        *("--include_path", str(Path(__file__).parent)),
        *("--tasks", "capital_choice,capital_writing"),
    )
    (found,) = tmp_path.glob("*/results_*.json")
    report: dict[str, Any] = json.loads(found.read_text())
    scores = {
        task: next(score for name, score in result.items() if name.endswith(",none"))
        for task, result in report["results"].items()
    }
    assert set(scores) == {"capital_choice", "capital_writing"}
    # A model that knows capitals: less means that likelihoods or texts are wrong.
    assert min(scores.values()) >= 0.5, scores
    assert live.generated_tokens(model) > before
