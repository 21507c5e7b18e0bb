"""Maps errors to HTTP statuses and to bodies in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    ContextLengthExceeded,
    DoesNotFit,
    EngineBusy,
    EngineStopped,
    FilesUnavailable,
    InvalidRequest,
    LoramuxError,
    QuotaExceeded,
    RateLimited,
    RecordNotFound,
    Refusal,
    RegistryConflict,
    RegistryUnavailable,
    RequestTimeout,
    SourceChanged,
    SourceFailed,
    SourceForbidden,
    SourceNotFound,
    SourceRefused,
    StoreDamaged,
    StoreFull,
)
from loramux.http_server.error_body import ErrorBody, ErrorInfo, make_info
from loramux.types.expected import OTHER_CONTENT_STATUS


class NotServed(LoramuxError):
    """The request names a model or an adapter that this server does not have."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class Forbidden(LoramuxError):
    """The server's settings, or the scopes of the key, do not allow the call."""


class Unauthenticated(LoramuxError):
    """The request has no valid key."""

    headers: ClassVar[Mapping[str, str]] = {"www-authenticate": 'Bearer realm="loramux"'}


class OtherContent(LoramuxError):
    """A name means another content here than the router that sent the request expects."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The adapter `{name}` has another content here than the request expects. Try again."
        )


class BodyTooLarge(LoramuxError):
    """The request's body is larger than the limit."""


class NotJson(LoramuxError):
    """The request's Content-Type is not JSON."""


HTTP_STATUS: dict[type[LoramuxError], int] = {
    InvalidRequest: 400,
    DoesNotFit: 400,
    Unauthenticated: 401,
    NotServed: 404,
    AdapterNotFound: 404,
    RecordNotFound: 404,
    Forbidden: 403,
    SourceForbidden: 403,
    QuotaExceeded: 403,
    SourceNotFound: 404,
    RequestTimeout: 408,
    RegistryConflict: 409,
    SourceChanged: 409,
    OtherContent: OTHER_CONTENT_STATUS,
    BodyTooLarge: 413,
    NotJson: 415,
    AdapterRefused: 422,
    SourceRefused: 422,
    EngineBusy: 429,
    RateLimited: 429,
    StoreDamaged: 500,
    LoramuxError: 500,
    SourceFailed: 502,
    EngineStopped: 503,
    FilesUnavailable: 503,
    RegistryUnavailable: 503,
    StoreFull: 507,
}

METHOD_NOT_ALLOWED = 405
RESTART_RETRY_AFTER_S = 2.0
ErrorShape = Callable[[Exception], Response]


def error_info(error: Exception) -> ErrorInfo:
    """Return the error as the client sees it; the text of an unexpected error goes to
    the log only.
    """
    if isinstance(error, LoramuxError):
        status = next(HTTP_STATUS[kind] for kind in type(error).__mro__ if kind in HTTP_STATUS)
        message: str = getattr(error, "client_message", None) or str(error)
        info = make_info(status, message, getattr(error, "param", None))
        if isinstance(error, Refusal | ContextLengthExceeded | RateLimited | QuotaExceeded):
            info.reason = error.code
        return info
    if isinstance(error, HTTPException):
        return make_info(error.status_code, str(error.detail))
    return make_info(500, "The server failed on this request; its log has the reason.")


def error_response(error: Exception) -> Response:
    info = error_info(error)
    return shaped_response(error, ErrorBody(error=info), info.code)


def shaped_response(error: Exception, body: object, status: int) -> Response:
    """Return an error's body with the headers that say when to retry."""
    headers = dict(getattr(error, "headers", None) or {})
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, RequestTimeout) or (
        isinstance(error, RateLimited) and error.retry_after_s is None
    ):
        # OpenAI's clients would retry at once and increase the load.
        headers["x-should-retry"] = "false"
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _retry_after_s(error: Exception) -> float | None:
    if isinstance(error, EngineBusy | RateLimited):
        return error.retry_after_s
    is_temporary = isinstance(error, EngineStopped | FilesUnavailable | RegistryUnavailable)
    return RESTART_RETRY_AFTER_S if is_temporary else None
