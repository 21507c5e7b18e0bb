"""Answers that the router gives itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loramux.router.upstream import Headers

if TYPE_CHECKING:
    from starlette.types import Send

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    502: "BadGatewayError",
    504: "GatewayTimeoutError",
    503: "ServiceUnavailableError",
}
LOST = "The answer is not complete: the connection to its server was lost."


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer with its whole body."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> str:
        return next((v.decode("latin-1") for n, v in self.headers if n.lower() == name), "")

    @property
    def retry_after_s(self) -> float:
        """Returns infinity without the header, or with a date."""
        try:
            return float(self.header(b"retry-after"))
        except ValueError:
            return float("inf")

    def with_retry_after(self) -> Whole:
        if self.status not in (429, 502, 503, 504) or self.header(b"retry-after"):
            return self
        return Whole(self.status, [*self.headers, (b"retry-after", b"1")], self.body)

    async def send(self, send: Send) -> None:
        names = {name.lower() for name, _ in self.headers}
        headers = list(self.headers)
        if b"content-length" not in names:
            headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_answer(what: Any, *, status: int = 200, headers: Headers | None = None) -> Whole:
    kind = (b"content-type", b"application/json")
    return Whole(status, [kind, *(headers or [])], json.dumps(what).encode())


def error_info(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "InternalServerError")
    return {"message": message, "type": kind, "param": None, "code": status}


def error_answer(status: int, message: str) -> Whole:
    return json_answer({"error": error_info(status, message)}, status=status).with_retry_after()


def lost_event(path: str, content_type: str) -> bytes:
    """End a stream so that no client takes it for complete."""
    info = error_info(502, LOST)
    if "ndjson" in content_type:
        return json.dumps({"error": LOST}).encode() + b"\n"
    if path == "/v1/messages":
        told = {"type": "error", "error": {"type": "api_error", "message": LOST}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": info}).encode() + b"\n\n"
