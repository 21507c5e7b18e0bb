"""The HTTP application: all routes over a language model, an image model, or both."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loramux.backend.host import StoreTierStats
from loramux.backend.text import TextBackend
from loramux.http_server.browsers import BrowserGuard
from loramux.http_server.prefix import PrefixMiddleware
from loramux.metrics.images import ImageMetrics
from loramux.metrics.server import Metrics
from loramux.metrics.store import ReceiptCollector, StoreCollector
from loramux.receipts.issuer import ReceiptIssuer
from loramux.server.auth.access import CallerMiddleware
from loramux.server.auth.authentication import Authenticator, TenantHeader
from loramux.server.context import (
    NOTHING_ON_DEMAND,
    Context,
    HostContext,
    OnDemand,
    ServerOptions,
)
from loramux.server.errors import NotServed, error_response
from loramux.server.families.mistral import fim_routes
from loramux.server.families.openai import chat_routes, completion_routes
from loramux.server.families.table import (
    add_families,
    paths_of_others,
    prefixes_of,
    root_route,
    routes_of_others,
)
from loramux.server.http.call import Bodies, Call, begin_call
from loramux.server.http.error_handlers import MissingRoutes, install_error_handlers
from loramux.server.http.middleware import (
    CID_HEADER,
    RECEIPT_HEADER,
    TIER_HEADER,
    TOOLS_HEADER,
    WARNING_HEADER,
    ForwardedMiddleware,
    RequestIdMiddleware,
)
from loramux.server.http.openapi import OpenApi
from loramux.server.http.routes import Route
from loramux.server.http.table import RouteTable, TableRouter, methods_of
from loramux.server.images.context import ImageContext, ImageModel
from loramux.server.images.openai import edit_routes, openai_routes
from loramux.server.images.sheaf import sheaf_routes
from loramux.server.live.fitting import CachedFit
from loramux.server.naming.names import AdapterNames
from loramux.server.routes.accounts import account_routes, caller_routes
from loramux.server.routes.adapters import adapter_routes
from loramux.server.routes.keys import key_routes
from loramux.server.routes.models import model_routes
from loramux.server.routes.page import page_routes
from loramux.server.routes.plans import plan_routes
from loramux.server.routes.pooling import embedding_routes, score_routes
from loramux.server.routes.pushes import push_routes
from loramux.server.routes.receipts import receipt_routes
from loramux.server.routes.registry import registry_routes
from loramux.server.routes.run import run_routes
from loramux.server.routes.runtime_lora import runtime_lora_routes
from loramux.server.routes.sdapi import sdapi_error, sdapi_routes
from loramux.server.routes.status import doctor_routes, status_routes
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
    # Before the routes of any name, whose paths would match theirs.
    push_routes,
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
SDAPI = "/sdapi/"
EXPOSED_HEADERS = (RECEIPT_HEADER, TOOLS_HEADER, WARNING_HEADER, CID_HEADER, TIER_HEADER)
"""Headers of answers that web pages of other origins may read."""


class ServerApp(Starlette):
    """The routes of a server as an ASGI application."""

    def __init__(self, table: RouteTable, options: ServerOptions, document: OpenApi) -> None:
        super().__init__()
        self.table = table
        self.document = document
        self.router = TableRouter(table, options.max_body_bytes)
        self._bodies = Bodies(LARGEST_BODIES * options.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            begin_call(scope, self._bodies)
        await super().__call__(scope, receive, send)


def create_app(  # noqa: PLR0913  (what a server is made of)
    backend: TextBackend | None,
    options: ServerOptions,
    *,
    names: AdapterNames | None = None,
    receipts: ReceiptIssuer | None = None,
    on_demand: OnDemand = NOTHING_ON_DEMAND,
    authenticator: Authenticator | None = None,
    images: ImageModel | None = None,
) -> ServerApp:
    """Make the application; requests are answered with 503 until the backends are ready.

    There is a language model, an image model, or both.
    """
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
    first: HostContext | None = text or image
    if first is None:
        raise ValueError("The server has no model.")
    _add_collectors(first)
    return _make_app(first, text, image, authenticator or TenantHeader(options.tenant_header))


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


def _make_app(
    first: HostContext,
    text: Context | None,
    image: ImageContext | None,
    authenticator: Authenticator,
) -> ServerApp:
    own = [] if text is None else [one for routes in TEXT_ROUTES for one in routes(text)]
    own += [one for routes in SHARED_ROUTES for one in routes(first)]
    own += [] if image is None else [one for routes in IMAGE_ROUTES for one in routes(image)]
    others = [root_route(first)] if text is None else routes_of_others(text)
    last = [] if image is None else [one for routes in LAST_ROUTES for one in routes(image)]
    served = [*own, *others, *last]
    absent = [] if text is not None else _absent_routes("text", others)
    absent += [] if image is not None else _absent_routes("image", others)
    options = first.options
    document = OpenApi(
        [*own, *last],
        servers=[{"url": options.root_path}] if options.root_path else [],
        extend=lambda written: add_families(written, others),
    )
    table = RouteTable([*document.routes(), *own, *others, *absent, *last])
    prefixes = {SDAPI: sdapi_error} | ({} if text is None else prefixes_of(text))
    missing = MissingRoutes(table, served, prefixes=prefixes, closed=_closed_paths(first, text))
    app = ServerApp(table, options, document)
    install_error_handlers(app, missing)
    app.add_middleware(CallerMiddleware, authenticator=authenticator, table=table, missing=missing)
    _add_middleware(app, options)
    return app


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
    """Routes that say that the server lacks their model, but for paths that begin with a name."""

    async def refuse(call: Call) -> Response:
        raise NotServed(NO_MODEL[modality], param="model")

    known = {f"{method} {route.path}" for route in served for method in methods_of(route)}
    keys = [
        key.split(" ", 1)
        for key, access in ROUTE_ACCESS.items()
        if access.modality == modality and key not in known and "/{name}" not in key
    ]
    return [
        Route(
            path=path,
            handler=refuse,
            methods=("GET", "HEAD") if method == "GET" else (method,),
            shape=sdapi_error if path.startswith(SDAPI) else error_response,
        )
        for method, path in keys
    ]


def _add_middleware(app: ServerApp, options: ServerOptions) -> None:
    """Add middleware; the last one added sees a request first."""
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


def _tier_stats(names: AdapterNames) -> list[StoreTierStats]:
    return [] if names.registry is None else names.registry.library.store.tier_stats()
