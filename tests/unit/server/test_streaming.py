"""Streams that meet slow readers, gone readers and dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from loramux.backend.text import Delta
from loramux.errors import EngineStopped
from loramux.types.request import FinishReason, Request
from tests.unit.server.asgi_client import (
    CHAT,
    COMPLETIONS,
    OpenCall,
    chat,
    complete,
    events_of,
    make_app,
    with_open_call,
)
from tests.unit.server.scripted_backend import ScriptedBackend, delta

STREAM = {"prompt": "hi", "stream": True, "max_tokens": 60}


async def endless(job: Request) -> AsyncIterator[Delta]:
    while True:
        yield delta(job, 0, b"a")
        await asyncio.sleep(0)


async def silent(job: Request) -> AsyncIterator[Delta]:
    await asyncio.Event().wait()
    yield delta(job, 0, b"")


async def dies_after_two(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")
    yield delta(job, 0, b"b")
    raise EngineStopped("The engine died.")


async def ends_early(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")


async def ends_in_an_error(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")
    yield delta(job, 0, b"", FinishReason.ERROR)


async def runs_out_of_time(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")
    end = delta(job, 0, b"", FinishReason.ERROR)
    yield replace(end, error="Timed out.", error_code="timeout")


async def is_aborted(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")
    yield delta(job, 0, b"", FinishReason.ABORT)


async def has_a_bug(job: Request) -> AsyncIterator[Delta]:
    yield delta(job, 0, b"a")
    raise ZeroDivisionError("secret")


async def dies_at_once(job: Request) -> AsyncIterator[Delta]:
    raise EngineStopped("The engine died.")
    yield


FAILURES = [
    (dies_after_two, 503),
    (ends_early, 503),
    (is_aborted, 503),
    (ends_in_an_error, 500),
    (runs_out_of_time, 408),
    (has_a_bug, 500),
]


@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(("script", "code"), FAILURES)
def test_broken_stream_ends_with_an_error_event_and_no_done(
    send: Any, script: Any, code: int
) -> None:
    response = send(make_app(ScriptedBackend(script)), stream=True)
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert last["error"]["code"] == code
    assert "secret" not in last["error"]["message"]
    assert chunks[-1]["choices"][0]["finish_reason"] is None
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(("script", "code"), FAILURES)
def test_broken_answer_is_never_a_truncated_200(send: Any, script: Any, code: int) -> None:
    response = send(make_app(ScriptedBackend(script)))
    assert response.status_code == code
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"]


def test_failure_of_one_prompt_ends_the_stream_of_all() -> None:
    async def second_dies(job: Request) -> AsyncIterator[Delta]:
        script = dies_after_two if bytes(job.prompt_token_ids) == b"b" else endless
        async for item in script(job):
            yield item

    backend = ScriptedBackend(second_dies)
    events = events_of(complete(make_app(backend), ["a", "b", "c"], stream=True).text)
    assert events[-1]["error"]["code"] == 503
    assert backend.num_closed == 3


def test_failure_before_the_first_token_is_a_plain_error() -> None:
    response = chat(make_app(ScriptedBackend(dies_at_once)), stream=True)
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["retry-after"]) >= 1


async def read_until_body(call: OpenCall) -> None:
    assert (await call.sent.get())["type"] == "http.response.start"
    assert (await call.sent.get())["body"].startswith(b"data: ")


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_client_that_goes_mid_stream_aborts_every_job(num_prompts: int) -> None:
    async def check(backend: ScriptedBackend, call: OpenCall) -> None:
        await read_until_body(call)
        call.disconnect()
        while backend.num_closed < num_prompts:
            backend.closed.clear()
            await backend.closed.wait()

    body = STREAM | {"prompt": ["hi"] * num_prompts}
    with_open_call(ScriptedBackend(endless), COMPLETIONS, body, check)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_before_the_first_token_aborts_the_job(stream: bool) -> None:
    async def check(backend: ScriptedBackend, call: OpenCall) -> None:
        while not backend.requests:
            await asyncio.sleep(0)
        call.disconnect()
        await backend.closed.wait()

    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with_open_call(ScriptedBackend(silent), CHAT, body, check)


def test_client_that_goes_while_a_write_waits_aborts_the_job() -> None:
    async def check(backend: ScriptedBackend, call: OpenCall) -> None:
        while not call.sent.full():
            await asyncio.sleep(0)
        call.disconnect()
        await backend.closed.wait()

    with_open_call(ScriptedBackend(endless), COMPLETIONS, STREAM, check)


@pytest.mark.parametrize("prompts", [1, 4])
def test_slow_reader_holds_the_engine_back(prompts: int) -> None:
    """Deltas are pulled only as fast as they are read, up to a bounded number ahead."""
    num_made = 0

    async def counting(job: Request) -> AsyncIterator[Delta]:
        nonlocal num_made
        async for item in endless(job):
            num_made += 1
            yield item

    async def check(backend: ScriptedBackend, call: OpenCall) -> None:
        await read_until_body(call)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert num_made <= 3 + 3 * prompts

    body = STREAM | {"prompt": ["hi"] * prompts}
    with_open_call(ScriptedBackend(counting), COMPLETIONS, body, check)
