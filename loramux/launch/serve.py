"""Composition root of the server: config -> engines -> HTTP application -> listening server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapters.combine.cache import CombinationCache
from loramux.backend.host import AdapterHost, HostCard
from loramux.base.log_lines import use_one_line_records
from loramux.base.progress import ByteSink
from loramux.base.signing import read_private_key
from loramux.config.access import AccessConfig, is_key_text, parse_networks
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
from loramux.engine.chat import read_chat_template
from loramux.errors import InvalidRequest, LoramuxError
from loramux.http_server.browsers import default_hosts
from loramux.http_server.serving import (
    DrainingServer,
    allow_many_connections,
    listen,
    uvicorn_config,
    when_started,
)
from loramux.launch.library import LibraryOptions, open_library, store_limits
from loramux.models.default_model import cache_folder, default_model_path
from loramux.models.locate import locate_model, located_images
from loramux.receipts.issuer import ReceiptIssuer
from loramux.receipts.writer import ReceiptWriter
from loramux.registry.access import NO_ACCESS
from loramux.registry.audit import Signer
from loramux.registry.keys import parse_key
from loramux.registry.records import Resolved
from loramux.server.app import ServerApp, create_app
from loramux.server.auth.authentication import CredentialAuthenticator, Credentials, TokenVerifier
from loramux.server.context import NOTHING_ON_DEMAND, OnDemand, ServerOptions
from loramux.server.images.context import ImageModel
from loramux.server.live.warming import find_prewarmed, prewarm
from loramux.server.naming.combinations import Combinations
from loramux.server.naming.folder import AdapterFolder
from loramux.server.naming.names import AdapterNames
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.server.naming.sources import AdapterSources
from loramux.sources.config import SourceConfig, source_config
from loramux.sources.download import Progress
from loramux.sources.kept import KeptAdapters
from loramux.sources.parse import is_remote
from loramux.types.adapter import AdapterCard, InspectedCard
from loramux.worker.process import OnProgress
from loramux.worker.spawn import SpawnedWorker

API_KEY_VARIABLES = ("LORAMUX_API_KEY", "VLLM_API_KEY")
RUNTIME_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
SECONDS_PER_DAY = 86_400.0
MIN_COMBINATION_BYTES = 2**30
_log = logging.getLogger(__name__)
# Adapters that a full check at the start reads at once.
_NUM_CHECKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """A server that accepts requests."""

    host: str
    port: int
    is_https: bool
    models: Sequence[ReadyModel]
    """The language model, the image model, or both in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A model of the server, and its adapters."""

    base_name: str
    adapter_names: Sequence[str]
    card: HostCard


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
    allow_many_connections()
    # Bound before the model is fetched and loaded, so that a port in use fails at once.
    with listen(config.host, config.port) as listener:
        if config.images.image_model is not None:
            config = replace(config, images=located_images(config.images, sink=downloads))
        if config.serves_text:
            config = with_fetched_adapters(config, source_config(config), progress)
            # On the main thread, ahead of the event loop: Ctrl-C ends a download at once.
            config = replace(config, model=str(locate_model(config.model, sink=downloads)))
        asyncio.run(_serve(config, listener, progress, on_ready, worker))
    return 0


def with_fetched_adapters(
    config: ServeConfig, sources: SourceConfig, progress: OnProgress
) -> ServeConfig:
    """Return the config with a local folder for every remote adapter of --lora-modules."""
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
        authenticator = make_authenticator(config, registry)
        check_exposure(config, listener, authenticator)
        async with contextlib.AsyncExitStack() as stack:
            text, images = None, None
            # Before the language model, whose page pool takes the rest of the memory of a GPU.
            if config.images.image_model is not None:
                # Imported here, as it needs diffusers.
                from loramux.launch.images import running_images

                images = await stack.enter_async_context(
                    running_images(config, registry, sources, progress)
                )
            if config.serves_text:
                running = _running_text(config, registry, sources, progress, worker)
                text = await stack.enter_async_context(running)
            models = list(_ready_models(config, text, images, registry))
            options = server_options(config, sources=sources, base_name=models[0].base_name)
            app = create_app(
                None if text is None else text.engine,
                options,
                authenticator=authenticator,
                names=None if text is None else text.names,
                receipts=issuer,
                on_demand=NOTHING_ON_DEMAND if text is None else text.on_demand,
                images=images,
            )
            engines = [one for one in (text and text.engine, images and images.backend) if one]
            server = _draining_server(config, app, engines)
            host, port = listener.getsockname()[:2]
            is_https = config.connections.ssl_certfile is not None
            ready = ServerReady(host=host, port=port, is_https=is_https, models=models)
            # Modules and routes stay: a full collection would stop all requests for 100 ms to look
            # at them.
            gc.collect()
            gc.freeze()
            announcing = asyncio.create_task(when_started(server, lambda: on_ready(ready)))
            await server.serve(sockets=[listener])
            announcing.cancel()
            await server.wait_until_drained()


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextModel:
    """A running language model, the names of its adapters, and where others come from."""

    engine: AsyncEngine
    names: AdapterNames
    on_demand: OnDemand


@contextlib.asynccontextmanager
async def _running_text(
    config: ServeConfig,
    registry: RegistryAdapters | None,
    sources: SourceConfig,
    progress: OnProgress,
    worker: SpawnedWorker | None,
) -> AsyncIterator[_TextModel]:
    given = {module.name for module in config.lora_modules}
    others = [name for name in config.prewarm_adapters if name not in given]
    prewarmed = find_prewarmed(registry, others)
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_running_engine(config, progress, worker))
        names = await _name_adapters(config, engine, registry, progress)
        combinations = Combinations(engine, _combination_cache(config), restore=names.restore)
        prewarming = _prewarming(config, engine, names, combinations, prewarmed)
        await stack.enter_async_context(prewarming)
        on_demand = OnDemand(
            combinations=combinations,
            sources=AdapterSources(engine, names, sources, cache_folder() / "adapters"),
            folder=await stack.enter_async_context(_watched_folder(config, engine, names)),
        )
        yield _TextModel(engine=engine, names=names, on_demand=on_demand)


def _ready_models(
    config: ServeConfig,
    text: _TextModel | None,
    images: ImageModel | None,
    registry: RegistryAdapters | None,
) -> Iterator[ReadyModel]:
    if text is not None:
        known = [] if registry is None else map(str, registry.registry.adapters())
        yield ReadyModel(
            base_name=(config.served_model_name or (text.engine.card.name,))[0],
            adapter_names=[*(given.name for given in text.names.given()), *known],
            card=text.engine.card,
        )
    if images is not None:
        yield ReadyModel(
            base_name=images.names.base_names[0],
            adapter_names=[given.name for given in images.names.given()],
            card=images.backend.card,
        )


def _draining_server(
    config: ServeConfig, app: ServerApp, engines: Sequence[AdapterHost]
) -> DrainingServer:
    connections, drain_s = config.connections, config.drain_s
    served = uvicorn_config(app, connections, log_level=config.log_level, drain_s=drain_s)

    async def drain() -> None:
        await asyncio.gather(*(engine.close(drain_s=drain_s) for engine in engines))

    return DrainingServer(served, connections, drain)


@contextlib.asynccontextmanager
async def _watched_folder(
    config: ServeConfig, engine: AsyncEngine, names: AdapterNames
) -> AsyncIterator[AdapterFolder | None]:
    """Yield the adapters of --lora-dir, read once and then watched."""
    if config.lora_dir is None:
        yield None
        return
    root = Path(config.lora_dir)
    folder = AdapterFolder(engine, names, root, home_tenant=config.home_tenant)
    await folder.scan()
    watching = asyncio.create_task(folder.watch())
    try:
        yield folder
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _combination_cache(config: ServeConfig) -> CombinationCache:
    """Return the folder of combined adapters; it may be as large as the disk tier."""
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
        root_path=config.connections.root_path or "",
        allowed_hosts=config.connections.allowed_hosts or default_hosts(config.host),
        max_body_bytes=config.connections.max_request_size,
        probe_timeout_s=config.probe_timeout_s,
        tenant_header=config.tenant_header,
        shared_names=config.access.shared_names,
        trusted_proxies=parse_networks(config.access.trusted_proxies),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        allow_runtime_lora_updating=config.allow_runtime_lora_updating or is_allowed,
        allowed_roots=config.allowed_roots,
        adapter_source=config.adapter_source,
        ui=config.ui,
        unknown_fields=config.unknown_fields,
        require_model=config.require_model,
        compat=tuple(name for name in config.compat if name != NONE) if config.compat else None,
        tenant_shares=dict(config.tenant_shares),
        adapter_shares=dict(config.adapter_shares),
        sources=sources or source_config(config, environment),
        unopened_registry=None if config.registry == NONE else _default_registry(environment),
    )


def make_authenticator(
    config: ServeConfig,
    registry: RegistryAdapters | None,
    environment: Mapping[str, str] = os.environ,
) -> CredentialAuthenticator:
    credentials = Credentials(
        api_keys=_api_keys(config, environment),
        access=lambda: NO_ACCESS if registry is None else registry.access,
        tokens=_tokens(config.access),
        tenant_header=config.tenant_header,
        has_proxies=bool(config.access.trusted_proxies),
    )
    return CredentialAuthenticator(credentials)


def _tokens(access: AccessConfig) -> TokenVerifier | None:
    """Check tokens of --jwt-issuer; None: there is none."""
    if access.jwt_issuer is None or access.jwt_audience is None:
        return None
    try:
        # Imported here: the extra `jwt` is not everywhere.
        from loramux.server.auth.identity import IdentityTokens, TokenRules, check_url
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "--jwt-issuer needs PyJWT. Run: pip install 'loramux[jwt]'", param="jwt_issuer"
        ) from error
    keys = access.jwt_keys
    if keys is None or "://" in keys:
        check_url(keys or access.jwt_issuer)
    return IdentityTokens(
        TokenRules(
            issuer=access.jwt_issuer,
            audience=access.jwt_audience,
            keys=keys,
            tenant_claim=access.jwt_tenant_claim,
            scopes_claim=access.jwt_scopes_claim,
        )
    )


def _api_keys(config: ServeConfig, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the keys of --api-key, or else of the environment.

    There it may also be the key that commands of this machine send to other servers: keys of a
    registry are valid as that registry says, and give no other rights.
    """
    given = config.access.api_key
    if any(parse_key(key) is not None for key in given):
        raise InvalidRequest(
            "--api-key got a key of a registry, which would open every route with it. Keys of the "
            "registry need no flag.",
            param="api_key",
        )
    if given:
        return given
    found = next(filter(None, map(environment.get, API_KEY_VARIABLES)), None)
    if found is None or parse_key(found) is not None:
        return ()
    if not is_key_text(found):
        raise InvalidRequest(
            f"{' or '.join(API_KEY_VARIABLES)} must be printable ASCII without spaces."
        )
    return (found,)


