"""GET /ui: the web page, and GET /v1/live, which it follows."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loramux.server.context import HostContext
from loramux.server.http.streaming import stream_events
from loramux.server.live.feed import LiveFeed
from loramux.server.live.page import INDEX, file_response, page_files, to_page


def page_routes(context: HostContext) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    feed = LiveFeed(context)

    @router.get("/v1/live")
    async def live(request: Request) -> Response:
        """Server-sent events without an end: the state of the engine, then its changes."""
        context.require_known()
        return await stream_events(request, feed.events())

    if not context.options.ui:
        return router

    @router.api_route("/ui", methods=["GET", "HEAD"])
    async def without_slash(request: Request) -> Response:
        return to_page(request)

    @router.api_route("/ui/{path:path}", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        file = page_files().get(request.path_params["path"] or INDEX)
        if file is None:
            raise HTTPException(404)
        return file_response(request, file)

    return router
