"""A replica's server process, without Ray: changes in place, refusals, limits, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.deploy.replica import ReplicaFailed, ReplicaServer
from loramux.deploy.slots import take_slot
from loramux.registry.registry import Registry
from tests.adapter_factory import lora_config_dict, lora_tensors, write_adapter
from tests.engine_factory import save_model_with_tokenizer
from tests.s3_server import free_ports

HOST = "127.0.0.1"
START_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replica")
    model = save_model_with_tokenizer(folder / "model")
    for seed, name in enumerate(("a", "b", "c")):
        config = lora_config_dict(r=4, lora_alpha=64, base_model_name_or_path="model")
        write_adapter(folder / name, config, lora_tensors(model.config, seed=seed))
    write_adapter(folder / "broken", lora_config_dict(), b"no tensors")
    return folder


def adapters(folder: Path, **pinned: bool) -> dict[str, dict[str, Any]]:
    return {name: {"source": str(folder / name), "pinned": one} for name, one in pinned.items()}


@asynccontextmanager
async def replica(folder: Path, place: Path, **settings: Any) -> AsyncIterator[ReplicaServer]:
    slot = take_slot(HOST, min(free_ports(1)[0], 60_000), root=place)
    given = {
        "model": str(folder / "model"), "dtype": "float32", "device_memory": "8MiB",
        "data": str(place / "data"), "allow_runtime_lora_updating": True, "drain_s": 30,
        "served_model_name": ["base"],
    }  # fmt: skip
    server = ReplicaServer(given | settings, host=HOST, slot=slot)
    try:
        yield server
    finally:
        await server.stop()
        slot.free()


async def listed(server: ReplicaServer) -> dict[str, bool]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as client:
        told = (await client.get("/v1/adapters")).json()["data"]
    return {one["id"]: one["pinned"] for one in told}


@pytest.mark.slow
def test_adapters_change_in_one_process_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with replica(folder, tmp_path, registry=str(tmp_path / "registry.db")) as server:
            await server.set_limits({"acme": {"requests_per_minute": 5}})
            await server.start(adapters(folder, a=True, b=False), timeout_s=START_S)
            pid = server.pid
            assert await listed(server) == {"a": True, "b": False}
            await server.apply(adapters(folder, b=True, c=False))
            assert await listed(server) == {"b": True, "c": False}
            with pytest.raises(ReplicaFailed, match="broken"):
                await server.apply(adapters(folder, a=False, broken=False))
            assert await listed(server) == {"b": True, "c": False}
            assert await server.warm(["c", "unknown"]) == ["c"]
            report = await server.report()
            assert report is not None and report.state == "ready" and report.waiting == 0
            await server.set_limits({"beta": {"max_rank": 8}})
            await server.check()
            assert server.pid == pid
        assert not server.is_running
        with pytest.raises(ReplicaFailed, match="ended with status 0"):
            await server.check()

    asyncio.run(work())
    with Registry(str(tmp_path / "registry.db")) as registry:
        limits = {one.name: one.settings.limits for one in registry.tenants.all()}
    assert limits["acme"].requests_per_minute is None and limits["beta"].max_rank == 8


@pytest.mark.slow
def test_a_server_that_stops_ends_its_streams_first(folder: Path, tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with replica(folder, tmp_path) as server:
            await server.start({}, timeout_s=START_S)
            body = {"model": "base", "prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}
            events: list[str] = []
            async with (
                httpx2.AsyncClient(base_url=server.url, timeout=60) as client,
                client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                stopping = None
                async for line in answer.aiter_lines():
                    stopping = stopping or asyncio.create_task(server.stop())
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
            assert stopping is not None
            await stopping
        return events

    events = asyncio.run(work())
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    ends = [one["finish_reason"] for chunk in chunks for one in chunk["choices"]]
    assert "length" in ends


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    async def work() -> None:
        async with replica(tmp_path, tmp_path) as server:
            await server.start({}, timeout_s=START_S)

    with pytest.raises(ReplicaFailed, match="did not start"):
        asyncio.run(work())
