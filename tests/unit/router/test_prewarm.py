"""What a replica gets when it joins or starts again."""

from __future__ import annotations

import asyncio
from typing import Any

from loramux.registry.names import DEFAULT_TENANT
from loramux.router.app import RouterOptions
from loramux.types.residency import key_of_cid
from tests.registry_factory import make_cid
from tests.unit.router.fake_replica import FakeReplica, Request, ask, http, run, running_router

NUM_ADAPTERS = 24


class Server:
    """Answers with the CID of the name, and counts what it is asked to warm."""

    def __init__(self) -> None:
        self.warmed: list[str] = []
        self.keys: set[str | None] = set()
        self.status = 200

    async def __call__(self, replica: FakeReplica, request: Request, writer: Any) -> None:
        if request.path.endswith("/warm"):
            self.keys.add(request.headers.get("authorization"))
            self.warmed.append(request.path.removeprefix("/v1/adapters/").removesuffix("/warm"))
            writer.write(http(self.status, b"{}"))
            return
        cid = make_cid(request.json["model"])
        writer.write(http(200, b"{}", f"x-loramux-cid: {cid}", "x-loramux-tier: device"))


def name_of(number: int) -> str:
    return f"{DEFAULT_TENANT}/a{number}"


def test_a_restarted_replica_loads_the_busiest_of_what_the_hash_makes_its_own() -> None:
    async def work() -> None:
        servers = [Server() for _ in range(3)]
        replicas = [FakeReplica(str(i), script=server) for i, server in enumerate(servers)]
        async with running_router(*replicas, options=RouterOptions(api_key="own")) as app:
            for number in range(NUM_ADAPTERS):
                for _ in range(number + 1):
                    await ask(app, body={"model": name_of(number)})
            assert not any(server.warmed for server in servers)
            names: list[list[str]] = [[], [], []]
            for name in map(name_of, reversed(range(NUM_ADAPTERS))):
                (home,) = app.fleet.homes(name, now=0, count=1)
                names[[replica.url for replica in replicas].index(home.url)].append(name)
            # The hash is of ports, which differ from run to run: of these, one has most.
            own = max(names, key=len)
            restarted = names.index(own)
            server = servers.pop(restarted)
            # The busiest of them is in its memory already.
            held = key_of_cid(make_cid(own[0]))
            replicas[restarted].fields |= {"instance": "another", "moves": {held: 3}}
            while len(server.warmed) < len(own) - 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert server.warmed == own[1:] and server.keys == {"Bearer own"}
            assert not any(server.warmed for server in servers)

    run(work())


def test_without_the_scope_nothing_more_is_tried() -> None:
    async def work() -> None:
        server = Server()
        server.status = 403
        replica = FakeReplica("0", script=server)
        async with running_router(replica) as app:
            for number in range(3):
                await ask(app, body={"model": name_of(number)})
            replica.fields["instance"] = "another"
            while not server.warmed:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(server.warmed) == 1
            assert (await ask(app, body={"model": name_of(0)})).status == 200

    run(work())
