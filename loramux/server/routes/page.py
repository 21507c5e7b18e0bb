"""GET /ui: the web page, and GET /v1/live, which it follows."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response

from loramux.server.context import HostContext
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import stream_events
from loramux.server.live.feed import LiveFeed
from loramux.server.live.page import INDEX, file_response, page_files, to_page


def page_routes(context: HostContext) -> list[Route]:
    routes = Routes()
    feed = LiveFeed(context)

    @routes.get("/v1/live")
    async def live(request: Call) -> Response:
        """Server-sent events without an end: the state of the engine, then its changes."""
        context.require_known()
        return await stream_events(request, feed.events())

    if not context.options.ui:
        return routes.found

    @routes.on("/ui", "GET", "HEAD")
    async def without_slash(request: Call) -> Response:
        return to_page(request)

    @routes.on("/ui/{path:path}", "GET", "HEAD")
    async def page(request: Call) -> Response:
        file = page_files().get(request.path_params["path"] or INDEX)
        if file is None:
            raise HTTPException(404)
        return file_response(request, file)

    return routes.found
