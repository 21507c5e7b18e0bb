"""Scripted servers whose adapters are loaded at run time, and routers before them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from loramux.router.app import RouterApp, RouterOptions
from loramux.router.desired import DesiredStore
from loramux.types.expected import EXPECT_HEADER, read_expected
from tests.unit.router.fake_replica import FakeReplica, Reply, Request, ask, http
from tests.unit.router.fake_replica import running_router as running

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OWN, ADMIN, TENANT = "own", "admin", "tenant"
OPTIONS = RouterOptions(api_key=OWN, is_status_open=True, load_s=2)


class Gate:
    """Holds changes before they reach a server, as a network or a proxy may, in any order."""

    def __init__(self) -> None:
        self.is_open = True
        self.held: list[asyncio.Event] = []

    async def wait(self) -> None:
        if not self.is_open:
            event = asyncio.Event()
            self.held.append(event)
            await event.wait()


class Server:
    """A server with keys, whose adapters end with its process."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        """CID by folder, as all servers see it."""
        self.has: dict[str, tuple[str, str]] = {}
        """Folder and CID by name."""
        self.keys = {OWN: True, ADMIN: True, TENANT: False}
        """Whether a key may change adapters."""
        self.refused: set[str] = set()
        self.hanging: set[str] = set()
        self.num_loads = 0
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.load_s = 0.0
        self.gate = Gate()

    async def __call__(self, replica: FakeReplica, request: Request, writer: Any) -> None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self.keys:
            writer.write(http(401, b'{"error": {"message": "key"}}'))
            return
        status, told = await self.answer(request, is_admin=self.keys[key])
        writer.write(http(status, json.dumps(told).encode()))

    async def answer(self, request: Request, *, is_admin: bool) -> tuple[int, Any]:
        path = request.path.partition("?")[0]
        if path == "/v1/caller":
            scopes = ["admin", "infer"] if is_admin else ["infer"]
            return 200, {"scopes": scopes, "is_operator": is_admin}
        if path == "/v1/adapters":
            return 200, {"data": [self.entry(name) for name in self.has], "total": len(self.has)}
        if path.startswith("/v1/adapters/"):
            name = path.removeprefix("/v1/adapters/")
            return (200, self.entry(name)) if name in self.has else (404, {})
        if path in (LOAD, UNLOAD) and not is_admin:
            return 403, {}
        if path in (LOAD, UNLOAD):
            await self.gate.wait()
            async with self.locks[request.json["lora_name"]]:
                return await (self.load if path == LOAD else self.unload)(request.json)
        model = request.json["model"]
        expected = read_expected(filter(None, [request.headers.get(EXPECT_HEADER)])).get(model)
        if expected is not None and model in self.has:
            if not expected:
                return 404, {}
            if self.has[model][1] not in expected:
                return 412, {}
        known = model == "base" or model in self.has
        cid = self.has[model][1] if model in self.has else ""
        return (200, {"cid": cid}) if known else (404, {})

    def entry(self, name: str) -> dict[str, Any]:
        path, cid = self.has[name]
        return {"id": name, "names": [name], "cid": cid, "path": path}

    async def unload(self, body: Any) -> tuple[int, Any]:
        found = self.has.pop(body["lora_name"], None)
        return (200, {}) if found else (404, {"error": {"message": "unknown"}})

    async def load(self, body: Any) -> tuple[int, Any]:
        name, source = body["lora_name"], body["lora_path"]
        self.num_loads += 1
        await asyncio.sleep(self.load_s)
        while name in self.hanging:
            await asyncio.sleep(0.05)
        if name in self.refused or source not in self.files:
            return 422, {"error": {"message": f"no {name}"}}
        if name in self.has and not body.get("load_inplace"):
            return 400, {"error": {"message": "already"}}
        self.has[name] = (source, self.files[source])
        return 200, f"loaded {name}"


class Fleet:
    def __init__(self, count: int = 3) -> None:
        self.files = {f"/{letter}": f"cid-{letter}" for letter in "abcd"}
        self.servers = [Server(self.files) for _ in range(count)]
        self.replicas = [FakeReplica(str(i), script=one) for i, one in enumerate(self.servers)]

    def restart(self, *numbers: int) -> None:
        for number in numbers:
            self.servers[number].has.clear()
            fields = self.replicas[number].fields
            fields["instance"] = fields.get("instance", "i") + "x"

    def cids(self, name: str) -> list[str]:
        return [one.has.get(name, ("", ""))[1] for one in self.servers]

    async def until(self, name: str, *cids: str) -> None:
        while self.cids(name) != list(cids):
            await asyncio.sleep(0.01)


async def change(
    app: RouterApp, path: str, key: str = ADMIN, leaves: asyncio.Event | None = None, **body: Any
) -> Reply:
    headers = {"authorization": f"Bearer {key}"}
    return await ask(app, path, body, headers=headers, leaves=leaves)


async def load(app: RouterApp, name: str, source: str, **fields: Any) -> int:
    return (await change(app, LOAD, lora_name=name, lora_path=source, **fields)).status


async def infer(app: RouterApp, model: str) -> Reply:
    return await ask(app, body={"model": model}, headers={"authorization": f"Bearer {TENANT}"})


@asynccontextmanager
async def router_of(fleet: Fleet, store: DesiredStore) -> AsyncIterator[RouterApp]:
    async with running(*fleet.replicas, options=OPTIONS, desired=store) as app:
        yield app


@asynccontextmanager
async def second_router(fleet: Fleet, store: DesiredStore) -> AsyncIterator[RouterApp]:
    """Yield a router for replicas that run already."""
    async with running(options=OPTIONS, desired=store) as app:
        members = app._followers._members
        members._urls = {one.url: one.url for one in fleet.replicas}  # type: ignore[attr-defined]
        await app._followers.look()
        while len(app._reconciler._kept) < len(fleet.replicas):
            await asyncio.sleep(0.01)
        yield app
