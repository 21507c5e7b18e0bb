"""Keys, tokens and tenant headers: the caller that they make, and what is refused."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loramux.registry.access import AccessSnapshot
from loramux.registry.keys import KeyRights, NewKey, make_key
from loramux.registry.registry import Registry
from loramux.server.app import ServerApp, create_app
from loramux.server.auth.authentication import CredentialAuthenticator, Credentials
from loramux.server.context import ServerOptions
from loramux.server.naming.registry_adapters import RegistryAdapters
from loramux.store.library import AdapterLibrary
from loramux.store.store import ContentStore
from loramux.types.access import ALL_SCOPES, KeyScope
from tests.unit.server.asgi_client import run
from tests.unit.server.scripted_backend import ScriptedBackend

NOW = 1_000.0
SIMPLE = "letmein"
PROXY = (ipaddress.ip_network("10.0.0.0/8"),)


def key(**rights: Any) -> NewKey:
    return make_key(KeyRights(**({"tenant": "acme"} | rights)), now=NOW, expires_at=NOW + 100)


KEY = key(scopes=ALL_SCOPES)


def make_app(*keys: NewKey, now: float = NOW, proxies: bool = False, **given: Any) -> ServerApp:
    snapshot = AccessSnapshot({one.record.key_id: one.record for one in keys})
    credentials = Credentials(access=lambda: snapshot, has_proxies=proxies, **given)
    backend = ScriptedBackend()
    return create_app(
        backend,
        ServerOptions(trusted_proxies=PROXY if proxies else ()),
        names=backend.names,
        authenticator=CredentialAuthenticator(credentials, clock=lambda: now),
    )


def ask(
    app: ServerApp,
    path: str = "/v1/models",
    headers: Any = None,
    *,
    peer: str = "127.0.0.1",
    method: str = "GET",
) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, client=(peer, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers or {})

    response: httpx2.Response = run(send())
    return response


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_without_keys_every_caller_is_an_operator() -> None:
    app = make_app()
    assert ask(app, "/v1/stats").status_code == 200
    # OpenAI's client always sends a key.
    assert ask(app, "/v1/stats", bearer("EMPTY")).status_code == 200


@pytest.mark.parametrize(
    "headers", [bearer(SIMPLE), {"x-api-key": SIMPLE}, {"authorization": f"bearer  {SIMPLE}"}]
)
def test_a_key_of_the_flag_opens_every_route(headers: dict[str, str]) -> None:
    assert ask(make_app(api_keys=["other", SIMPLE]), "/v1/stats", headers).status_code == 200


REFUSED = {
    "none": {},
    "wrong": bearer("letmei"),
    "longer": bearer(SIMPLE + "n"),
    "empty": bearer(""),
    "basic": {"authorization": "Basic bGV0bWVpbg=="},
    "long": bearer("x" * 300),
    "huge": bearer("x" * 20_000),
    "token": bearer("a.b.c"),
    "two": bearer("letmei") | {"x-api-key": SIMPLE},
    "latin": {"x-api-key": b"\xff\xfe"},
    "unknown_id": bearer("lmx_000000000000_" + "A" * 43),
    "wrong_secret": bearer(KEY.text[:-43] + "A" * 43),
    "id_alone": bearer(KEY.record.key_id),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_keys_are_refused_and_not_repeated(case: str) -> None:
    response = ask(make_app(KEY, api_keys=[SIMPLE]), headers=REFUSED[case])
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert SIMPLE not in response.text and KEY.text[:8] not in response.text
    sent = REFUSED[case].get("authorization", "").partition(" ")[2]
    assert not sent or sent not in response.text


def test_a_key_of_the_registry_has_its_scopes_and_its_tenant() -> None:
    app = make_app(key(scopes=frozenset({KeyScope.RECEIPTS})), KEY)
    assert ask(app, "/v1/models", bearer(KEY.text)).status_code == 200
    assert ask(app, "/v1/stats", bearer(KEY.text)).status_code == 403
    narrow = key(scopes=frozenset({KeyScope.RECEIPTS}))
    assert ask(make_app(narrow), "/metrics", bearer(narrow.text)).status_code == 403
    operator = key(tenant=None, scopes=ALL_SCOPES)
    assert ask(make_app(operator), "/v1/stats", bearer(operator.text)).status_code == 200


def test_an_expired_key_says_so_to_its_owner_only() -> None:
    app = make_app(KEY, now=NOW + 100)
    assert "expired" in ask(app, headers=bearer(KEY.text)).json()["error"]["message"]
    other = ask(app, headers=bearer(KEY.text[:-43] + "A" * 43))
    assert other.status_code == 401 and "expired" not in other.text


def test_open_routes_need_no_key() -> None:
    app = make_app(api_keys=[SIMPLE])
    assert [ask(app, path).status_code for path in ("/health", "/version", "/ping")] == [200] * 3


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/messages", "authentication_error"), ("/api/chat", "error"), ("/generate", "error_type")],
)
def test_a_refusal_has_the_shape_of_the_routes_api(path: str, field: str) -> None:
    response = ask(make_app(api_keys=[SIMPLE]), path, method="POST")
    assert response.status_code == 401 and field in response.text


# The tenant header

HEADER = {"x-tenant": "globex"}


def test_on_an_open_server_the_header_is_a_label() -> None:
    assert ask(make_app(tenant_header="x-tenant"), "/v1/stats", HEADER).status_code == 200


def test_only_trusted_proxies_may_name_the_tenant() -> None:
    app = make_app(tenant_header="x-tenant", proxies=True)
    assert ask(app, "/v1/models", HEADER).status_code == 403
    assert ask(app, "/v1/models", HEADER, peer="::ffff:10.1.1.1").status_code == 200
    # Confined to its tenant.
    assert ask(app, "/v1/stats", HEADER, peer="10.1.1.1").status_code == 403
    assert ask(app, "/v1/stats", peer="10.1.1.1").status_code == 200
    assert ask(app, "/health", HEADER).status_code == 200
    spoofed = HEADER | {"x-forwarded-for": "10.1.1.1"}
    assert ask(app, "/v1/models", spoofed, peer="11.1.1.1").status_code == 403


def test_a_key_of_a_tenant_admits_no_other_tenant_in_the_header() -> None:
    app = make_app(KEY, tenant_header="x-tenant", proxies=True)
    both = bearer(KEY.text) | HEADER
    assert ask(app, headers=both, peer="10.1.1.1").status_code == 403
    same = bearer(KEY.text) | {"x-tenant": "acme"}
    assert ask(app, headers=same, peer="10.1.1.1").status_code == 200
    assert ask(app, headers=same).status_code == 403
    assert ask(app, headers=HEADER, peer="10.1.1.1").status_code == 401


# The registry's keys on a running server


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry.db") as opened:
        yield opened


def test_a_running_server_follows_keys_that_are_made_and_revoked(
    registry: Registry, tmp_path: Path
) -> None:
    adapters = RegistryAdapters(AdapterLibrary(ContentStore(tmp_path / "store"), registry))
    adapters.start(poll_s=0.01)
    credentials = Credentials(access=lambda: adapters.access)
    authenticator = CredentialAuthenticator(credentials)
    backend = ScriptedBackend(registry=adapters)
    app = create_app(backend, ServerOptions(), names=backend.names, authenticator=authenticator)

    def status_becomes(wanted: int, headers: dict[str, str]) -> None:
        async def wait() -> None:
            while (await asyncio.to_thread(ask, app, "/v1/models", headers)).status_code != wanted:
                await asyncio.sleep(0.01)

        run(wait())

    try:
        assert ask(app).status_code == 200
        new = registry.access.create_key(KeyRights(tenant="acme"))
        # From the first key on, requests need one.
        status_becomes(401, {})
        assert ask(app, headers=bearer(new.text)).status_code == 200
        registry.access.revoke_key(new.record.key_id)
        status_becomes(401, bearer(new.text))
        # The server does not become open again.
        assert ask(app).status_code == 401
    finally:
        adapters.close()
