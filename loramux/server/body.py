"""Reads and decodes JSON bodies of bounded size; errors name the invalid field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loramux.errors import InvalidRequest
from loramux.server.errors import BodyTooLarge, NotJson

T = TypeVar("T")

# msgspec writes "... - at `$.prompt[0]`", "... - at `key` in `$.logit_bias`", or the field alone.
_FIELD = re.compile(r"`\$\.(\w+)|missing required field `(\w+)`")


async def read_json(request: Request, kind: type[T], *, max_bytes: int) -> tuple[T, int]:
    """Read and decode a body; returns it with its size in bytes."""
    body = await read_body(request, max_bytes)
    return decode(body, kind), len(body)


async def read_body(request: Request, max_bytes: int, *, any_type: bool = False) -> bytes:
    """Reads the body, or returns what `keep_body` has kept."""
    kept: bytes | None = getattr(request.state, "body", None)
    if kept is not None:
        return kept
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media_type.lower() != "application/json" and not any_type:
        raise NotJson(f"Send the header 'Content-Type: application/json', not '{media_type}'.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def keep_body(request: Request, body: bytes) -> None:
    """Gives the request this body for all that read it later."""
    request.state.body = body


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}.", param=_field(str(error))) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def json_response(reply: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(reply), status_code=status, media_type="application/json")


def _field(message: str) -> str | None:
    found = _FIELD.search(message)
    return (found[1] or found[2]) if found else None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {max_bytes} bytes.")
