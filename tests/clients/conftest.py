"""A server on a socket, for clients that bring their own HTTP library."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn

from tests.unit.server.asgi_client import make_app
from tests.unit.server.scripted_backend import ScriptedBackend


@dataclass
class Live:
    url: str
    backend: ScriptedBackend


@pytest.fixture
def live() -> Iterator[Live]:
    backend = ScriptedBackend()
    app = make_app(backend, allow_runtime_lora_updating=True)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    ready = threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        ports.append(server.servers[0].sockets[0].getsockname()[1])
        ready.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield Live(f"http://127.0.0.1:{ports[0]}", backend)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def open_sockets() -> Iterator[None]:
    """Collects the sockets that some clients leave open, before a later test would warn of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
