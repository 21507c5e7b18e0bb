"""Request ids: the client's own where it is sane, on every answer."""

from __future__ import annotations

import pytest

from tests.unit.server.asgi_client import chat, get, make_app


@pytest.mark.parametrize("asked", ["abc-123", "trace:1/2", "x" * 128])
def test_sane_id_comes_back(asked: str) -> None:
    response = get(make_app(), "/version", headers={"x-request-id": asked})
    assert response.headers["x-request-id"] == asked


@pytest.mark.parametrize("asked", ["", "x" * 129, "a b", "<script>", "a\tb"])
def test_other_ids_are_replaced(asked: str) -> None:
    response = get(make_app(), "/version", headers={"x-request-id": asked})
    assert len(response.headers["x-request-id"]) == 32


def test_errors_and_streams_have_one_too() -> None:
    assert get(make_app(), "/nope").headers["x-request-id"]
    assert chat(make_app(), stream=True).headers["x-request-id"]


def test_two_requests_have_two() -> None:
    app = make_app()
    ids = {get(app, "/version").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
