"""The HTTP application of an image model."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loramux import __version__
from loramux.backend import Health
from loramux.server.access import ANY, ENGINE, INFER, OPEN, Access, CallerMiddleware, RouteTable
from loramux.server.app import LARGEST_BODIES
from loramux.server.body import Bodies, json_response
from loramux.server.caller import Authenticator, TenantHeader
from loramux.server.connections.browsers import BrowserGuard
from loramux.server.errors import ErrorShape, install_error_handlers
from loramux.server.images.drawing import ImageContext
from loramux.server.images.openai import openai_routes
from loramux.server.images.residency import ImageResidency
from loramux.server.images.sheaf import sheaf_error, sheaf_routes
from loramux.server.request_ids import RequestIdMiddleware
from loramux.server.residency import read_asked
from loramux.server.wire import Liveness

IMAGE_ROUTE_ACCESS: Mapping[str, Access] = {
    "GET /docs": OPEN,
    "GET /docs/oauth2-redirect": OPEN,
    "GET /openapi.json": OPEN,
    "GET /redoc": OPEN,
    "GET /health": OPEN,
    "GET /live": OPEN,
    "GET /version": OPEN,
    "GET /v1/residency": ENGINE,
    "GET /v1/models": ANY,
    "POST /v1/images/generations": INFER,
    "GET /{name}/health": OPEN,
    "GET /{name}/ready": OPEN,
    "POST /{name}/predict": INFER,
    "POST /{name}/stream": INFER,
}
SHEAF = tuple(key for key in IMAGE_ROUTE_ACCESS if "{name}" in key)


def create_image_app(
    context: ImageContext,
    *,
    authenticator: Authenticator | None = None,
    allowed_hosts: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
) -> FastAPI:
    """Make the application; requests are answered with 503 until the backend is ready."""
    app = FastAPI(
        title="loramux images",
        version=__version__,
        description="Many LoRA adapters on one image model, mixed in one batch.",
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.bodies = Bodies(LARGEST_BODIES * context.max_body_bytes)
    routers = (openai_routes(context), _status_routes(context), sheaf_routes(context))
    for router in routers:
        app.include_router(router)
    own = [route for router in routers for route in router.routes if isinstance(route, Route)]
    documents = [route for route in app.router.routes if isinstance(route, Route)]
    routes = [*(one for one in documents if one not in own), *own]
    app.state.all_routes = routes
    shapes: dict[str, ErrorShape] = dict.fromkeys(SHEAF, sheaf_error)
    app.add_middleware(
        CallerMiddleware,
        authenticator=authenticator or TenantHeader(None),
        table=RouteTable(routes, shapes, IMAGE_ROUTE_ACCESS),
    )
    app.add_middleware(BrowserGuard, allowed_hosts, cors_origins)
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)
    return app


def _status_routes(context: ImageContext) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/health")
    async def health(request: Request) -> Response:
        """200 while requests are accepted."""
        state = context.backend.health
        status = 200 if state is Health.READY else 503
        return json_response({"status": state.value}, status=status)

    @router.get("/version")
    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    @router.get("/live")
    async def live(request: Request) -> Response:
        """200 as long as this process answers."""
        return json_response(Liveness())

    residency = ImageResidency(context)

    @router.get("/v1/residency")
    async def report(request: Request) -> Response:
        """State and load, for routers; waits up to `wait_s` for a change."""
        since, instance, wait_s = read_asked(request.query_params)
        await residency.wait_for_news(since=since, instance=instance, wait_s=wait_s)
        return json_response(residency.report(since=since, instance=instance))

    return router
