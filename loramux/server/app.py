"""The HTTP application: all routes over one TextBackend."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from loramux import __version__
from loramux.backend import StoreTierStats, TextBackend
from loramux.metrics.server import Metrics
from loramux.metrics.store import ReceiptCollector, StoreCollector
from loramux.server.caller import CallerMiddleware
from loramux.server.combinations import Combinations
from loramux.server.context import NOTHING_ON_DEMAND, Context, OnDemand, ServerOptions
from loramux.server.endpoint import routes_of
from loramux.server.errors import install_error_handlers
from loramux.server.families.table import endpoints_of, shared_with_own
from loramux.server.names import AdapterNames
from loramux.server.openapi import install_openapi
from loramux.server.receipt_draft import ReceiptIssuer
from loramux.server.request_ids import RECEIPT_HEADER, TOOLS_HEADER, RequestIdMiddleware
from loramux.server.routes.adapters import adapter_routes
from loramux.server.routes.models import model_routes
from loramux.server.routes.openai import chat_routes, completion_routes
from loramux.server.routes.plans import plan_routes
from loramux.server.routes.receipts import receipt_routes
from loramux.server.routes.registry import registry_routes
from loramux.server.routes.run import run_routes
from loramux.server.routes.runtime_lora import runtime_lora_routes
from loramux.server.routes.status import status_routes
from loramux.server.routes.tokens import token_routes

ROUTES = (
    chat_routes,
    completion_routes,
    model_routes,
    run_routes,
    receipt_routes,
    runtime_lora_routes,
    plan_routes,
    adapter_routes,
    # After /pin: the DELETE of a name would also match its path.
    registry_routes,
    token_routes,
    status_routes,
)


def create_app(
    backend: TextBackend,
    options: ServerOptions,
    *,
    names: AdapterNames | None = None,
    receipts: ReceiptIssuer | None = None,
    combinations: Combinations | None = None,
    on_demand: OnDemand = NOTHING_ON_DEMAND,
) -> FastAPI:
    """Make the application; requests are answered with 503 until the backend is ready."""
    app = FastAPI(
        title="loramux",
        version=__version__,
        description="Many LoRA adapters on one base model, mixed in one batch.",
        generate_unique_id_function=lambda route: route.name,
    )
    names = names or AdapterNames(backend)
    base_names = options.served_model_names
    metrics = Metrics(
        backend,
        model_name=base_names[0] if base_names else None,
        labels_of=names.labels_of,
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
        combinations=combinations,
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
    app.state.all_routes = [*(route for router in routers for route in router.routes), *others]
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", RECEIPT_HEADER, TOOLS_HEADER],
        )
    app.add_middleware(CallerMiddleware, tenant_header=options.tenant_header)
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)
    install_openapi(app)
    return app


def _tier_stats(names: AdapterNames) -> list[StoreTierStats]:
    return [] if names.registry is None else names.registry.library.store.tier_stats()
