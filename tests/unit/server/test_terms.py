"""Whose a request is: one tenant, named by a trusted header or nobody."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from loramux.errors import InvalidRequest
from loramux.server.terms import Terms, read_terms
from loramux.server.wire import CompletionRequest
from tests.unit.server.asgi_client import COMPLETIONS, make_app, request
from tests.unit.server.scripted_backend import ScriptedBackend

PLAIN = CompletionRequest(prompt="hi")


def tenant_of(*values: bytes, name: str | None = "X-Tenant") -> str:
    headers = Headers(raw=[(b"x-tenant", value) for value in values])
    return read_terms(headers, PLAIN, tenant_header=name).tenant


def test_nothing_given_is_one_shared_tenant_without_a_deadline() -> None:
    assert read_terms(Headers(), PLAIN, tenant_header="X-Tenant") == Terms()


def test_the_header_counts_only_where_it_was_configured() -> None:
    """Otherwise any client could take another tenant's share, or read its cached prefixes."""
    assert tenant_of(b"acme") == "acme"
    assert tenant_of(b"acme", name=None) == ""


def test_a_tenant_may_be_called_as_people_write() -> None:
    assert tenant_of("Zoë 株".encode()) == "Zoë 株"
    assert tenant_of(b"x" * 128) == "x" * 128


@pytest.mark.parametrize("value", [b"x" * 129, b"a\tb", "a\u200bb".encode(), b"\xff"])
def test_a_name_that_cannot_be_shown_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tenant_of(value)
    assert raised.value.param == "X-Tenant"


def test_two_headers_are_refused_because_one_may_be_the_clients_own() -> None:
    with pytest.raises(InvalidRequest, match="2 times"):
        tenant_of(b"mine", b"acme")


def test_a_refused_tenant_is_a_400_and_nothing_runs() -> None:
    backend = ScriptedBackend()
    response = request(
        make_app(backend, tenant_header="X-Tenant"),
        "POST",
        COMPLETIONS,
        json={"prompt": "hi"},
        headers={"x-tenant": "x" * 129},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Tenant"
    assert not backend.requests
