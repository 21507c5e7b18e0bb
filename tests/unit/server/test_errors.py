"""Errors to statuses: one table, one shape, no secrets."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator

import pytest

import loramux.errors
from loramux.backend.host import Health
from loramux.backend.text import Delta
from loramux.errors import (
    AdapterNotFound,
    AdapterRefused,
    DoesNotFit,
    EngineBusy,
    EngineStopped,
    InvalidRequest,
    LoramuxError,
    RequestTimeout,
    UnsupportedModel,
)
from loramux.server.errors import HTTP_STATUS, error_info, error_response
from loramux.types.request import Request
from tests.unit.server.asgi_client import chat, complete, get, make_app, request
from tests.unit.server.scripted_backend import ScriptedBackend

ERRORS: list[tuple[Exception, int, str]] = [
    (InvalidRequest("x", param="n"), 400, "BadRequestError"),
    (DoesNotFit("x"), 400, "BadRequestError"),
    (AdapterNotFound("x"), 404, "NotFoundError"),
    (RequestTimeout("x"), 408, "RequestTimeoutError"),
    (AdapterRefused("wrong_shape", "x"), 422, "UnprocessableEntityError"),
    (EngineBusy("x"), 429, "RateLimitError"),
    (EngineStopped("x"), 503, "ServiceUnavailableError"),
    (LoramuxError("x"), 500, "InternalServerError"),
    (UnsupportedModel("x"), 500, "InternalServerError"),
]


def failing_backend(error: Exception) -> ScriptedBackend:
    async def fail(job: Request) -> AsyncIterator[Delta]:
        raise error
        yield

    return ScriptedBackend(fail)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
def test_engine_error_has_its_status(
    error: Exception, status: int, kind: str, stream: bool
) -> None:
    response = complete(make_app(failing_backend(error)), stream=stream)
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["type"], body["message"], body["code"]) == (kind, "x", status)


def test_every_error_of_the_project_has_a_status() -> None:
    kinds = [
        kind
        for kind in vars(loramux.errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    for kind in kinds:
        assert any(parent in HTTP_STATUS for parent in kind.__mro__)


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, 507), (errno.EROFS, 503), (errno.EMFILE, 503), (errno.EINVAL, 500)],
)
def test_errors_of_files_have_a_status_and_no_path(number: int, status: int) -> None:
    response = complete(make_app(failing_backend(OSError(number, "x", "/srv/secret"))))
    told = response.json()["error"]["message"]
    assert response.status_code == status and "/srv" not in told
    assert (status == 503) == ("retry-after" in response.headers)


def test_a_busy_engine_sends_retry_after() -> None:
    backend = failing_backend(EngineBusy("Full.", retry_after_s=2.5))
    assert complete(make_app(backend)).headers["retry-after"] == "3"
    assert error_response(EngineBusy("x", retry_after_s=0)).headers["retry-after"] == "1"


def test_timed_out_request_is_not_to_be_sent_again_by_itself() -> None:
    """OpenAI's clients repeat a 408 unless they are told not to."""
    response = complete(make_app(failing_backend(RequestTimeout("Too late."))))
    assert response.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(EngineBusy("x")).headers


def test_only_refusals_have_a_reason_code() -> None:
    backend = failing_backend(AdapterRefused("adapter_unavailable", "Its files are gone."))
    error = complete(make_app(backend)).json()["error"]
    assert (error["reason"], error["message"]) == ("adapter_unavailable", "Its files are gone.")
    assert "reason" not in complete(make_app(failing_backend(DoesNotFit("x")))).json()["error"]


@pytest.mark.parametrize("health", [h for h in Health if h is not Health.READY])
def test_requests_get_503_until_the_engine_is_ready(health: Health) -> None:
    backend = ScriptedBackend()
    backend.health = health
    response = chat(make_app(backend), stream=True)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert not backend.requests


def test_unforeseen_error_keeps_its_text_to_itself() -> None:
    response = complete(make_app(failing_backend(KeyError("/etc/secret"))))
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in error_info(KeyError("secret")).message


def test_unknown_route_and_method_answer_in_the_same_shape() -> None:
    app = make_app()
    assert get(app, "/nope").json()["error"]["code"] == 404
    response = request(app, "DELETE", "/v1/models")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "MethodNotAllowedError"
    assert "GET" in response.headers["allow"]