def check_exposure(
    config: ServeConfig, listener: socket.socket, authenticator: CredentialAuthenticator
) -> None:
    """Refuses to serve other machines without keys, and a tenant header that nothing can send."""
    access = config.access
    if authenticator.needs_key:
        if config.tenant_header is not None and not access.trusted_proxies:
            raise InvalidRequest(
                "--tenant-header needs --trusted-proxies where keys are needed: name the addresses "
                "of the gateway that sends it.",
                param="tenant_header",
            )
        return
    if access.insecure_no_auth or _is_loopback(listener.getsockname()[0]):
        return
    raise InvalidRequest(
        f"Other machines can reach {config.host}, and no key is needed there: everybody could use, "
        "change and delete all adapters. Make a key (loramux keys create) or give --api-key, or "
        "accept it with --insecure-no-auth.",
        param="host",
    )


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


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
    """Yield the registry, if there is one, and the issuer of receipts; closed with the context."""
    places = registry_paths(config, environment)
    is_on = config.receipts != "off"
    key = None if config.receipt_key is None else read_private_key(Path(config.receipt_key))
    issuer = ReceiptIssuer(
        is_on=is_on,
        has_digests=config.receipt_contents == "digests",
        in_streams=is_on and (config.receipts == "on" or places is not None),
        pool_id=config.pool_id or socket.gethostname(),
        home_tenant=config.home_tenant,
        key=key,
    )
    if places is None:
        yield None, issuer
        return
    anchor = config.access.audit_anchor
    library_options = LibraryOptions(
        home_tenant=config.home_tenant,
        sources=sources or source_config(config, environment),
        limits=store_limits(config.max_adapter_size, config.store_space),
        require_signed=config.access.require_signed,
        signer=None if key is None else Signer(key),
        audit_anchor=None if anchor is None else Path(anchor),
    )
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(open_library(places, library_options))
        adapters = RegistryAdapters(library)
        stack.callback(adapters.close)
        adapters.start()
        adapters.recall_use(issuer.pool_id)
        days = config.receipt_retention_days
        max_age_s = None if days is None else days * SECONDS_PER_DAY
        writer = stack.enter_context(ReceiptWriter(library.registry, max_age_s=max_age_s))
        yield adapters, replace(issuer, writer=writer)


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
        chat_template=read_chat_template(config.chat_template),
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
    """Check --lora-modules as --check-adapters says, and gives them their names."""
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
    """Read and check an adapter; return the error that refuses it."""
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
