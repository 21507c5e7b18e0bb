"""Errors as answers in the shape of the API that was called; what is said of missing routes."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from loramux.errors import LoramuxError, machine_error
from loramux.server.errors import METHOD_NOT_ALLOWED, ErrorShape, error_response
from loramux.server.http.call import facts_of
from loramux.server.http.routes import Route
from loramux.server.http.table import RouteTable, methods_of

NOT_FOUND = HTTPException(404)
MAX_CHARACTERS = 100
"""Characters of a path that are shown, and compared with the paths of the server."""


class MissingRoutes:
    """Explains requests without a route: the nearest one, its methods, or what opens it."""

    def __init__(
        self,
        table: RouteTable,
        served: Iterable[Route],
        *,
        prefixes: Mapping[str, ErrorShape],
        closed: Mapping[str, str],
    ) -> None:
        """Take the routes that do not refuse as `served`.

        `prefixes`: the shape of errors by the beginning of a path; `closed`: path -> what opens it.
        """
        self._table = table
        self._shapes: dict[str, ErrorShape] = {}
        for route in served:
            self._shapes.setdefault(route.path, route.shape)
        self._prefixes = prefixes
        self._closed = closed
        self._paths = sorted({route.path for route in table.routes})

    def shape_of(self, path: str) -> ErrorShape:
        found = self._shapes.get(path)
        if found is None:
            found = next(
                (shape for start, shape in self._prefixes.items() if path.startswith(start)), None
            )
        return found or error_response

    def explain(self, scope: Scope, error: HTTPException) -> HTTPException:
        """Return the error of a missing route with what to do; other errors as they are."""
        if error.status_code == METHOD_NOT_ALLOWED:
            allowed = self._table.methods(scope["path"])
            detail = f"{self._shown(scope)} is not allowed. Send {_either(allowed)}."
            return HTTPException(METHOD_NOT_ALLOWED, detail, {"allow": ", ".join(allowed)})
        if error.status_code != NOT_FOUND.status_code or error.detail != NOT_FOUND.detail:
            return error
        return HTTPException(
            error.status_code, f"There is no route {self._shown(scope)}. {self._instead(scope)}"
        )

    def _instead(self, scope: Scope) -> str:
        path = scope["path"]
        allowed = self._table.methods(path)
        if allowed:
            return f"Send {_either(allowed)}."
        opened_by = self._closed.get(path.rstrip("/"))
        if opened_by is not None:
            return opened_by
        near = difflib.get_close_matches(path[:MAX_CHARACTERS], self._paths, n=1, cutoff=0.7)
        if not near:
            return "GET /openapi.json lists all routes."
        methods = {
            method
            for route in self._table.routes
            if route.path == near[0]
            for method in methods_of(route)
        }
        method = scope["method"] if scope["method"] in methods else sorted(methods)[0]
        return f"Did you mean {method} {near[0].replace(':path', '')}?"

    def _shown(self, scope: Scope) -> str:
        path = scope["path"]
        return f"{scope['method']} {path[:MAX_CHARACTERS]}{'…' * (len(path) > MAX_CHARACTERS)}"


def _either(methods: Sequence[str]) -> str:
    return " or ".join(methods)


_log = logging.getLogger(__name__)
CLIENT_GONE_STATUS = 499


def install_error_handlers(app: Starlette, missing: MissingRoutes) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        facts = facts_of(request.scope)
        if isinstance(error, OSError):
            error = _known(error)
        shape = facts.shape
        if isinstance(error, HTTPException) and shape is error_response:
            error = missing.explain(request.scope, error)
            shape = missing.shape_of(request.scope["path"])
        response = shape(error)
        # Starlette handles unexpected errors outside of all middleware.
        if facts.request_id is not None and not isinstance(error, (LoramuxError, HTTPException)):
            response.headers["x-request-id"] = facts.request_id
        return response

    for kind in (LoramuxError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientDisconnect, _handle_client_gone)


def _known(error: OSError) -> Exception:
    """Return the error of files as clients see it, without paths; the log has them."""
    known = machine_error(error)
    if known is not None:
        _log.error("files of the server cannot be used: %s", error)
        return known
    _log.error("a request failed", exc_info=error)
    return error


async def _handle_client_gone(request: Request, error: Exception) -> Response:
    """Return the client has disconnected; the status is for access logs only."""
    return Response(status_code=CLIENT_GONE_STATUS)
