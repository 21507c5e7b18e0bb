"""`vllm bench serve`, without the rest of vLLM's command line, which needs its engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.benchmarks.conftest import Run
from tests.clients.live import BASE, Live

CLIENT = "vllm"
shows = pytest.mark.shows
PROGRAM = str(Path(__file__).with_name("vllm_bench.py"))
NUM_REQUESTS = 8


@shows("text", "stream", "adapters")
def test_random_prompts_on_two_adapters(
    live: Live, run_program: Run, tokenizer: str, tmp_path: Path
) -> None:
    before = {name: live.generated_tokens(name) for name in ("pirate", "shout")}
    asked = f"--backend openai --base-url {live.url} --endpoint /v1/completions --model {BASE} "
    asked += "--lora-modules pirate shout --lora-assignment round-robin --dataset-name random "
    asked += "--random-input-len 32 --random-output-len 16 --ignore-eos --max-concurrency 4 "
    asked += f"--num-prompts {NUM_REQUESTS} --save-result --save-detailed"
    place = ["--tokenizer", tokenizer, "--result-dir", str(tmp_path)]
    run_program("python", PROGRAM, *asked.split(), *place, "--result-filename", "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0)
    assert not [error for error in report["errors"] if error]
    assert report["total_output_tokens"] == 16 * NUM_REQUESTS
    for name, tokens in before.items():
        assert live.generated_tokens(name) - tokens == 16 * NUM_REQUESTS / 2
