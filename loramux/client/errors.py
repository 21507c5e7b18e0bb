"""One exception for each way in which a request can fail; all are ClientError."""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.errors import LoramuxError


class ClientError(LoramuxError):
    """Base of all errors of the client.

    `status` is None without an HTTP reply; `param` is the field that the server refused.
    """

    def __init__(
        self, message: str, *, status: int | None = None, param: str | None = None, body: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.body = body


class Retryable(ClientError):
    """The request was not processed; the same request may succeed later."""

    retry_after_s: float | None = None
    """Wait that the server requested."""


class ConnectFailed(Retryable):
    """The connection failed: the server is down, restarting, or at another address."""


class RateLimited(Retryable):
    """429: the queue of the server is full."""


class Unavailable(Retryable):
    """503: the server is up but its engine is not, or it is shutting down."""


class BadRequest(ClientError):
    """400, 422 and other 4xx: the request itself is wrong."""


class NotAllowed(ClientError):
    """401 and 403."""


class NotFound(ClientError):
    """404: no such model, adapter or route."""


class ServerError(ClientError):
    """5xx except 503."""


class ConnectionLost(ClientError):
    """The connection broke before the reply was complete."""


class TimedOut(ClientError):
    """No bytes arrived for timeout_s; or 408: the request's own `timeout` expired."""


class BadReply(ClientError):
    """The reply does not have the expected format."""


class StreamError(ClientError):
    """The server ended the stream with an error; the text so far is incomplete."""


class IncompleteStream(ClientError):
    """The stream stopped without its end marker; the text so far is incomplete."""


BY_STATUS: dict[int, type[ClientError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    408: TimedOut,
    429: RateLimited,
    503: Unavailable,
}


def error_for_status(status: int, body: str) -> ClientError:
    kind = BY_STATUS.get(status)
    if kind is None:
        kind = BadRequest if 400 <= status < 500 else ServerError if status >= 500 else BadReply
    message, param = read_error(body)
    return kind(message or f"HTTP status {status}.", status=status, param=param, body=body)


def read_error(body: str) -> tuple[str, str | None]:
    """Message and field name of an error in OpenAI's format, FastAPI's, or plain text."""
    try:
        reply: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return body.strip()[:500], None
    found = reply.get("error", reply.get("detail", reply)) if isinstance(reply, dict) else reply
    if not isinstance(found, dict):
        return str(found), None
    message = found.get("message")
    param = found.get("param")
    return str(message if message is not None else found), None if param is None else str(param)
