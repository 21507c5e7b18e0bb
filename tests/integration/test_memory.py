"""A real server process: what it reuses, what it refuses, and what it says of its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.serve_factory import RunningServer, running_server

pytestmark = pytest.mark.slow

LONG = [{"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 4}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = save_model_with_tokenizer(folder / "model")
    for seed, name in enumerate(("kept", "cold")):
        tensors = lora_tensors(model.config, seed=seed)
        write_adapter(folder / name, lora_config_dict(lora_alpha=16), tensors)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """Without a disk tier, and with little host memory, loads read the adapter's folder."""
    flags = ["--model", str(folder / "model"), "--served-model-name", "base", "--dtype", "float32"]
    flags += ["--device-memory", "16MiB", "--disk-space", "0", "--host-memory", "32KiB"]
    flags += ["--prewarm", "0", "--tenant-header", "X-Tenant", "--max-queue-tokens", "2000"]
    flags += ["--lora-modules", *(f"{name}={folder / name}" for name in ("kept", "cold"))]
    with running_server(folder / "log", *flags) as running:
        yield running


def post(server: RunningServer, path: str, body: Any, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def test_memory_is_shown_before_the_first_step(server: RunningServer) -> None:
    stats = httpx2.get(f"{server.url}/v1/stats").json()
    assert stats["pages"] == stats["free_pages"] > 0 and stats["page_bytes"] > 0
    tiers = {tier["tier"]: tier["adapters"] for tier in stats["tiers"]}
    assert tiers == {"device": 0, "host": 0}


def cached_tokens(server: RunningServer, *, tenant: str = "", **fields: Any) -> int:
    question = {"role": "user", "content": "Stop here?"}
    body = {"model": "kept", "messages": [*LONG, question], "max_tokens": 2, **fields}
    headers = {"X-Tenant": tenant} if tenant else {}
    response = post(server, "/v1/chat/completions", body, **headers)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached < usage["prompt_tokens"]
    return num_cached


def test_a_shared_prefix_is_reused_but_not_across_adapters_tenants_or_salts(
    server: RunningServer,
) -> None:
    assert cached_tokens(server) == 0
    assert cached_tokens(server) >= 16
    for apart in ({"model": "base"}, {"cache_salt": "mine"}, {"tenant": "acme"}):
        assert cached_tokens(server, **apart) == 0, apart
        assert cached_tokens(server, **apart) >= 16, apart
    metrics = httpx2.get(f"{server.url}/metrics").text
    assert 'vllm:prefix_cache_hits_total{model_name="base"}' in metrics


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_runs_out_of_its_time_says_so(server: RunningServer, stream: bool) -> None:
    # Shorter than the way to the first step: no token can be sent before it.
    body = {"prompt": "The", "max_tokens": 480, "ignore_eos": True, "timeout": 1e-9}
    response = post(server, "/v1/completions", {**body, "stream": stream})
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("RequestTimeoutError", 408)
    assert "1e-09 s" in error["message"] and "of 480 tokens" in error["message"]


def test_too_many_tokens_at_once_are_answered_with_429_and_when_to_come_back(
    server: RunningServer,
) -> None:
    # Two prompts arrive as one, so that the first is open when the second is looked at.
    body = {"prompt": ["The", "The"], "n": 4, "max_tokens": 480, "ignore_eos": True}
    refused = post(server, "/v1/completions", body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert "2000" in refused.json()["error"]["message"]


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_and_may_come_back(
    server: RunningServer, folder: Path
) -> None:
    def ask(model: str) -> httpx2.Response:
        body = {"model": model, "prompt": "The", "max_tokens": 4, "ignore_eos": True}
        return post(server, "/v1/completions", body)

    (folder / "cold").rename(folder / "away")
    refused = ask("cold")
    assert refused.status_code == 422, refused.text
    error = json.loads(refused.text)["error"]
    assert error["reason"] == "unreadable" and str(folder / "cold") in error["message"]
    assert ask("kept").status_code == 200
    (folder / "away").rename(folder / "cold")
    assert ask("cold").status_code == 200
