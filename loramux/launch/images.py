"""Composition root of the image model: config -> engine -> names of its adapters."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from loramux.backend.images import ImageAdapterCard, ImageBackend
from loramux.base.threads import FETCHES, FOLDER_READS
from loramux.config.images import DEMO_NAME, parse_image_lora
from loramux.config.serve import ServeConfig
from loramux.diffusion.async_engine import AsyncImageEngine
from loramux.diffusion.options import ImageEngineOptions, PipelineFiles
from loramux.diffusion.planner import Batching, PlanLimits
from loramux.errors import InvalidRequest
from loramux.models.default_model import cache_folder
from loramux.server.generate.selection import other_modality
from loramux.server.images.context import ImageModel
from loramux.server.images.names import ImageNames
from loramux.server.naming.names import full_name
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.sources import AdapterSources
from loramux.sources.config import SourceConfig
from loramux.sources.kept import KeptAdapters
from loramux.sources.parse import is_remote

OnProgress = Callable[[str, float], None]


@contextlib.asynccontextmanager
async def running_images(
    config: ServeConfig,
    registry: RegistryAdapters | None,
    sources: SourceConfig,
    progress: OnProgress,
) -> AsyncIterator[ImageModel]:
    """Yield the image model of the settings with its adapters; raises LoramuxError."""
    engine = AsyncImageEngine(engine_options(config), on_progress=progress)
    await engine.start()
    try:
        names = await name_adapters(config, engine, registry, sources, progress)
        fetched = AdapterSources(engine, names, sources, cache_folder() / "adapters")
        yield ImageModel(backend=engine, names=names, sources=fetched)
    finally:
        await engine.close(drain_s=0)


def engine_options(config: ServeConfig) -> ImageEngineOptions:
    images = config.images
    assert images.image_model is not None
    return ImageEngineOptions(
        model=Path(images.image_model),
        files=PipelineFiles(
            config=images.image_config,
            variant=images.image_variant,
            is_offloaded=images.image_offload,
        ),
        dtype=images.image_dtype,
        device=config.engine.device,
        served_name=next(iter(image_base_names(config)), None),
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


async def name_adapters(
    config: ServeConfig,
    engine: ImageBackend,
    registry: RegistryAdapters | None,
    sources: SourceConfig,
    progress: OnProgress,
) -> ImageNames:
    """Read and check the adapters of --image-lora; raise AdapterRefused."""
    names = ImageNames(engine, image_base_names(config) or (engine.card.name,), registry)
    kept = KeptAdapters(sources, cache_folder() / "adapters")
    loras = [parse_image_lora(text) for text in config.images.image_lora]
    taken = {*names.base_names, *(module.name for module in config.lora_modules)}
    for index, lora in enumerate(loras):
        progress(f"Reading adapter {lora.name}", index / len(loras))
        if lora.name in taken:
            raise InvalidRequest(
                f"The name {lora.name!r} is given to two models.", param="image_lora"
            )
        names.bind(lora.name, await _add(engine, names, kept, lora.source))
        names.set_weight(lora.name, lora.weight)
    names.set_default(config.images.image_default_lora)
    return names


async def _add(
    engine: ImageBackend, names: ImageNames, kept: KeptAdapters, source: str
) -> ImageAdapterCard:
    """Add an adapter of a file, a folder, a remote source, or a name of the registry."""
    if is_remote(source):
        return await engine.add_adapter(str(await FETCHES.run(kept.folder, source)))
    if names.registry is None or await FOLDER_READS.run(Path(source).exists):
        return await engine.add_adapter(source)
    resolved = await names.registry.resolve(source)
    if resolved.modality != "image":
        raise other_modality(full_name(resolved), resolved.modality)
    if resolved.recipe is not None:
        raise InvalidRequest(
            f"{source} is a sum of adapters. Requests may name it without a flag.",
            param="image_lora",
        )
    await names.pull(resolved)
    return engine.adapters[resolved.cid]


def image_base_names(config: ServeConfig) -> tuple[str, ...]:
    """Return the names of the image model in the settings; empty: its own name."""
    given = config.images.served_image_model_name
    own = (DEMO_NAME,) if config.images.is_demo else ()
    return given or (() if config.serves_text else config.served_model_name) or own
