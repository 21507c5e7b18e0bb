"""The table of scopes: every route has an entry, and what is not in it is closed."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import HTTPConnection
from starlette.responses import Response

from loramux.errors import LoramuxError
from loramux.server.app import ServerApp, create_app
from loramux.server.context import ServerOptions
from loramux.server.errors import Unauthenticated
from loramux.server.http.routes import Route
from loramux.server.http.table import RouteTable, UnlistedRoute, methods_of
from loramux.server.images.context import ImageModel
from loramux.types.access import ALL_SCOPES, KeyScope
from loramux.types.caller import ANONYMOUS, Caller
from loramux.types.routes import ROUTE_ACCESS
from tests.unit.server.asgi_client import request
from tests.unit.server.scripted_backend import ScriptedBackend
from tests.unit.server.scripted_images import ScriptedImages

TENANT = Caller(tenant="acme", key_id="k", is_operator=False)
MISSING = Unauthenticated("Send a key.")


class Fixed:
    """Answers every request with one caller, or with one error."""

    def __init__(self, caller: Caller | LoramuxError) -> None:
        self._caller = caller

    async def caller(self, http: HTTPConnection) -> Caller:
        if isinstance(self._caller, LoramuxError):
            raise self._caller
        return self._caller


@functools.cache
def app_for(caller: Caller | LoramuxError) -> ServerApp:
    backend = ScriptedBackend()
    options = ServerOptions(allow_runtime_lora_updating=True)
    images = ScriptedImages()
    return create_app(
        backend,
        options,
        names=backend.names,
        authenticator=Fixed(caller),
        images=ImageModel(backend=images, names=images.names),
    )


def all_routes() -> list[tuple[str, str]]:
    routes = app_for(ANONYMOUS).table.routes
    return sorted({(method, route.path) for route in routes for method in methods_of(route)})


ROUTES = all_routes()


def test_a_route_without_an_entry_ends_the_start() -> None:
    async def handler(_: object) -> Response:
        return Response()

    with pytest.raises(UnlistedRoute, match="PATCH /v1/new"):
        RouteTable([Route(path="/v1/new", handler=handler, methods=("PATCH",))])


def test_the_table_has_exactly_the_routes_of_the_application() -> None:
    served = {f"{method} {path}" for method, path in ROUTES}
    heads = {f"GET {path}" for method, path in ROUTES if method == "HEAD"}
    assert set(ROUTE_ACCESS) - served == set()
    assert {key for key in served if not key.startswith("HEAD")} <= set(ROUTE_ACCESS)
    assert {f"GET {key[5:]}" for key in served if key.startswith("HEAD")} <= heads


def filled(path: str) -> str:
    for name in ("name", "model_id", "receipt_id"):
        path = path.replace(f"{{{name}:path}}", "a/b").replace(f"{{{name}}}", "rcpt_1")
    return path


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_that_are_not_open_need_a_key(method: str, path: str) -> None:
    access = ROUTE_ACCESS.get(f"{method} {path}") or ROUTE_ACCESS[f"GET {path}"]
    response = request(app_for(MISSING), method, filled(path))
    assert (response.status_code != 401) == (not access.scopes)
    if access.scopes:
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert method == "HEAD" or response.json()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_key_without_the_scope_is_refused(method: str, path: str) -> None:
    access = ROUTE_ACCESS.get(f"{method} {path}") or ROUTE_ACCESS[f"GET {path}"]
    without = replace(TENANT, scopes=ALL_SCOPES - access.scopes)
    response = request(app_for(without), method, filled(path))
    assert (response.status_code == 403) == bool(access.scopes)


def test_routes_of_the_operator_refuse_a_key_of_a_tenant() -> None:
    response = request(app_for(TENANT), "GET", "/v1/stats")
    assert response.status_code == 403
    assert "not bound to a tenant" in response.json()["error"]["message"]
    assert request(app_for(ANONYMOUS), "GET", "/v1/stats").status_code == 200


@pytest.mark.parametrize("path", ["/v1/nothing", "/health/", "/v1/Models", "//v1/stats"])
def test_paths_outside_the_table_need_a_key_and_do_not_exist_for_a_tenant(path: str) -> None:
    assert request(app_for(MISSING), "GET", path).status_code == 401
    assert request(app_for(TENANT), "GET", path).status_code == 404


def test_an_error_of_access_has_the_shape_of_the_routes_api() -> None:
    app = app_for(MISSING)
    assert request(app, "POST", "/v1/messages").json()["error"]["type"] == "authentication_error"
    assert isinstance(request(app, "POST", "/api/chat").json()["error"], str)
    assert request(app, "POST", "/generate").json()["error_type"]
    own = request(app, "POST", "/v1/chat/completions").json()["error"]
    assert (own["code"], own["type"]) == (401, "AuthenticationError")


def test_one_scope_of_several_is_enough() -> None:
    for scope in (KeyScope.METRICS, KeyScope.ADMIN):
        caller = replace(TENANT, scopes=frozenset({scope}))
        assert request(app_for(caller), "GET", "/metrics").status_code == 200


def test_the_documents_list_every_scope() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "keys.md").read_text()
    table = text[text.index("| scope |") :].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(KeyScope)
