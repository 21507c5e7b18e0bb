"""Hosts and origins of requests: what a web page of another site may not do."""

from __future__ import annotations

import pytest

from loramux.http_server.browsers import default_hosts
from tests.unit.server.asgi_client import make_app, request

LOAD = "/v1/adapters/a/pin"
LOCAL = default_hosts("127.0.0.1")


def status(
    method: str,
    path: str,
    headers: dict[str, str],
    hosts: tuple[str, ...] = LOCAL,
    **options: object,
) -> int:
    app = make_app(allowed_hosts=hosts, **options)
    return request(app, method, path, headers={"host": "localhost:8000", **headers}).status_code


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "a.localhost"]
)
def test_local_names_are_known_on_a_loopback_address(host: str) -> None:
    assert status("GET", "/version", {"host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "", "localhost.evil.example"]
)
def test_a_name_that_was_rebound_is_refused(host: str) -> None:
    assert status("GET", "/version", {"host": host}) == 403


def test_on_other_addresses_any_name_is_known_and_given_ones_are_the_only_ones() -> None:
    assert default_hosts("0.0.0.0") == default_hosts("10.1.2.3") == ("*",)
    given = ("API.example.com:8000", "*.models.example.com", "::1")
    for host, found in {
        "api.example.com": 200,
        "a.models.example.com:443": 200,
        "models.example.com": 403,
        "localhost": 403,
        "[::1]:8000": 200,
    }.items():
        assert status("GET", "/version", {"host": host}, hosts=given) == found


CROSS_SITE = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", LOAD),
        ("DELETE", "/v1/adapters/a"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/api/generate"),
        ("GET", "/flush_cache"),
    ],
)
def test_pages_of_other_sites_may_change_nothing(
    headers: dict[str, str], method: str, path: str
) -> None:
    app = make_app(allowed_hosts=LOCAL)
    found = request(app, method, path, headers={"host": "localhost:8000", **headers})
    assert found.status_code == 403 and "--cors-origins" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000"},
        {"origin": "https://localhost:8000"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
def test_programs_and_the_servers_own_pages_may(headers: dict[str, str]) -> None:
    assert status("POST", LOAD, headers) != 403


@pytest.mark.parametrize("origins", [("https://app.example",), ("*",)])
def test_allowed_origins_may(origins: tuple[str, ...]) -> None:
    headers = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    assert status("POST", LOAD, headers, cors_origins=origins) != 403
    preflight = {**headers, "access-control-request-method": "POST"}
    assert status("OPTIONS", LOAD, preflight, cors_origins=origins) == 200


@pytest.mark.parametrize("headers", CROSS_SITE)
def test_reading_needs_no_permission_as_pages_cannot_see_the_answer(
    headers: dict[str, str],
) -> None:
    found = request(
        make_app(allowed_hosts=LOCAL), "GET", "/v1/models", headers={"host": "localhost", **headers}
    )
    assert found.status_code == 200 and "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/nothing", "/docs"])
def test_answers_carry_headers_for_browsers(path: str) -> None:
    found = request(make_app(), "GET", path).headers
    assert found["x-content-type-options"] == "nosniff"
    assert (
        found["x-frame-options"] == "DENY" and "frame-ancestors" in found["content-security-policy"]
    )
    assert found["referrer-policy"] == "no-referrer"
