"""--warm: the servers load it first; if one cannot, nothing moves."""

from __future__ import annotations

import json

import pytest

from tests.cli_factory import NAME, Shell
from tests.scripted_server import Received, Scripted, scripted_server

ENTRY = {
    "id": "x",
    "names": ["x"],
    "cid": "cidv1:sha256:0",
    "rank": 1,
    "bytes": 1,
    "tier": "device",
}
NO_ROUTE = Scripted(status=404, body=b'{"error": {"message": "no", "type": "x", "code": 404}}')


@pytest.fixture
def two_versions(shell: Shell) -> Shell:
    shell.push(f"{NAME}@1.4.2", seed=1)
    shell.push(f"{NAME}@1.5.0", seed=2)
    return shell


def test_each_server_loads_what_the_alias_will_name_before_it_moves(two_versions: Shell) -> None:
    shell = two_versions
    seen: list[tuple[str, list[tuple[str, int]]]] = []

    def answer(request: Received) -> Scripted:
        info = shell.in_library(lambda library: library.registry.show(NAME))
        now = [(t.version, t.weight) for state in info.aliases for t in state.targets]
        if request.path == "/v1/replicas":
            return NO_ROUTE
        seen.append((request.path, now))
        return Scripted(body=json.dumps(ENTRY).encode())

    with scripted_server() as one, scripted_server() as two:
        one.answer = two.answer = answer
        urls = ["--warm", "--url", one.url, "--url", two.url]
        shell.ok("promote", f"{NAME}@1.4.2", *urls)
        shell.ok("promote", f"{NAME}@1.5.0", *urls[:3])
        shell.ok("rollback", NAME, *urls[:3])
        shell.ok("split", NAME, "1.4.2=90", "1.5.0=10", *urls[:3])
    paths = {version: f"/v1/adapters/{NAME}@{version}/warm" for version in ("1.4.2", "1.5.0")}
    first, second = [("1.4.2", 1)], [("1.5.0", 1)]
    assert seen == [
        (paths["1.4.2"], []),
        (paths["1.4.2"], []),
        (paths["1.5.0"], first),
        (paths["1.4.2"], second),
        (paths["1.4.2"], first),
        (paths["1.5.0"], first),
    ]
    assert shell.targets() == [("1.4.2", 90), ("1.5.0", 10)]


def test_a_server_that_cannot_load_it_keeps_the_alias_where_it_is(two_versions: Shell) -> None:
    shell = two_versions
    shell.ok("promote", f"{NAME}@1.4.2")
    refusal = {"error": {"message": "It is for another base.", "type": "x", "code": 422}}
    with scripted_server() as server:
        server.answer = lambda request: Scripted(status=422, body=json.dumps(refusal).encode())
        refused = shell.run("promote", f"{NAME}@1.5.0", "--warm", "--url", server.url)
    said = refused.stderr.replace("\n", " ")
    assert refused.exit_code == 1
    assert "another base" in said and "nothing was changed" in said and "--url" in said
    assert shell.targets() == [("1.4.2", 1)]


def test_the_servers_of_a_router_are_told_one_by_one_until_all_follow(two_versions: Shell) -> None:
    shell, num_looks = two_versions, 0
    warmed = ENTRY | {"replicas": {"http://r0": "device"}}

    def answer(request: Received) -> Scripted:
        nonlocal num_looks
        if request.path != "/v1/replicas":
            return Scripted(body=json.dumps(warmed).encode())
        num_looks += 1
        revision = shell.in_library(lambda library: library.registry.revision())
        replicas = [
            {"name": "r0", "url": "http://r0", "state": "ready", "revision": revision},
            {"name": "r1", "url": "http://r1", "state": "ready", "revision": num_looks},
            {"name": "r2", "url": "http://r2", "state": "unknown", "revision": 0},
        ]
        replicas[1]["revision"] = revision if num_looks > 2 else 0
        return Scripted(body=json.dumps({"data": replicas}).encode())

    with scripted_server() as router:
        router.answer = answer
        said = shell.ok("promote", f"{NAME}@1.5.0", "--warm", "--url", router.url)
    assert "1.5.0 on http://r0 (device)" in said and num_looks == 3
    assert said.index("r0", said.index("Follows")) < said.index("r1")


def test_a_router_that_keeps_its_servers_to_itself_is_told(two_versions: Shell) -> None:
    shell = two_versions
    refusal = {"error": {"message": "It needs the router's own key.", "type": "x", "code": 401}}

    def answer(request: Received) -> Scripted:
        if request.path == "/v1/replicas":
            return Scripted(status=401, body=json.dumps(refusal).encode())
        return Scripted(body=json.dumps(ENTRY).encode())

    with scripted_server() as router:
        router.answer = answer
        told = shell.run("promote", f"{NAME}@1.4.2", "--warm", "--url", router.url)
    assert told.exit_code == 1 and "--open-status" in told.stderr.replace("\n", " ")
    assert shell.targets() == [("1.4.2", 1)]
