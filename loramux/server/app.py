"""The HTTP application: all routes over one TextBackend."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from loramux import __version__
from loramux.backend import StoreTierStats, TextBackend
from loramux.metrics.server import Metrics
from loramux.metrics.store import ReceiptCollector, StoreCollector
from loramux.server.access import CallerMiddleware, RouteTable
from loramux.server.body import Bodies
from loramux.server.caller import Authenticator, TenantHeader
from loramux.server.connections.browsers import BrowserGuard
from loramux.server.connections.prefix import PrefixMiddleware
from loramux.server.context import NOTHING_ON_DEMAND, Context, OnDemand, ServerOptions
from loramux.server.endpoint import Endpoint, routes_of, shapes_of
from loramux.server.errors import install_error_handlers
from loramux.server.families.document import add_families
from loramux.server.families.table import endpoints_of, shared_with_own
from loramux.server.fitting import CachedFit
from loramux.server.names import AdapterNames
from loramux.server.openapi import install_openapi
from loramux.server.proxies import ForwardedMiddleware
from loramux.server.receipt_draft import ReceiptIssuer
from loramux.server.request_ids import (
    CID_HEADER,
    RECEIPT_HEADER,
    TIER_HEADER,
    TOOLS_HEADER,
    RequestIdMiddleware,
)
from loramux.server.routes.accounts import account_routes
from loramux.server.routes.adapters import adapter_routes
from loramux.server.routes.caller import caller_routes
from loramux.server.routes.doctor import doctor_routes
from loramux.server.routes.embeddings import embedding_routes
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
from loramux.server.routes.status import status_routes
from loramux.server.routes.tokens import token_routes

ROUTES = (
    chat_routes,
    completion_routes,
    embedding_routes,
    score_routes,
    model_routes,
    run_routes,
    receipt_routes,
    account_routes,
    key_routes,
    runtime_lora_routes,
    plan_routes,
    adapter_routes,
    # After /pin: the DELETE of a name would also match its path.
    registry_routes,
    token_routes,
    status_routes,
    caller_routes,
    doctor_routes,
    page_routes,
)
# Largest bodies that may arrive at once; smaller ones take less of this.
LARGEST_BODIES = 16


def create_app(
    backend: TextBackend,
    options: ServerOptions,
    *,
    names: AdapterNames | None = None,
    receipts: ReceiptIssuer | None = None,
    on_demand: OnDemand = NOTHING_ON_DEMAND,
    authenticator: Authenticator | None = None,
) -> FastAPI:
    """Make the application; requests are answered with 503 until the backend is ready."""
    app = FastAPI(
        title="loramux",
        version=__version__,
        description="Many LoRA adapters on one base model, mixed in one batch.",
        generate_unique_id_function=lambda route: route.name,
        servers=[{"url": options.root_path}] if options.root_path else None,
    )
    app.state.bodies = Bodies(LARGEST_BODIES * options.max_body_bytes)
    names = names or AdapterNames(backend)
    base_names = options.served_model_names
    metrics = Metrics(
        backend,
        model_name=base_names[0] if base_names else None,
        labels_of=names.labels_of,
        max_resident=CachedFit(backend).max_adapters,
    )
    metrics.registry.register(StoreCollector(lambda: _tier_stats(names)))
    receipts = receipts or ReceiptIssuer()
    metrics.registry.register(ReceiptCollector(lambda: receipts.num_dropped))
    context = Context(
        backend=backend,
        options=options,
        metrics=metrics,
        names=names,
        receipts=receipts,
        combinations=on_demand.combinations,
        sources=on_demand.sources,
        folder=on_demand.folder,
    )
    routers = [routes(context) for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    endpoints = endpoints_of(context)
    app.state.keyed = shared_with_own(endpoints)
    others = routes_of(
        (one for one in endpoints if one.path not in app.state.keyed),
        options.max_body_bytes,
    )
    app.router.routes.extend(others)
    own = [route for router in routers for route in router.routes]
    app.state.all_routes = [*own, *others]
    _add_middleware(app, options, authenticator, endpoints)
    install_error_handlers(app)
    install_openapi(app, lambda document: add_families(document, endpoints))
    return app


def _add_middleware(
    app: FastAPI,
    options: ServerOptions,
    authenticator: Authenticator | None,
    endpoints: Iterable[Endpoint],
) -> None:
    """Adds the middleware; the last one added sees a request first."""
    routes: list[Route] = app.state.all_routes
    documents = [one for one in app.router.routes if isinstance(one, Route) and one not in routes]
    shapes = shapes_of(one for one in endpoints if one.path not in app.state.keyed)
    table = RouteTable([*documents, *routes], shapes)
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
            expose_headers=["x-request-id", RECEIPT_HEADER, TOOLS_HEADER, CID_HEADER, TIER_HEADER],
        )
    app.add_middleware(BrowserGuard, options.allowed_hosts, options.cors_origins)
    app.add_middleware(RequestIdMiddleware)
    if options.root_path:
        app.add_middleware(PrefixMiddleware, prefix=options.root_path)
    if options.trusted_proxies:
        app.add_middleware(ForwardedMiddleware, proxies=options.trusted_proxies)


def _tier_stats(names: AdapterNames) -> list[StoreTierStats]:
    return [] if names.registry is None else names.registry.library.store.tier_stats()
