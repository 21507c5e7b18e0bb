"""The async client does what the sync one does; only what asyncio can break is tested again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from loramux.client.async_client import AsyncClient
from loramux.client.errors import (
    ClientError,
    ConnectionLost,
    IncompleteStream,
    NotFound,
    StreamError,
    Unavailable,
)
from tests.scripted_server import (
    DONE,
    Scripted,
    ScriptedServer,
    chat_chunk,
    chat_reply,
    completion_chunk,
    completion_reply,
    event,
    model_list,
    reply_error,
    reply_events,
    reply_json,
    scripted_server,
)

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = reply_events(event(chat_chunk("Hi")), event(chat_chunk(None, "stop")), DONE)


def run_with(
    *replies: Scripted, use: Callable[[AsyncClient, ScriptedServer], Awaitable[None]]
) -> list[float]:
    """Return how long the client slept."""
    sleeps: list[float] = []

    async def sleep(delay_s: float) -> None:
        sleeps.append(delay_s)

    async def main(server: ScriptedServer) -> None:
        async with AsyncClient(server.url, max_retries=2, sleep=sleep) as client:
            await use(client, server)

    with scripted_server(*replies) as server:
        asyncio.run(main(server))
    return sleeps


def test_every_call_answers() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        assert (await client.chat(HELLO, adapters=["a"])).text == "Hi"
        assert (await client.complete("Say")).text == "so"
        assert [chunk.text async for chunk in client.stream_chat(HELLO)] == ["Hi", ""]
        assert [chunk.text async for chunk in client.stream_complete("Say")] == ["so"]
        assert [card.id for card in await client.models()] == ["smol", "pirate"]
        assert (await client.tokenize(messages=HELLO)).count == 2
        assert await client.detokenize([1, 2]) == "hello"
        assert await client.adapters() == []
        assert (await client.stats()).running == 2
        assert not (await client.health(deep=True)).is_healthy
        assert server.received[0].fields["adapters"] == ["a"]

    run_with(
        chat_reply("Hi"),
        completion_reply("so"),
        ANSWER,
        reply_events(event(completion_chunk("so", "stop")), DONE),
        model_list("smol", ["pirate"]),
        reply_json({"tokens": [1, 2], "count": 2}),
        reply_json({"prompt": "hello"}),
        reply_json({"data": []}),
        reply_json({"model": "smol", "status": "ready", "running": 2}),
        Scripted(503),
        use=use,
    )


def test_a_busy_server_is_asked_again_and_then_given_up() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        assert (await client.chat(HELLO)).text == "Hi"
        with pytest.raises(Unavailable):
            await client.chat(HELLO)
        assert len(server.received) == 5

    sleeps = run_with(
        reply_error(429, Retry_After="1"), chat_reply("Hi"), *[reply_error(503)] * 3, use=use
    )
    assert len(sleeps) == 3
    assert sleeps[0] >= 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (reply_events(event(chat_chunk("Hi")), cut=True), IncompleteStream),
        (reply_events(event(chat_chunk("Hi", "stop"))), IncompleteStream),
        (reply_events(event(chat_chunk("Hi")), DONE), IncompleteStream),
        (reply_events(event(chat_chunk("Hi")), event({"error": "died"})), StreamError),
        (reply_error(404), NotFound),
    ],
)
def test_a_broken_stream_never_looks_complete(reply: Scripted, kind: type[ClientError]) -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        with pytest.raises(kind):
            async for _ in client.stream_chat(HELLO):
                pass

    assert run_with(reply, ANSWER, use=use) == []


def test_a_cut_reply_is_no_answer() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        with pytest.raises(ConnectionLost):
            await client.chat(HELLO)

    run_with(Scripted(body=b'{"id": "x"', cut=True), use=use)


def test_leaving_a_stream_hangs_up() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        async with aclosing(client.stream_chat(HELLO)) as stream:
            assert (await anext(stream)).text
        assert await asyncio.to_thread(server.client_left.wait, 10)

    run_with(reply_events(event(chat_chunk("x" * 4096)), endless=True), use=use)


def test_a_cancelled_stream_hangs_up() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream_chat(HELLO):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.client_left.wait, 10)

    run_with(reply_events(event(chat_chunk("x" * 4096)), endless=True), use=use)


def test_more_streams_than_a_default_pool_holds_run_at_once() -> None:
    async def use(client: AsyncClient, server: ScriptedServer) -> None:
        async def first() -> None:
            async with aclosing(client.stream_chat(HELLO)) as stream:
                await anext(stream)
                await everyone.wait()

        everyone = asyncio.Barrier(120)
        async with asyncio.timeout(30):
            await asyncio.gather(*(first() for _ in range(120)))

    run_with(*[ANSWER] * 120, use=use)
