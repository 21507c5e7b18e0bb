"""Body of an error in the own API's shape, which is OpenAI's."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET, Struct, UnsetType

ERROR_TYPE = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}
# Messages quote fields of the request, which may be megabytes.
MAX_MESSAGE_CHARACTERS = 1000


class ErrorInfo(Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    """The invalid field of the request."""
    code: int
    """The HTTP status; within a stream, the status that the error would have had."""
    reason: str | UnsetType = UNSET
    """Refusal code of an adapter, for programs."""


class ErrorBody(Struct, kw_only=True):
    error: ErrorInfo


def make_info(status: int, message: str, param: str | None = None) -> ErrorInfo:
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "…"
    kind = ERROR_TYPE.get(status, HTTPStatus(status).phrase.replace(" ", "") + "Error")
    return ErrorInfo(message=message, type=kind, param=param, code=status)


def encode_error(status: int, message: str) -> bytes:
    return msgspec.json.encode(ErrorBody(error=make_info(status, message)))
