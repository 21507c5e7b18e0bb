"""From a body to engine requests: ids, limits, usage and receipts' ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.server.generate.receipt_draft import UsageCount
from loramux.types.request import Request
from loramux.types.sampling import SamplingParams
from tests.unit.server.asgi_client import COMPLETIONS, chat, complete, get, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend, delta


def test_job_ids_are_unique_although_clients_repeat_theirs() -> None:
    backend = ScriptedBackend()
    app = make_app(backend)
    for _ in range(2):
        complete(app, ["a", "b"])
    assert len({job.request_id for job in backend.requests}) == 4


def test_every_job_of_a_request_has_its_own_room() -> None:
    backend = ScriptedBackend()
    complete(make_app(backend), ["a", "x" * 60])
    assert [job.params.max_tokens for job in backend.requests] == [16, 4]


def test_nothing_runs_when_one_prompt_is_refused() -> None:
    backend = ScriptedBackend()
    assert complete(make_app(backend), ["a", "x" * 64]).status_code == 400
    assert not backend.requests


def test_every_job_of_a_request_runs_on_its_terms() -> None:
    backend = ScriptedBackend()
    app = make_app(backend, tenant_header="X-Tenant")
    body = {"prompt": ["a", "b"], "timeout": 2, "cache_salt": "s"}
    post(app, COMPLETIONS, body, headers={"x-tenant": "acme"})
    terms = [(job.tenant, job.cache_salt, job.timeout_s) for job in backend.requests]
    assert terms == [("acme", "s", 2.0)] * 2
    chat(app)
    assert (backend.requests[-1].tenant, backend.requests[-1].timeout_s) == ("", None)


def test_number_of_answers_is_bounded() -> None:
    app = make_app(max_choices=6)
    assert complete(app, ["a"] * 3, n=2).status_code == 200
    response = complete(app, ["a"] * 4, n=2)
    assert response.status_code == 400
    assert "8 answers" in response.json()["error"]["message"]


def test_a_prompt_counts_once_and_reuse_is_the_least_of_its_choices() -> None:
    params = SamplingParams(n=2)
    jobs = [Request(request_id=str(i), prompt_token_ids=(1, 2, 3), params=params) for i in range(2)]
    count = UsageCount(jobs)
    for job_index, job in enumerate(jobs):
        count.add(job_index, replace(delta(job, 0, b"ab"), num_reused=1))
        count.add(job_index, replace(delta(job, 1, b"c"), num_reused=3))
    usage = count.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 6, 12)
    assert usage.prompt_tokens_details.cached_tokens == 2


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
