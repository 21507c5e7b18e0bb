"""Slow work of one kind delays no request that does not need it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.base.threads import FETCHES
from loramux.server.routes import registry as registry_routes
from tests.unit.server.asgi_client import CHAT, run
from tests.unit.server.registry_app import Make

NUM_PUSHES = 64


def test_slow_pushes_delay_no_other_request_and_are_limited(
    registry_app: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = registry_app()
    served.push("acme/sql@1.0.0", 1)
    release = threading.Event()

    @contextmanager
    def dripping(*arguments: Any, **options: Any) -> Iterator[Path]:
        release.wait(30)
        raise InterruptedError
        yield Path()

    monkeypatch.setattr(registry_routes, "fetched_folder", dripping)

    async def use() -> list[int]:
        transport = httpx2.ASGITransport(served.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            push = {"reference": "acme/slow@1.0.0", "source": "https://slow.example/x"}
            pushes = [
                asyncio.create_task(client.post("/v1/adapters", json=push))
                for _ in range(NUM_PUSHES)
            ]
            try:
                # Some are under way or wait, and all others have been refused.
                while sum(task.done() for task in pushes) + FETCHES.num_open < NUM_PUSHES:
                    await asyncio.sleep(0.01)
                # So large a body is parsed on a thread.
                body = {
                    "model": "acme/sql",
                    "messages": [{"role": "user", "content": "x"}],
                    "metadata": {"x": "x" * 9000},
                    "max_tokens": 1,
                }
                async with asyncio.timeout(10):
                    answers = [
                        await client.get("/v1/models"),
                        await client.post(CHAT, json=body),
                        await client.get("/v1/adapters/acme/sql"),
                    ]
            finally:
                release.set()
            ended = await asyncio.gather(*pushes)
        assert {answer.status_code for answer in ended} == {429, 500}
        return [answer.status_code for answer in answers]

    assert run(use()) == [200, 200, 200]
    assert FETCHES.num_open == 0
