"""Composition root of the server: config -> engine -> HTTP application -> listening server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from loramux.adapters.combine.cache import CombinationCache
from loramux.backend import ModelCard
from loramux.compose import LibraryOptions, open_library, store_limits
from loramux.config.engine import EngineConfig
from loramux.config.fields import NONE, LoraModule
from loramux.config.paths import (
    REGISTRY_FILE,
    REGISTRY_VARIABLE,
    DataPaths,
    data_folder,
    find_data_paths,
)
from loramux.config.serve import ServeConfig
from loramux.engine.async_engine import AsyncEngine, AsyncEngineOptions
from loramux.engine.process import OnProgress
from loramux.engine.spawn import SpawnedWorker
from loramux.errors import InvalidRequest, LoramuxError
from loramux.log_lines import use_one_line_records
from loramux.models.default_model import cache_folder, default_model_path
from loramux.models.locate import locate_model
from loramux.progress import ByteSink
from loramux.receipts.signing import read_private_key
from loramux.receipts.writer import ReceiptWriter
from loramux.registry.records import Resolved
from loramux.server.adapter_folder import AdapterFolder
from loramux.server.adapter_sources import AdapterSources
from loramux.server.app import create_app
from loramux.server.combinations import Combinations
from loramux.server.context import OnDemand, ServerOptions
from loramux.server.names import AdapterNames
from loramux.server.receipt_draft import ReceiptIssuer
from loramux.server.registry_adapters import RegistryAdapters
from loramux.server.warming import find_prewarmed, prewarm
from loramux.sources.config import SourceConfig, source_config
from loramux.sources.download import Progress
from loramux.sources.kept import KeptAdapters
from loramux.sources.parse import is_remote
from loramux.types.adapter import AdapterCard, InspectedCard

RUNTIME_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
SECONDS_PER_DAY = 86_400.0
MIN_COMBINATION_BYTES = 2**30
_log = logging.getLogger(__name__)
# After the drain every stream has ended; this is the time for closing the sockets.
_CLOSING_S = 5
# Adapters that a full check at the start reads at once.
_NUM_CHECKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """A server that accepts requests."""

    host: str
    port: int
    base_name: str
    adapter_names: Sequence[str]
    card: ModelCard


OnReady = Callable[[ServerReady], None]


def serve(
    config: ServeConfig,
    *,
    progress: OnProgress,
    downloads: ByteSink,
    on_ready: OnReady,
    worker: SpawnedWorker | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; raises LoramuxError if the server cannot start.

    `worker`: an engine process that was spawned before; None spawns one.
    """
    try:
        return _run(config, progress, downloads, on_ready, worker)
    finally:
        if worker is not None:
            # Does nothing to an engine that has ended by itself.
            worker.close()


def _run(
    config: ServeConfig,
    progress: OnProgress,
    downloads: ByteSink,
    on_ready: OnReady,
    worker: SpawnedWorker | None,
) -> int:
    _allow_many_connections()
    # Bound before the model is fetched and loaded, so that a port in use fails at once.
    with _listen(config.host, config.port) as listener:
        config = with_fetched_adapters(config, source_config(config), progress)
        # On the main thread, ahead of the event loop: Ctrl-C ends a download at once.
        config = replace(config, model=str(locate_model(config.model, sink=downloads)))
        asyncio.run(_serve(config, listener, progress, on_ready, worker))
    return 0


def with_fetched_adapters(
    config: ServeConfig, sources: SourceConfig, progress: OnProgress
) -> ServeConfig:
    """Returns the config with a local folder for every remote adapter of --lora-modules."""
    kept = KeptAdapters(sources, cache_folder() / "adapters")

    def fetched(module: LoraModule) -> LoraModule:
        if not is_remote(module.path):
            return module
        stage = f"Fetching adapter {module.name}"
        progress(stage, 0.0)

        def report(now: Progress) -> None:
            progress(stage, now.received_bytes / now.total_bytes if now.total_bytes else 0.0)

        return replace(module, path=str(kept.folder(module.path, progress=report)))

    return replace(config, lora_modules=tuple(map(fetched, config.lora_modules)))


