"""From a body to jobs: ids, limits, and what each job carries."""

from __future__ import annotations

from tests.unit.server.asgi_client import COMPLETIONS, chat, complete, make_app, post
from tests.unit.server.scripted_backend import ScriptedBackend


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
