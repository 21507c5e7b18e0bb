"""Every route of the OpenAPI document against a live server, with what schemathesis makes of it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.adapter_factory import make_peft_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

SECONDS = float(os.environ.get("LORAMUX_FUZZ_SECONDS", "600"))
EXAMPLES = 8
"""For each operation before the next one has its turn."""
AWAY = {502, 507}
"""A source that a body names does not answer, and a store that is full."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = save_model_with_tokenizer(folder / "model")
    adapter = make_peft_adapter(folder / "one", model, r=4)
    flags = ["--model", str(folder / "model"), "--device", "cpu", "--device-memory", "64MiB"]
    flags += ["--lora-modules", f"one={adapter}", "--pooling", "mean", "--dtype", "float32"]
    flags += ["--allow-runtime-lora-updating", "--registry", str(folder / "registry")]
    environment = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    with running_server(folder / "log", *flags, environment=environment) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_no_body_is_an_error_of_the_server(server: RunningServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    ends = time.monotonic() + SECONDS
    counts: dict[int, int] = {}
    for round_number in itertools.count():
        for operation in operations:
            call_with_examples(operation, round_number, counts)
            if time.monotonic() > ends:
                break
        if time.monotonic() > ends:
            break
    print(f"{sum(counts.values())} requests, {round_number + 1} rounds, by status: {counts}")
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert (health["status"], health["restarts"]) == ("ready", 0)


def call_with_examples(operation: Any, number: int, counts: dict[int, int]) -> None:
    @seeded(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy())
    def call(case: Any) -> None:
        # Bodies that set no limit would generate until the context is full.
        response = case.call(headers={"Connection": "close"}, timeout=120)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        is_fault = response.status_code >= 500 and response.status_code not in AWAY
        told = f"{operation.method.upper()} {operation.path}: {case.body!r:.2000}"
        assert not is_fault, f"{told}\n{response.status_code} {response.text[:500]}"

    call()
