"""Composition root of the server of an image model: config -> engine -> HTTP application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from loramux.config.images import parse_image_lora
from loramux.config.serve import ServeConfig
from loramux.diffusion.async_engine import AsyncImageEngine
from loramux.diffusion.options import ImageEngineOptions
from loramux.diffusion.planner import Batching, PlanLimits
from loramux.errors import InvalidRequest
from loramux.image_backend import ImageCard
from loramux.launch import check_exposure, make_authenticator, opened_registry
from loramux.log_lines import use_one_line_records
from loramux.models.default_model import cache_folder
from loramux.server.connections.browsers import default_hosts
from loramux.server.connections.serving import (
    DrainingServer,
    allow_many_connections,
    listen,
    uvicorn_config,
    when_started,
)
from loramux.server.images.app import create_image_app
from loramux.server.images.drawing import ImageContext
from loramux.server.images.names import ImageNames

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageServerReady:
    """A server of images that accepts requests."""

    host: str
    port: int
    is_https: bool
    base_name: str
    adapter_names: tuple[str, ...]
    card: ImageCard


OnReady = Callable[[ImageServerReady], None]


def serve_images(config: ServeConfig, *, progress: OnProgress, on_ready: OnReady) -> int:
    """Serve until SIGTERM or Ctrl-C; raises LoramuxError if the server cannot start."""
    if config.lora_modules or config.model is not None:
        raise InvalidRequest(
            "--image-model is served alone: leave out --model and --lora-modules, and give its "
            "adapters with --image-lora.",
            param="image_model",
        )
    allow_many_connections()
    with listen(config.host, config.port) as listener:
        asyncio.run(_serve(config, listener, progress, on_ready))
    return 0


async def _serve(
    config: ServeConfig, listener: socket.socket, progress: OnProgress, on_ready: OnReady
) -> None:
    use_one_line_records()
    with opened_registry(config) as (registry, issuer):
        authenticator = make_authenticator(config, registry)
        check_exposure(config, listener, authenticator)
        engine = AsyncImageEngine(engine_options(config), on_progress=progress)
        await engine.start()
        try:
            names = await _name_adapters(config, engine, progress)
            context = ImageContext(
                backend=engine,
                names=names,
                receipts=issuer,
                max_body_bytes=config.connections.max_request_size,
            )
            app = create_image_app(
                context,
                authenticator=authenticator,
                allowed_hosts=config.connections.allowed_hosts or default_hosts(config.host),
                cors_origins=config.cors_origins,
            )
            connections, drain_s = config.connections, config.drain_s
            served = uvicorn_config(app, connections, log_level=config.log_level, drain_s=drain_s)
            server = DrainingServer(served, connections, partial(engine.close, drain_s=drain_s))
            ready = ImageServerReady(
                host=listener.getsockname()[0],
                port=listener.getsockname()[1],
                is_https=connections.ssl_certfile is not None,
                base_name=names.base_names[0],
                adapter_names=tuple(names.adapters),
                card=engine.card,
            )
            announcing = asyncio.create_task(when_started(server, lambda: on_ready(ready)))
            await server.serve(sockets=[listener])
            announcing.cancel()
            await server.wait_until_drained()
        finally:
            await engine.close(drain_s=0)


def engine_options(config: ServeConfig) -> ImageEngineOptions:
    images = config.images
    assert images.image_model is not None
    return ImageEngineOptions(
        model=Path(images.image_model),
        served_name=config.served_model_name[0] if config.served_model_name else None,
        limits=PlanLimits(
            max_tokens=images.max_image_tokens, batching=cast("Batching", images.batching)
        ),
        max_open=config.max_queue,
        adapter_memory_bytes=images.image_adapter_memory,
        host_memory_bytes=config.engine.host_memory_bytes,
        disk_folder=Path(config.engine.disk_folder or cache_folder() / "image_adapters"),
        disk_space_bytes=config.engine.disk_space_bytes,
        eviction=config.engine.eviction,
    )


async def _name_adapters(
    config: ServeConfig, engine: AsyncImageEngine, progress: OnProgress
) -> ImageNames:
    """Reads and checks the adapters of --image-lora; raises AdapterRefused."""
    names = ImageNames(config.served_model_name or (engine.card.name,))
    loras = [parse_image_lora(text) for text in config.images.image_lora]
    for index, lora in enumerate(loras):
        progress(f"Reading adapter {lora.name}", index / len(loras))
        names.bind(lora.name, await engine.add_adapter(lora.source), lora.weight)
    names.set_default(config.images.image_default_lora)
    return names
