"""The end of a server: it answers until running requests have ended."""

from __future__ import annotations

import asyncio
import signal

from tests.unit.http_server.serving import Serving, serve_and


def test_new_requests_are_answered_until_the_drain_has_ended() -> None:
    async def work(server: Serving) -> None:
        server.server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.3)
        assert (await server.get()).startswith(b"HTTP/1.1 200")
        assert not server.server.should_exit
        server.app.released.set()
        await server.server.wait_until_drained()
        await asyncio.sleep(0)
        assert server.server.should_exit

    serve_and(work)


def test_a_second_interrupt_ends_the_server_at_once() -> None:
    async def work(server: Serving) -> None:
        server.server.handle_exit(signal.SIGINT, None)
        assert not server.server.should_exit
        server.server.handle_exit(signal.SIGINT, None)
        assert server.server.should_exit and server.server.force_exit
        server.app.released.set()

    serve_and(work)
