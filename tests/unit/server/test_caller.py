"""The caller of a request: one tenant, named by a trusted header."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from loramux.errors import InvalidRequest
from loramux.server.auth.authentication import read_caller
from loramux.types.access import ALL_SCOPES
from loramux.types.caller import ANONYMOUS
from tests.unit.server.asgi_client import COMPLETIONS, make_app, request
from tests.unit.server.scripted_backend import ScriptedBackend


def tenant_of(*values: bytes, name: str | None = "X-Tenant") -> str:
    headers = Headers(raw=[(b"x-tenant", value) for value in values])
    return read_caller(headers, name).tenant


def test_a_request_without_the_header_is_anonymous_with_all_permissions() -> None:
    assert read_caller(Headers(), "X-Tenant") == ANONYMOUS
    assert ANONYMOUS.scopes == ALL_SCOPES and ANONYMOUS.sticky_key is None


def test_the_header_counts_only_where_it_was_configured() -> None:
    """Otherwise a client could use another tenant's share and cached prefixes."""
    assert tenant_of(b"acme") == "acme"
    assert tenant_of(b"acme", name=None) == ""


def test_a_tenant_may_have_any_printable_name() -> None:
    assert tenant_of("Zoë 株".encode()) == "Zoë 株"
    assert tenant_of(b"x" * 128) == "x" * 128


@pytest.mark.parametrize("value", [b"x" * 129, b"a\tb", "a\u200bb".encode(), b"\xff"])
def test_an_unprintable_name_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tenant_of(value)
    assert raised.value.param == "X-Tenant"


def test_two_headers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 times"):
        tenant_of(b"mine", b"acme")


def test_an_invalid_tenant_is_a_400_and_nothing_runs() -> None:
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


def test_routes_without_a_caller_ignore_an_invalid_tenant() -> None:
    app = make_app(tenant_header="X-Tenant")
    response = request(app, "GET", "/version", headers={"x-tenant": "x" * 129})
    assert response.status_code == 200
