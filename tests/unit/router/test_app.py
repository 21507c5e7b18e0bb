"""Own routes, and routes that concern the whole fleet."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.errors import InvalidRequest
from loramux.router.app import RouterOptions
from loramux.router.asked import adapter_name
from loramux.router.members import DnsMembers, StaticMembers, find_members
from tests.unit.router.fake_replica import FakeReplica, Request, ask, http, run, running_router

CIDS = ["cidv1:sha256:" + digit * 64 for digit in "ab"]

COUNTERS = [
    *("hits", "misses", "running", "waiting", "cached_tokens", "requests"),
    *("prompt_tokens", "generation_tokens"),
]


def entry(cid: str, tier: str, **fields: Any) -> dict[str, Any]:
    counters = dict.fromkeys(COUNTERS, 1)
    told = {"id": "a", "names": ["a"], "cid": cid, "tier": tier, "pinned": False, "last_use": None}
    return told | counters | fields


class Server:
    """Answers the routes of adapters as a server does."""

    def __init__(self, tier: str = "device") -> None:
        self.tier = tier
        self.pinned = False
        self.warmed: list[str] = []
        self.promoted: list[Any] = []
        self.refuses = False

    async def __call__(self, replica: FakeReplica, request: Request, writer: Any) -> None:
        status, told = self.answer(replica, request)
        extra = ["x-loramux-revision: 7"] if request.path.endswith("/promote") else []
        writer.write(http(status, json.dumps(told).encode(), *extra))

    def answer(self, replica: FakeReplica, request: Request) -> tuple[int, Any]:
        if self.refuses and request.method != "GET":
            return 422, {"error": {"message": "no"}}
        match request.path.partition("?")[0]:
            case "/v1/models":
                return 200, {"data": [{"id": "base"}, {"id": f"only-{replica.name}"}]}
            case "/v1/adapters":
                return 200, {"data": [entry(CIDS[0], self.tier)], "total": 1}
        if request.path.endswith("/pin"):
            self.pinned = request.method == "POST"
        if request.path.endswith("/warm"):
            self.warmed.append(request.path)
            return 200, {"id": "a", "cid": CIDS[0], "tier": "device"}
        if request.path.endswith("/promote"):
            self.promoted.append(request.json)
            replica.fields["revision"] = 7
            return 200, {"alias": "prod", "targets": {"2.0.0": 100}}
        return 200, {}


def fleet(count: int = 3) -> tuple[list[FakeReplica], list[Server]]:
    servers = [Server("device" if i else "host") for i in range(count)]
    return [FakeReplica(str(i), script=servers[i]) for i in range(count)], servers


def test_lists_are_those_of_all_replicas() -> None:
    async def work() -> None:
        replicas, _ = fleet()
        async with running_router(*replicas) as app:
            models = (await ask(app, "/v1/models", method="GET")).json
            ids = {one["id"] for one in models["data"]}
            assert ids == {"base", "only-0", "only-1", "only-2"}
            (adapter,) = (await ask(app, "/v1/adapters?limit=5", method="GET")).json["data"]
            assert adapter["tier"] == "device" and adapter["hits"] == 3
            tiers = {one.id: "device" if one.name != "0" else "host" for one in replicas}
            assert adapter["replicas"] == tiers

    run(work())


def test_a_pin_is_everywhere_or_nowhere() -> None:
    async def work() -> None:
        replicas, servers = fleet()
        async with running_router(*replicas) as app:
            assert (await ask(app, "/v1/adapters/a/pin")).status == 200
            assert all(server.pinned for server in servers)
            assert (await ask(app, "/v1/adapters/a/pin", method="DELETE")).status == 200
            servers[0].refuses = True
            assert (await ask(app, "/v1/adapters/a/pin")).status == 422
            assert not any(server.pinned for server in servers)

    run(work())


def test_a_promotion_warms_homes_and_holders_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Replicas that have not followed by then are told.
    monkeypatch.setattr("loramux.router.rollout._SETTLE_S", 0.3)

    async def work() -> None:
        replicas, servers = fleet(4)
        async with running_router(*replicas) as app:
            reply = await ask(app, "/v1/adapters/t/a/promote", {"version": "2.0.0", "warm": True})
            assert reply.status == 200 and not reply.json["settled"]
            warmed = [path for server in servers for path in server.warmed]
            assert 2 <= len(warmed) <= 3 and set(warmed) == {"/v1/adapters/t/a@2.0.0/warm"}
            (promoted,) = [one for server in servers for one in server.promoted]
            assert promoted == {"version": "2.0.0", "warm": False}

    run(work())


def test_a_promotion_waits_until_all_replicas_follow() -> None:
    async def work() -> None:
        replicas, _ = fleet()
        async with running_router(*replicas) as app:
            asked = asyncio.create_task(ask(app, "/v1/adapters/t/a/promote", {"version": "2.0.0"}))
            await asyncio.sleep(0.3)
            assert not asked.done()
            for replica in replicas:
                replica.fields["revision"] = 7
            told = (await asked).json
            assert told["settled"] and told["registry_revision"] == 7
            assert set(told["replicas"].values()) == {7}
            # The alias now has the places of its version.
            assert app.fleet.keys_of("t/a") == app.fleet.keys_of("t/a@prod")

    run(work())


def test_a_warm_that_fails_leaves_the_alias() -> None:
    async def work() -> None:
        replicas, servers = fleet()
        for server in servers:
            server.refuses = True
        async with running_router(*replicas) as app:
            reply = await ask(app, "/v1/adapters/t/a/promote", {"version": "2.0.0", "warm": True})
            assert reply.status == 422
            assert not any(server.promoted for server in servers)

    run(work())


def test_lists_are_asked_for_once_in_a_moment_by_caller() -> None:
    async def work() -> None:
        replicas, _ = fleet(3)
        async with running_router(*replicas) as app:
            for _ in range(10):
                assert (await ask(app, "/v1/models", method="GET")).status == 200
            assert [len(replica.requests) for replica in replicas] == [1, 1, 1]
            # Another caller sees other names.
            headers = {"authorization": "Bearer other"}
            await ask(app, "/v1/models", method="GET", headers=headers)
            assert len(replicas[0].requests) == 2
            replicas[1].fields["revision"] = 3
            while app.fleet.revision < 3:
                await asyncio.sleep(0.01)
            await ask(app, "/v1/models", method="GET")
            assert len(replicas[0].requests) == 3

    run(work())


@pytest.mark.parametrize("path", ["/metrics", "/v1/replicas", "/v1/stats"])
def test_what_names_the_servers_needs_the_key_of_the_router(path: str) -> None:
    async def work() -> None:
        replica = FakeReplica("0")
        async with running_router(replica, options=RouterOptions(api_key="own")) as app:
            refused = await ask(app, path, method="GET", headers={"authorization": "Bearer no"})
            assert refused.status == 401 and replica.url.encode() not in refused.body
            for headers in ({"authorization": "Bearer own"}, {"x-api-key": "own"}):
                told = await ask(app, path, method="GET", headers=headers)
                assert told.status == 200 and replica.url.encode() in told.body
        async with running_router(replica, options=RouterOptions()) as app:
            assert (await ask(app, path, method="GET")).status == 401
            assert (await ask(app, "/health", method="GET")).status == 200

    run(work())


def test_own_routes_tell_of_the_router() -> None:
    async def work() -> None:
        replicas, _ = fleet(2)
        async with running_router(*replicas) as app:
            health = await ask(app, "/health", method="GET")
            assert (health.status, health.json["ready"]) == (200, 2)
            await ask(app, body={"model": "x"})
            text = (await ask(app, "/metrics", method="GET")).body.decode()
            families = {f.name: f for f in text_string_to_metric_families(text)}
            assert len(families["loramux_router:replica_ready"].samples) == 2
            assert (await ask(app, "/live", method="GET")).status == 200
            listed = (await ask(app, "/v1/replicas", method="GET")).json["data"]
            assert [one["url"] for one in listed] == [replica.url for replica in replicas]
            for replica in replicas:
                replica.fields["state"] = "restarting"
            while (await ask(app, "/health", method="GET")).status == 200:
                await asyncio.sleep(0.01)

    run(work())


def test_a_large_body_is_refused_and_so_are_many_at_once() -> None:
    options = RouterOptions(max_body_bytes=100, max_bodies_bytes=150)

    async def work() -> None:
        go_on = asyncio.Event()

        async def halting(replica: FakeReplica, request: Request, writer: Any) -> None:
            await go_on.wait()
            writer.write(http(200, b"{}"))

        replica = FakeReplica("0", script=halting)
        async with running_router(replica, options=options) as app:
            assert (await ask(app, body=b"x" * 101)).status == 413 and not replica.requests
            first = asyncio.create_task(ask(app, body=b"x" * 100))
            while not replica.requests:
                await asyncio.sleep(0.01)
            refused = await ask(app, body=b"x" * 100)
            assert refused.status == 503 and refused.headers["retry-after"] == "1"
            go_on.set()
            assert (await first).status == 200
            # Its memory was given back.
            assert (await ask(app, body=b"x" * 100)).status == 200

    run(work())


def test_members_are_urls_and_addresses_of_names() -> None:
    async def work() -> None:
        assert await find_members(["http://h:1/"]).current() == {"http://h:1": "http://h:1"}
        found = await DnsMembers(["dns://localhost:8000"]).current()
        assert "http://127.0.0.1:8000" in found or "http://[::1]:8000" in found
        both = await find_members(["http://h:1", "dns://localhost:8000"]).current()
        assert both.keys() == {"http://h:1", *found}

    run(work())
    for wrong in (["h:1"], ["ftp://h"], [], ["dns://h"], ["dns://h{3..1}:1"], ["dns://h{0..9}"]):
        with pytest.raises(InvalidRequest):
            find_members(wrong)
    assert StaticMembers([])


def test_names_of_a_range_are_members_while_they_have_an_address() -> None:
    # Addresses are names that need no name server; the last one is none.
    found = run(find_members(["dns://127.0.0.{1..3}:8000", "dns://256.0.0.{1..2}:8000"]).current())
    assert found == {url: url for url in (f"http://127.0.0.{n}:8000" for n in (1, 2, 3))}


def test_a_replica_that_moves_keeps_its_name() -> None:
    class Moving:
        def __init__(self, url: str) -> None:
            self.url = url

        async def current(self) -> dict[str, str]:
            return {"pod-0": self.url}

    async def work() -> None:
        first, second = FakeReplica("0"), FakeReplica("1", fields={"instance": "j"})
        async with running_router(first) as app:
            await second.start()
            members = Moving(first.url)
            app._followers._members = members
            await app._followers.look()
            while app.fleet.replicas["pod-0"].instance != "i":
                await asyncio.sleep(0.01)
            members.url = second.url
            await app._followers.look()
            while app.fleet.replicas["pod-0"].instance != "j":
                await asyncio.sleep(0.01)
            assert (await ask(app, body={"model": "x"})).json == {"from": "1"}
            await second.stop()

    run(work())


def form(**fields: str) -> bytes:
    parts = [
        f'--b1\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    file = (
        '--b1\r\nContent-Disposition: form-data; name="image"; filename="model.png"\r\n'
        "Content-Type: image/png\r\n\r\n"
    )
    return "".join(parts).encode() + file.encode() + b"\x89PNG\r\n\x00\r\n--b1--\r\n"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (form(model="style", prompt="a cat"), "style"),
        (form(model="base", adapters="a"), "a"),
        (form(prompt="x"), ""),
        (b"--b1\r\nbroken", ""),
    ],
)
@pytest.mark.parametrize("boundary", ["b1", '"b1"; charset=utf-8'])
def test_the_adapter_of_a_form_is_found(body: bytes, name: str, boundary: str) -> None:
    kind = ("content-type", f"multipart/form-data; boundary={boundary}")
    assert adapter_name(body, [kind]) == name


def test_a_form_passes_unchanged() -> None:
    async def work() -> None:
        replica, content = FakeReplica("0"), form(model="style")
        headers = {"content-type": "multipart/form-data; boundary=b1"}
        async with running_router(replica) as app:
            await ask(app, "/v1/images/edits", content, headers=headers)
            (request,) = replica.requests
            assert request.body == content
            assert request.headers["content-type"] == headers["content-type"]

    run(work())


def test_the_header_of_sagemaker_names_the_adapter() -> None:
    header = ("x-amzn-sagemaker-adapter-identifier", "a")
    assert adapter_name(b'{"model": "m"}', [header]) == "a"


def test_a_bare_name_is_one_of_the_tenant_that_the_header_of_the_servers_names() -> None:
    headers = [("x-tenant", "acme"), ("x-org", "globex")]
    names = [adapter_name(b'{"model": "a"}', headers, one) for one in ("", "x-tenant", "x-org")]
    assert names == ["a", "a\0acme", "a\0globex"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model": "a"}, "a"),
        ({"adapters": ["a", "b"], "model": "m"}, "a+b"),
        ({"artifact": "t/a@1"}, "t/a@1"),
        ({"inputs": "x", "parameters": {"adapter_id": "a"}}, "a"),
        ({"text": "x", "lora_path": "a"}, "a"),
        ({"model": 5}, ""),
        ([1], ""),
        (b"{", ""),
    ],
)
def test_the_adapter_of_every_api_is_found(body: Any, name: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert adapter_name(content, []) == name


def test_a_push_is_refused_because_it_would_reach_one_replica() -> None:
    async def work() -> None:
        replicas, _ = fleet()
        async with running_router(*replicas) as app:
            reply = await ask(app, "/v1/adapters/policy:push", b"weights")
            assert reply.status == 501 and "each server" in reply.json["error"]["message"]
            assert not any(replica.requests for replica in replicas)

    run(work())
