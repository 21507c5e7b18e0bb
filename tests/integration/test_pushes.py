"""Adapters pushed from memory to a real engine answer as PEFT does; broken ones never answer."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model

from loramux.client import wire
from loramux.client.async_client import AsyncClient
from loramux.client.errors import BadRequest
from loramux.client.push import of_peft, push_call
from loramux.config.engine import EngineConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.server.app import create_app
from loramux.server.context import ServerOptions
from loramux.server.naming.names import AdapterNames
from tests.engine_factory import save_model_with_tokenizer

NUM_TOKENS = 8
PROMPT = [5, 6, 7, 8]
pytestmark = pytest.mark.slow


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def policy_of(model: Any, *, r: int = 4) -> Any:
    config = LoraConfig(r=r, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(copy.deepcopy(model), config).eval()


@torch.no_grad()
def train(policy: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


async def answer(client: AsyncClient, **fields: Any) -> list[int]:
    reply = await client._http.post(
        "/v1/completions",
        json={
            "model": "policy", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        } | fields,
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def broken_pushes(policy: Any) -> dict[str, wire.Call]:
    tensors, config = of_peft(policy)
    name = next(iter(tensors))
    good = push_call("policy", tensors, config)
    assert good.body is not None
    poisoned = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    shorter = {**tensors, name: tensors[name][:, :-1].contiguous()}
    cut = wire.Call(method="POST", path=good.path, body=good.body[:-8], headers=good.headers)
    empty = wire.Call(method="POST", path=good.path, body=b"", headers=good.headers)
    return {
        "not finite": push_call("policy", poisoned, config),
        "another shape": push_call("policy", shorter, config),
        "cut": cut,
        "empty": empty,
        "without tensors": push_call("policy", {}, config),
    }


def test_a_trainer_pushes_from_memory_and_broken_pushes_change_nothing(tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    policy = policy_of(model)

    async def use(client: AsyncClient) -> None:
        expected: list[list[int]] = []
        for step in (1, 2, 3):
            train(policy, step)
            pushed = await client.push_peft(policy, "policy", version=10 * step)
            assert pushed.version == 10 * step and pushed.rank == 4
            expected.append(greedy(policy))
            assert await answer(client) == expected[-1]
        assert len({tuple(one) for one in expected}) == 3
        for call in broken_pushes(policy).values():
            with pytest.raises(BadRequest):
                await client._send(call)
        assert await answer(client) == expected[-1]
        shown = await client.version("policy", min_version=30)
        assert shown.version == 30
        # Requests that run, and pushes at the same time.
        running = [asyncio.create_task(answer(client, max_tokens=64)) for _ in range(4)]
        for step in range(4, 10):
            train(policy, step)
            await client.push_peft(policy, "policy")
        assert await answer(client) == greedy(policy)
        assert all(len(one) == 64 for one in await asyncio.gather(*running))
        listed = (await client._http.get("/v1/adapters")).json()["data"]
        assert len(listed) == 1, "old versions were not freed"

    asyncio.run(with_server(tmp_path / "model", use))


async def with_server(folder: Path, use: Any) -> None:
    config = EngineConfig(device="cpu", device_memory_bytes=8 * 2**20, dtype="float32")
    engine = AsyncEngine(AsyncEngineOptions(model=folder, config=config))
    await engine.start()
    try:
        options = ServerOptions(allow_runtime_lora_updating=True)
        app = create_app(engine, options, names=AdapterNames(engine))
        client = AsyncClient("http://test")
        await client._http.aclose()
        client._http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), **wire.client_options("http://test", None, 120)
        )
        async with client:
            await use(client)
    finally:
        await engine.close(drain_s=0)
