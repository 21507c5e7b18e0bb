"""The HTTP application: all routes over a language model, an image model, or both."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loramux import __version__
from loramux.backend.host import StoreTierStats
from loramux.backend.text import TextBackend
from loramux.http_server.browsers import BrowserGuard
from loramux.http_server.prefix import PrefixMiddleware
from loramux.metrics.images import ImageMetrics
from loramux.metrics.server import Metrics
from loramux.metrics.store import ReceiptCollector, StoreCollector
from loramux.receipts.issuer import ReceiptIssuer
from loramux.server.auth.access import CallerMiddleware, RouteTable
from loramux.server.auth.caller import Authenticator, TenantHeader
from loramux.server.context import (
    NOTHING_ON_DEMAND,
    Context,
    HostContext,
    OnDemand,
    ServerOptions,
)
from loramux.server.errors import NotServed, install_error_handlers
from loramux.server.families.document import add_families
from loramux.server.families.table import (
    endpoints_of,
    paths_of_others,
    prefixes_of,
    root_endpoint,
    shared_with_own,
)
from loramux.server.http.body import Bodies
from loramux.server.http.endpoint import routes_of, shapes_of
from loramux.server.http.missing_routes import MissingRoutes
from loramux.server.http.openapi import install_openapi
from loramux.server.http.proxies import ForwardedMiddleware
from loramux.server.http.request_ids import (
    CID_HEADER,
    RECEIPT_HEADER,
    TIER_HEADER,
    TOOLS_HEADER,
    WARNING_HEADER,
    RequestIdMiddleware,
)
from loramux.server.images.context import ImageContext, ImageModel
from loramux.server.images.edits import edit_routes
from loramux.server.images.openai import openai_routes
from loramux.server.images.sheaf import SHEAF_ROUTES, sheaf_error, sheaf_routes
from loramux.server.live.fitting import CachedFit
from loramux.server.naming.names import AdapterNames
from loramux.server.routes.accounts import account_routes
from loramux.server.routes.adapters import adapter_routes
from loramux.server.routes.caller import caller_routes
from loramux.server.routes.doctor import doctor_routes
from loramux.server.routes.embeddings import embedding_routes
from loramux.server.routes.fim import fim_routes
from loramux.server.routes.keys import key_routes
from loramux.server.routes.models import model_routes
from loramux.server.routes.openai import chat_routes, completion_routes
from loramux.server.routes.page import page_routes
from loramux.server.routes.plans import plan_routes
from loramux.server.routes.receipts import receipt_routes
from loramux.server.routes.registry import registry_routes
from loramux.server.routes.run import run_routes
from loramux.server.routes.runtime_lora import runtime_lora_routes
from loramux.server.routes.scores import score_routes
from loramux.server.routes.sdapi import SDAPI_ROUTES, sdapi_error, sdapi_routes
from loramux.server.routes.status import status_routes
from loramux.server.routes.tokens import token_routes
from loramux.types.modality import NO_MODEL, Modality
from loramux.types.routes import ROUTE_ACCESS

TEXT_ROUTES = (
    chat_routes,
    completion_routes,
    fim_routes,
    embedding_routes,
    score_routes,
    run_routes,
    plan_routes,
    token_routes,
)
SHARED_ROUTES = (
    model_routes,
    receipt_routes,
    account_routes,
    key_routes,
    runtime_lora_routes,
    adapter_routes,
    # After /pin: the DELETE of a name would also match its path.
    registry_routes,
    status_routes,
    caller_routes,
    doctor_routes,
    page_routes,
)
IMAGE_ROUTES = (openai_routes, edit_routes, sdapi_routes)
# Their paths begin with any name, so that they come after all others.
LAST_ROUTES = (sheaf_routes,)
# Largest bodies that may arrive at once; smaller ones take less of this.
LARGEST_BODIES = 16
LOADING_PATHS = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/load_lora_adapter", "/unload_lora_adapter", "/adapters"),
)
"""Paths that load and unload adapters, in every API."""
EXPOSED_HEADERS = (RECEIPT_HEADER, TOOLS_HEADER, WARNING_HEADER, CID_HEADER, TIER_HEADER)
"""Headers of answers that web pages of other origins may read."""


def create_app(  # noqa: PLR0913  (what a server is made of)
    backend: TextBackend | None,
    options: ServerOptions,
    *,
    names: AdapterNames | None = None,
    receipts: ReceiptIssuer | None = None,
    on_demand: OnDemand = NOTHING_ON_DEMAND,
    authenticator: Authenticator | None = None,
    images: ImageModel | None = None,
) -> FastAPI:
    """Make the application; requests are answered with 503 until the backends are ready.

    There is a language model, an image model, or both.
    """
    app = FastAPI(
        title="loramux",
        version=__version__,
        description="Many LoRA adapters on one base model, mixed in one batch.",
        generate_unique_id_function=lambda route: route.name,
        servers=[{"url": options.root_path}] if options.root_path else None,
    )
    app.state.bodies = Bodies(LARGEST_BODIES * options.max_body_bytes)
    receipts = receipts or ReceiptIssuer()
    text_metrics = None
    if backend is not None:
        names = names or AdapterNames(backend)
        text_metrics = _text_metrics(backend, names, options)
    image = None
    if images is not None:
        image = _image_context(images, options, receipts, text_metrics, names)
    text = None
    if backend is not None and names is not None and text_metrics is not None:
        text = Context(
            backend=backend,
            options=options,
            metrics=text_metrics,
            names=names,
            receipts=receipts,
            combinations=on_demand.combinations,
            sources=on_demand.sources,
            folder=on_demand.folder,
            others=() if image is None else (image,),
            foreign={} if image is None else {"image": image.names},
        )
    _mount(app, text, image)
    install_error_handlers(app)
    return _with_middleware(app, options, authenticator)


def _text_metrics(backend: TextBackend, names: AdapterNames, options: ServerOptions) -> Metrics:
    base_names = options.served_model_names
    return Metrics(
        backend,
        model_name=base_names[0] if base_names else None,
        labels_of=names.labels_of,
        max_resident=CachedFit(backend).max_adapters,
    )


def _image_context(
    images: ImageModel,
    options: ServerOptions,
    receipts: ReceiptIssuer,
    beside: Metrics | None,
    text_names: AdapterNames | None,
) -> ImageContext:
    names = images.names
    metrics = ImageMetrics(
        images.backend,
        model_name=names.base_names[0],
        labels_of=names.labels_of,
        beside=beside,
    )
    return ImageContext(
        backend=images.backend,
        options=options,
        metrics=metrics,
        names=names,
        receipts=receipts,
        sources=images.sources,
        foreign={} if text_names is None else {"text": text_names},
    )


def _mount(app: FastAPI, text: Context | None, image: ImageContext | None) -> None:
    """Adds the routes: of each model that is there, of all, and refusals of the others."""
    first: HostContext | None = text or image
    if first is None:
        raise ValueError("The server has no model.")
    _add_collectors(first)
    routers = [] if text is None else [routes(text) for routes in TEXT_ROUTES]
    routers += [routes(first) for routes in SHARED_ROUTES]
    routers += [] if image is None else [routes(image) for routes in IMAGE_ROUTES]
    last = [] if image is None else [routes(image) for routes in LAST_ROUTES]
    for router in routers:
        app.include_router(router)
    endpoints = [root_endpoint(first)] if text is None else endpoints_of(text)
    app.state.keyed = shared_with_own(endpoints)
    others = routes_of(
        (one for one in endpoints if one.path not in app.state.keyed), first.options.max_body_bytes
    )
    if text is None:
        others += _absent_routes("text", others)
    if image is None:
        others += _absent_routes("image", others)
    app.router.routes.extend(others)
    for router in last:
        app.include_router(router)
    own = [route for router in routers for route in router.routes]
    app.state.all_routes = [*own, *others, *(route for router in last for route in router.routes)]
    shapes = shapes_of(one for one in endpoints if one.path not in app.state.keyed)
    shapes |= dict.fromkeys(SHEAF_ROUTES, sheaf_error) | dict.fromkeys(SDAPI_ROUTES, sdapi_error)
    app.state.shapes = shapes
    prefixes = {"/sdapi/": sdapi_error} | ({} if text is None else prefixes_of(text))
    app.state.missing = MissingRoutes(
        app.state.all_routes, shapes, prefixes=prefixes, closed=_closed_paths(first, text)
    )
    install_openapi(app, lambda document: add_families(document, endpoints))


def _closed_paths(first: HostContext, text: Context | None) -> dict[str, str]:
    """Paths of routes that settings leave out -> what opens them."""
    closed = {} if text is None else paths_of_others(text)
    if not first.options.allow_runtime_lora_updating:
        opened_by = "It needs a server that was started with --allow-runtime-lora-updating."
        closed |= dict.fromkeys(LOADING_PATHS, opened_by)
    if not first.options.ui:
        closed["/ui"] = "The server was started with --no-ui."
    return closed


def _add_collectors(context: HostContext) -> None:
    collectors = context.metrics.registry
    collectors.register(StoreCollector(lambda: _tier_stats(context.names)))
    collectors.register(ReceiptCollector(lambda: context.receipts.num_dropped))


def _absent_routes(modality: Modality, served: Iterable[Route]) -> list[Route]:
    """Routes that say that the server lacks their model, but for those that begin with a name."""

    async def refuse(request: Request) -> Response:
        raise NotServed(NO_MODEL[modality], param="model")

    known = {f"{method} {route.path}" for route in served for method in route.methods or ()}
    keys = [
        key.split(" ", 1)
        for key, access in ROUTE_ACCESS.items()
        if access.modality == modality and key not in known and "/{name}" not in key
    ]
    return [
        Route(path, refuse, methods=[method], name=f"absent {method} {path}")
        for method, path in keys
    ]


def _with_middleware(
    app: FastAPI, options: ServerOptions, authenticator: Authenticator | None
) -> FastAPI:
    """Adds the middleware; the last one added sees a request first."""
    routes: list[Route] = app.state.all_routes
    documents = [one for one in app.router.routes if isinstance(one, Route) and one not in routes]
    table = RouteTable([*documents, *routes], app.state.shapes)
    app.add_middleware(
        CallerMiddleware,
        authenticator=authenticator or TenantHeader(options.tenant_header),
        table=table,
    )
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", *EXPOSED_HEADERS],
        )
    app.add_middleware(BrowserGuard, options.allowed_hosts, options.cors_origins)
    app.add_middleware(RequestIdMiddleware)
    if options.root_path:
        app.add_middleware(PrefixMiddleware, prefix=options.root_path)
    if options.trusted_proxies:
        app.add_middleware(ForwardedMiddleware, proxies=options.trusted_proxies)
    return app


def _tier_stats(names: AdapterNames) -> list[StoreTierStats]:
    return [] if names.registry is None else names.registry.library.store.tier_stats()
