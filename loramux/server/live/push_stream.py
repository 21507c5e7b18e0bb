"""The progress of a push as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from loramux.server.http.streaming import named_event
from loramux.sources.download import Progress
from loramux.wire.registry import PushedEntry

EVENT_STREAM = "text/event-stream"
INTERVAL_S = 0.25
Report = Callable[[Progress], None]


def no_report(progress: Progress) -> None:
    """Ignores the progress."""


async def progress_events(
    push: Callable[[Report], Awaitable[PushedEntry]],
) -> AsyncGenerator[bytes, None]:
    """Yield `progress` events while the push runs, and then `done` with its result.

    A push goes on when the client has disconnected, as one without events does.
    """
    newest = Progress(0, None)
    shown: Progress | None = None

    def report(progress: Progress) -> None:
        nonlocal newest
        newest = progress

    task = asyncio.ensure_future(push(report))
    # Reading the exception keeps asyncio from reporting it if no reader is left.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    while not task.done():
        await asyncio.wait({task}, timeout=INTERVAL_S)
        if not task.done() and newest != shown:
            shown = newest
            sizes = {"received_bytes": shown.received_bytes, "total_bytes": shown.total_bytes}
            yield named_event("progress", sizes)
    yield named_event("done", task.result())
