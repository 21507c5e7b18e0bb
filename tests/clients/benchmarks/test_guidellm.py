"""guidellm: load tests with its own measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.benchmarks.conftest import Run
from tests.clients.live import Live

CLIENT = "guidellm"
shows = pytest.mark.shows
NUM_REQUESTS = 8


@shows("text", "stream", "adapters")
def test_four_streams_at_once(live: Live, run_program: Run, tokenizer: str, tmp_path: Path) -> None:
    before = live.generated_tokens("pirate")
    run_program(
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={live.url},model=pirate"),
        *("--profile", "kind=concurrent,streams=4", "--disable-progress"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"] > 0
    assert live.generated_tokens("pirate") - before >= 16 * NUM_REQUESTS
