"""Hostile bodies: each is refused with a status, in OpenAI's shape, with its field named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from loramux.http_server.error_body import MAX_MESSAGE_CHARACTERS
from loramux.server.http.body import decode, json_response
from loramux.wire.text import CompletionRequest
from tests.unit.server import asgi_client, bad_bodies
from tests.unit.server.asgi_client import complete, make_app, post, request
from tests.unit.server.bad_bodies import NOT_JSON
from tests.unit.server.scripted_backend import ScriptedBackend

CASES = [
    *((asgi_client.COMPLETIONS, *case) for case in NOT_JSON + bad_bodies.COMPLETIONS),
    *((asgi_client.CHAT, *case) for case in bad_bodies.CHAT),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [(path, body, status, param) for path, _, body, status, param in CASES],
    ids=[f"{path.split('/')[2]}: {what}" for path, what, *_ in CASES],
)
def test_bad_body_is_refused_by_name(
    path: str, body: bytes, status: int, param: str | None
) -> None:
    backend = ScriptedBackend()
    response = post(make_app(backend), path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["code"] == status
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
    assert 0 < len(error["message"]) <= MAX_MESSAGE_CHARACTERS + 1
    assert not backend.requests


def test_unknown_fields_are_ignored() -> None:
    body = {"prompt": "hi", "metadata": {"a": 1}, "x": [1], "parallel_tool_calls": False}
    assert post(make_app(), asgi_client.COMPLETIONS, body).status_code == 200


def test_null_means_the_default_everywhere() -> None:
    body = dict.fromkeys(CompletionRequest.__struct_fields__) | {"prompt": "hi"}
    response = post(make_app(), asgi_client.COMPLETIONS, body)
    assert response.status_code == 200, response.text


def test_last_of_two_equal_keys_wins() -> None:
    assert decode(b'{"prompt": "a", "prompt": "b"}', CompletionRequest).prompt == "b"


def test_body_over_the_limit_is_refused_by_its_declared_length() -> None:
    app = make_app(max_body_bytes=100)
    response = post(app, asgi_client.COMPLETIONS, {"prompt": "x" * 100})
    assert response.status_code == 413
    assert "100 bytes" in response.json()["error"]["message"]


def test_body_of_undeclared_length_is_not_read_past_the_limit() -> None:
    num_pieces = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_pieces
        for _ in range(1000):
            num_pieces += 1
            yield b"x" * 10

    headers = {"content-type": "application/json"}
    app = make_app(max_body_bytes=100)
    response = request(app, "POST", asgi_client.COMPLETIONS, content=pieces(), headers=headers)
    assert response.status_code == 413
    assert num_pieces <= 12


def test_bodies_that_never_end_share_a_bounded_memory() -> None:
    app, limit, num_open = make_app(max_body_bytes=2**20), 2**20, 40
    headers = {"content-type": "application/json"}

    async def pieces(may_end: asyncio.Event) -> AsyncIterator[bytes]:
        yield b" " * (limit - 1)
        await may_end.wait()

    async def all_at_once() -> list[int]:
        transport, may_end = httpx2.ASGITransport(app), asyncio.Event()
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            path = asgi_client.COMPLETIONS

            async def post_one() -> int:
                sent = client.post(path, content=pieces(may_end), headers=headers)
                return int((await sent).status_code)

            posted = [asyncio.create_task(post_one()) for _ in range(num_open)]
            done: set[asyncio.Task[int]] = set()
            while len(done) < num_open - 16:
                done = {task for task in posted if task.done()}
                await asyncio.sleep(0.01)
            small = await client.post(path, json={"prompt": "hi"})
            assert small.status_code == 200
            may_end.set()
            refused = [task.result() for task in done]
            assert {await task for task in posted} == {400, 429}
        return refused

    assert asgi_client.run(all_at_once()) == [429] * (num_open - 16)
    body = {"prompt": "x" * 200_000}
    assert post(app, asgi_client.COMPLETIONS, body).status_code == 400


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_refused_with_the_fix(declared: str) -> None:
    response = request(
        make_app(),
        "POST",
        asgi_client.COMPLETIONS,
        content=b'{"prompt": "hi"}',
        headers={"content-type": declared},
    )
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("declared", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken_however_it_is_spelled(declared: str) -> None:
    headers = {"content-type": declared}
    response = request(
        make_app(), "POST", asgi_client.COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        asgi_client.COMPLETIONS,
        "/v1/adapters/plan",
        "/tokenize",
        "/detokenize",
        "/v1/run",
    ],
)
def test_undeclared_body_is_refused_on_every_route_that_reads_one(path: str) -> None:
    response = request(make_app(), "POST", path, content=b'{"prompt": "hi"}')
    assert response.status_code == 415, response.text
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt": [' + b"1," * (2**19 + 1) + b"1]}", "values"),
        (b'{"messages": [' + b'{"a":"b"},' * 40_000 + b"{}]}", "strings"),
        (b'{"messages": [' + b"{}," * 140_000 + b"{}]}", "objects"),
        (b'{"prompt": "' + rb"\u0041" * (2**21 + 1) + b'"}', "escape sequences"),
        (b'{"prompt": [' + b"1e308," * 1001 + b"1]}", "extreme numbers"),
        (b'{"prompt": [' + b"-1.5E-0320," * 1001 + b"1]}", "extreme numbers"),
        (b'{"prompt": [' + (b"0." + b"0" * 320 + b"1,") * 1001 + b"1]}", "extreme numbers"),
    ],
    ids=["values", "strings", "containers", "escapes", "large", "small", "long"],
)
def test_bodies_of_too_many_parts_are_refused_undecoded(body: bytes, what: str) -> None:
    response = post(make_app(), asgi_client.COMPLETIONS, body)
    assert response.status_code == 413
    assert what in response.json()["error"]["message"]


def test_texts_of_digits_and_exponents_are_no_extreme_numbers() -> None:
    text = " ".join(["deadbeef0e300a e30 1.5e-07 3e2 1e-12, sha256:e3001234"] * 300) + "1" * 2_000
    response = complete(make_app(), text)
    assert response.status_code == 400 and "context" in response.text, response.text


def test_answer_of_many_bytes_is_sent_in_pieces() -> None:
    reply = json_response({"text": "x" * 1_000_000})
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asgi_client.run(reply({}, None, send))  # type: ignore[arg-type]
    assert [m["type"] for m in sent] == ["http.response.start"] + ["http.response.body"] * 4
    assert b"".join(m.get("body", b"") for m in sent) == reply.body
    assert [m["more_body"] for m in sent[1:]] == [True, True, True, False]
