"""Reads and decodes JSON bodies of bounded size; errors name the invalid field.

Decoding holds the interpreter, and so every other request: the parts of a body are counted as it
arrives, and a body with more of them than decode in some 50 ms is refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loramux.errors import InvalidRequest
from loramux.server.errors import BodyTooLarge, NotJson
from loramux.server.http.call import Call

T = TypeVar("T")

# msgspec writes "... - at `$.prompt[0]`", "... - at `key` in `$.logit_bias`", or the field alone.
_FIELD = re.compile(r"`\$\.(\w+)|missing required field `(\w+)`")


MAX_VALUES = 2**19
"""Numbers, strings, objects and the like of one body, as many as it has commas."""
MAX_STRINGS = 2**16
"""Keys included."""
MAX_CONTAINERS = 2**17
"""Objects and lists."""
MAX_ESCAPES = 2**21
MAX_EXTREME_NUMBERS = 1000
"""Numbers that take 10 to 50 us each to decode: near the ends of the range, or of many digits."""
_EXTREME_EXPONENTS = tuple(re.compile(e + rb"[+-]?0*[23]\d\d[\s,\]}]") for e in (b"e", b"E"))
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS = b"0" * 90
# A body of this size is decoded once in a few milliseconds, whatever it holds.
_LARGE_BYTES = 2**18
_PIECE_BYTES = 2**18
_SMALL_BYTES = 2**16


@dataclass(slots=True)
class _Parts:
    """Counts what a body is made of; characters inside of strings count too."""

    values: int = 0
    strings: int = 0
    containers: int = 0
    escapes: int = 0
    extreme_numbers: int = 0

    def add(self, piece: bytes) -> None:
        self.values += piece.count(b",")
        # A quote with a backslash before it begins no string.
        self.strings += (piece.count(b'"') - piece.count(b'\\"')) // 2
        self.containers += piece.count(b"{") + piece.count(b"[")
        self.escapes += piece.count(b"\\")
        self.extreme_numbers += sum(len(one.findall(piece)) for one in _EXTREME_EXPONENTS)
        self.extreme_numbers += piece.translate(_TO_ZEROS).count(_MANY_DIGITS)

    def check(self) -> None:
        for what, number, limit in (
            ("values", self.values, MAX_VALUES),
            ("strings", self.strings, MAX_STRINGS),
            ("objects and lists", self.containers, MAX_CONTAINERS),
            ("escape sequences", self.escapes, MAX_ESCAPES),
            ("extreme numbers", self.extreme_numbers, MAX_EXTREME_NUMBERS),
        ):
            if number > limit:
                raise BodyTooLarge(
                    f"The body has more than {limit} {what}. Send several smaller requests."
                )


async def read_json(request: Call, kind: type[T], *, max_bytes: int) -> tuple[T, int]:
    """Read and decode a body; returns it with its size in bytes."""
    body = await read_body(request, max_bytes)
    return decode(body, kind), len(body)


async def read_body(request: Call, max_bytes: int, *, any_type: bool = False) -> bytes:
    """Read the body; a body that was read before, or put in its place, is returned again."""
    if request.facts.body is not None:
        request.facts.body_bytes = len(request.facts.body)
        return request.facts.body
    if not any_type:
        _require_json(request)
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = await _receive(request, max_bytes)
    await yield_after(len(body))
    request.facts.body_bytes = len(body)
    return body


async def read_upload(request: Call, max_bytes: int) -> bytes:
    """Read a body that is not JSON: its parts are not counted, and any type is taken."""
    return await _receive(request, max_bytes, is_json=False)


async def _receive(request: Call, max_bytes: int, *, is_json: bool = True) -> bytes:
    bodies = request.facts.bodies
    body, parts, num_taken = bytearray(), _Parts(), 0
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            if len(body) - num_taken > _SMALL_BYTES:
                bodies.take(len(body) - num_taken)
                num_taken = len(body)
            if is_json:
                parts.add(piece)
                parts.check()
    finally:
        bodies.give_back(num_taken)
    return bytes(body)


def _require_json(request: Call) -> None:
    """Raise NotJson unless the body is declared as JSON, or there is none.

    Web pages of other origins may send bodies of a few other types, and of none, without asking.
    """
    declared = request.headers.get("content-type")
    if declared is None:
        has_body = request.headers.get("content-length", "0") != "0"
        if not has_body and "transfer-encoding" not in request.headers:
            return
        raise NotJson("Send the header 'Content-Type: application/json'.")
    media_type = declared.partition(";")[0].strip()
    if media_type.lower() != "application/json":
        raise NotJson(f"Send the header 'Content-Type: application/json', not '{media_type}'.")


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


def convert(fields: Mapping[str, Any], kind: type[T], *, from_text: bool = False) -> T:
    """Make a struct of decoded fields; `from_text`: numbers and the like are texts."""
    try:
        return msgspec.convert(fields, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}.", param=_field(str(error))) from error


async def yield_after(num_bytes: int) -> None:
    """Lets other requests run after work on a large body."""
    if num_bytes > _LARGE_BYTES:
        await asyncio.sleep(0)


def json_response(reply: Any, *, status: int = 200) -> Response:
    return PiecewiseResponse(
        msgspec.json.encode(reply), status_code=status, media_type="application/json"
    )


class PiecewiseResponse(Response):
    """Sends a large body piece by piece, as fast as the client reads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= _PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        for at in range(0, len(self.body), _PIECE_BYTES):
            piece = bytes(self.body[at : at + _PIECE_BYTES])
            is_last = at + _PIECE_BYTES >= len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


def _field(message: str) -> str | None:
    found = _FIELD.search(message)
    return (found[1] or found[2]) if found else None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {max_bytes} bytes.")