async def _serve(
    config: ServeConfig,
    listener: socket.socket,
    progress: OnProgress,
    on_ready: OnReady,
    worker: SpawnedWorker | None,
) -> None:
    use_one_line_records()
    # Parsed before the model is loaded, so that an invalid setting fails at once.
    sources = source_config(config)
    with opened_registry(config, sources=sources) as (registry, issuer):
        given = {module.name for module in config.lora_modules}
        others = [name for name in config.prewarm_adapters if name not in given]
        prewarmed = find_prewarmed(registry, others)
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(_running_engine(config, progress, worker))
            names = await _name_adapters(config, engine, registry, progress)
            combinations = Combinations(engine, _combination_cache(config), restore=names.restore)
            prewarming = _prewarming(config, engine, names, combinations, prewarmed)
            await stack.enter_async_context(prewarming)
            options = server_options(config, sources=sources, base_name=engine.card.name)
            app = create_app(
                engine,
                options,
                names=names,
                receipts=issuer,
                combinations=combinations,
                on_demand=OnDemand(
                    sources=AdapterSources(engine, names, sources, cache_folder() / "adapters"),
                    folder=await stack.enter_async_context(_watched_folder(config, engine, names)),
                ),
            )
            server = DrainingServer(_uvicorn_config(config, app), engine, config.drain_s)
            host, port = listener.getsockname()[:2]

            def announce() -> None:
                known = [] if registry is None else map(str, registry.registry.adapters())
                shown = [*(given.name for given in names.given()), *known]
                on_ready(
                    ServerReady(
                        host=host,
                        port=port,
                        base_name=options.served_model_names[0],
                        adapter_names=shown,
                        card=engine.card,
                    )
                )

            announcing = asyncio.create_task(_when_started(server, announce))
            await server.serve(sockets=[listener])
            announcing.cancel()
            await server.wait_until_drained()


@contextlib.asynccontextmanager
async def _watched_folder(
    config: ServeConfig, engine: AsyncEngine, names: AdapterNames
) -> AsyncIterator[AdapterFolder | None]:
    """The adapters of --lora-dir, read once and then watched."""
    if config.lora_dir is None:
        yield None
        return
    folder = AdapterFolder(engine, names, Path(config.lora_dir))
    await folder.scan()
    watching = asyncio.create_task(folder.watch())
    try:
        yield folder
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _combination_cache(config: ServeConfig) -> CombinationCache:
    """Returns the folder of combined adapters; it may be as large as the disk tier."""
    budget_bytes = max(config.engine.disk_space_bytes, MIN_COMBINATION_BYTES)
    return CombinationCache(cache_folder() / "combinations", budget_bytes)


def server_options(
    config: ServeConfig,
    *,
    sources: SourceConfig | None = None,
    base_name: str,
    environment: Mapping[str, str] = os.environ,
) -> ServerOptions:
    is_allowed = environment.get(RUNTIME_LORA_VARIABLE, "").strip().lower() in ("1", "true")
    return ServerOptions(
        served_model_names=config.served_model_name or (base_name,),
        cors_origins=config.cors_origins,
        probe_timeout_s=config.probe_timeout_s,
        tenant_header=config.tenant_header,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        allow_runtime_lora_updating=config.allow_runtime_lora_updating or is_allowed,
        allowed_roots=config.allowed_roots,
        adapter_source=config.adapter_source,
        compat=tuple(name for name in config.compat if name != NONE) if config.compat else None,
        tenant_shares=dict(config.tenant_shares),
        adapter_shares=dict(config.adapter_shares),
        sources=sources or source_config(config, environment),
        unopened_registry=None if config.registry == NONE else _default_registry(environment),
    )


def registry_paths(config: ServeConfig, environment: Mapping[str, str]) -> DataPaths | None:
    """Where the registry is; None if none is configured and the default one does not exist."""
    if config.registry == NONE:
        return None
    named = (config.registry, config.data, environment.get(REGISTRY_VARIABLE))
    if not any(named) and not Path(_default_registry(environment)).exists():
        return None
    return find_data_paths(
        registry=config.registry,
        data=config.data,
        shared_cache=config.shared_cache,
        remote_store=config.remote_store,
        environment=environment,
    )


def _default_registry(environment: Mapping[str, str]) -> str:
    return str(data_folder(None, environment) / REGISTRY_FILE)


