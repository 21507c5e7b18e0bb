"""Handlers of errors: each is answered in the shape of the API that was called."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loramux.errors import LoramuxError, machine_error
from loramux.server.errors import error_response
from loramux.server.http.call import facts_of
from loramux.server.http.missing_routes import MissingRoutes

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
