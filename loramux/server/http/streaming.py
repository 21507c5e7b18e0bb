"""Server-sent events with backpressure, disconnect detection and an error event on failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loramux.errors import LoramuxError
from loramux.http_server.error_body import ErrorBody
from loramux.server.errors import error_info

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]

DONE = b"data: [DONE]\n\n"


def event(chunk: object) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def named_event(name: str, chunk: object) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(chunk)


def line(chunk: object) -> bytes:
    """Return a line of newline-delimited JSON."""
    return msgspec.json.encode(chunk) + b"\n"


def error_event(error: Exception) -> bytes:
    return event(ErrorBody(error=error_info(error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a stream is written."""

    media_type: str = "text/event-stream"
    on_error: Callable[[Exception], bytes] = error_event
    """Writes the error that ends a stream."""
    headers: Mapping[str, str] = field(default_factory=dict)


OPENAI_STREAM = StreamForm()


async def stream_events(
    request: Request, events: Events, form: StreamForm = OPENAI_STREAM
) -> Response:
    """Wait for the first event, so that an earlier failure becomes a plain HTTP error."""
    try:
        first = await until_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, form)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """Await the work; it is cancelled if the client disconnects first."""
    return await _first_of(_as_coroutine(work), request.receive)


class EventStream(Response):
    """A response of events, one after another."""

    def __init__(self, first: bytes, events: Events, form: StreamForm = OPENAI_STREAM) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **form.headers}
        super().__init__(headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self._on_error = form.on_error
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await _first_of(self._write(send), receive)
            except ClientDisconnect:
                return

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send(_body(self._first, more=True))
        try:
            async for chunk in self._events:
                # This waits while the client's buffers are full, and nothing is read meanwhile.
                await send(_body(chunk, more=True))
        except Exception as error:
            await send(_body(self._on_error(error), more=False))
            if not isinstance(error, LoramuxError):
                raise
        else:
            await send(_body(b"", more=False))


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _body(chunk: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