@contextlib.contextmanager
def opened_registry(
    config: ServeConfig,
    environment: Mapping[str, str] = os.environ,
    *,
    sources: SourceConfig | None = None,
) -> Iterator[tuple[RegistryAdapters | None, ReceiptIssuer]]:
    """The registry, if there is one, and the issuer of receipts; closed with the context."""
    places = registry_paths(config, environment)
    is_on = config.receipts != "off"
    key = None if config.receipt_key is None else read_private_key(Path(config.receipt_key))
    issuer = ReceiptIssuer(
        is_on=is_on,
        in_streams=is_on and (config.receipts == "on" or places is not None),
        pool_id=config.pool_id or socket.gethostname(),
        home_tenant=config.home_tenant,
        key=key,
    )
    if places is None:
        yield None, issuer
        return
    library_options = LibraryOptions(
        home_tenant=config.home_tenant,
        sources=sources or source_config(config, environment),
        limits=store_limits(config.max_adapter_size, config.store_space),
    )
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(open_library(places, library_options))
        adapters = RegistryAdapters(library)
        stack.callback(adapters.close)
        adapters.start()
        days = config.receipt_retention_days
        max_age_s = None if days is None else days * SECONDS_PER_DAY
        writer = stack.enter_context(ReceiptWriter(library.registry, max_age_s=max_age_s))
        yield adapters, replace(issuer, writer=writer)


def _uvicorn_config(config: ServeConfig, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=config.log_level,
        access_log=False,
        timeout_graceful_shutdown=int(config.drain_s) + _CLOSING_S,
        timeout_keep_alive=30,
    )


@contextlib.asynccontextmanager
async def _running_engine(
    config: ServeConfig, progress: OnProgress, worker: SpawnedWorker | None
) -> AsyncIterator[AsyncEngine]:
    options = AsyncEngineOptions(
        model=Path(config.model) if config.model is not None else default_model_path(),
        config=_with_disk_folder(config.engine),
        served_name=config.served_model_name[0] if config.served_model_name else None,
        max_queue=config.max_queue,
        max_tokens=config.max_queue_tokens,
    )
    engine = AsyncEngine(options, on_progress=progress, worker=worker)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain_s=0)


async def _name_adapters(
    config: ServeConfig,
    engine: AsyncEngine,
    registry: RegistryAdapters | None,
    progress: OnProgress,
) -> AdapterNames:
    """Checks --lora-modules as --check-adapters says, and gives them their names."""
    names = AdapterNames(engine, registry)
    modules = config.lora_modules
    if modules:
        progress(f"Checking {len(modules)} adapters", 0.0)
    found: Sequence[AdapterCard | InspectedCard | LoramuxError]
    if config.check_adapters == "full":
        limit = asyncio.Semaphore(_NUM_CHECKED_AT_ONCE)
        found = await asyncio.gather(*(_check(engine, limit, module.path) for module in modules))
    else:
        found = await engine.inspect_adapters([module.path for module in modules])
    for module, card in zip(modules, found, strict=True):
        if isinstance(card, LoramuxError):
            raise card
        names.bind(module.name, card)
        for warning in card.warnings:
            _log.warning("adapter %s: %s", module.name, warning)
    return names


async def _check(
    engine: AsyncEngine, limit: asyncio.Semaphore, path: str
) -> AdapterCard | LoramuxError:
    """Reads and checks an adapter; returns the error that refuses it."""
    async with limit:
        try:
            return await engine.add_adapter(path)
        except LoramuxError as error:
            return error


@contextlib.asynccontextmanager
async def _prewarming(
    config: ServeConfig,
    engine: AsyncEngine,
    names: AdapterNames,
    combinations: Combinations,
    adapters: Sequence[Resolved],
) -> AsyncIterator[None]:
    """Prewarm --prewarm-adapters and the busiest in the background, as reading may take long."""
    given = [name for name in config.prewarm_adapters if names.find(name) is not None]

    async def work() -> None:
        await prewarm(engine, names, given=given)
        await engine.prewarm((), num_busiest=config.prewarm)
        await prewarm(engine, names, adapters=adapters, combinations=combinations)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _with_disk_folder(config: EngineConfig) -> EngineConfig:
    if config.disk_folder is not None:
        return config
    return replace(config, disk_folder=str(cache_folder() / "images"))


class DrainingServer(uvicorn.Server):
    """On the first signal, refuses new requests and gives running ones drain_s to finish."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's handler would raise the signal again after its shutdown and kill the process.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        if self._draining is None:
            self.should_exit = True
            closing = self._engine.close(drain_s=self._drain_s)
            self._draining = asyncio.get_running_loop().create_task(closing)

    async def wait_until_drained(self) -> None:
        if self._draining is not None and not self.force_exit:
            await self._draining


async def _when_started(server: uvicorn.Server, announce: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    announce()


def _allow_many_connections() -> None:
    """Raise the soft limit of open files: every stream is one, and the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With protocol 0 asyncio would not set TCP_NODELAY, and each reply would wait about 40 ms for
    # the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another with --port.",
            param="port",
        ) from error
    listener.listen(2048)
    return listener
