"""Hostile bodies: each is refused with a status, in OpenAI's shape, with its field named."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loramux.server.body import decode
from loramux.server.errors import MAX_MESSAGE_CHARACTERS
from loramux.server.wire import CompletionRequest
from tests.unit.server import asgi_client, bad_bodies
from tests.unit.server.asgi_client import make_app, post, request
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


@pytest.mark.parametrize("declared", ["application/json; charset=utf-8", "Application/JSON", None])
def test_json_is_taken_however_it_is_spelled_or_undeclared(declared: str | None) -> None:
    headers = {} if declared is None else {"content-type": declared}
    response = request(
        make_app(), "POST", asgi_client.COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers
    )
    assert response.status_code == 200
