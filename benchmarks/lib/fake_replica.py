"""A replica without a model: it sleeps for its steps and loads, and reports as a server does.

python -m benchmarks.lib.fake_replica PORT DEVICE HOST SLOTS STEP_S
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import parse_qs

import msgspec
import uvicorn

from loramux.router.fleet import key_of_name
from loramux.types.replica_report import USUAL_ANSWER_TOKENS, ResidencyReport
from loramux.types.residency import ResidencyView, Tier, key_of_cid, wait_for_move

HOST_S, DISK_S = 0.004, 0.06
_HEADERS = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream")]


def cid_of(name: str) -> str:
    return f"cidv1:sha256:{key_of_name(name)}"


class FakeReplica:
    def __init__(self, device: int, host: int, slots: int, step_s: float) -> None:
        self._sizes = {Tier.DEVICE: device, Tier.HOST: host}
        self._slots = slots
        self._step_s = step_s
        self._measured_step_s = step_s
        self._held: dict[Tier, OrderedDict[str, None]] = {
            Tier.DEVICE: OrderedDict(),
            Tier.HOST: OrderedDict(),
        }
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(slots)
        self._view = ResidencyView()
        self._open = self._waiting = 0
        self._answer_tokens = USUAL_ANSWER_TOKENS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/residency":
            query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
            await self._report(query, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await self._generate(json.loads(body), send)

    async def _generate(self, asked: dict[str, Any], send: Any) -> None:
        self._open += 1
        self._waiting += 1
        tier = await self._load(asked["model"])
        async with self._places:
            self._waiting -= 1
            try:
                await self._answer(asked, tier, send)
                self._answer_tokens += (asked["max_tokens"] - self._answer_tokens) / 32
            finally:
                self._open -= 1

    async def _answer(self, asked: dict[str, Any], tier: Tier, send: Any) -> None:
        told = [
            (b"x-loramux-cid", cid_of(asked["model"]).encode()),
            (b"x-loramux-tier", tier.name.lower().encode()),
        ]
        if not asked.get("stream"):
            await asyncio.sleep(self._step_s * asked["max_tokens"])
            headers = [*_HEADERS, *told, (b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, *told]})
        for _ in range(asked["max_tokens"]):
            began = time.perf_counter()
            await asyncio.sleep(self._step_s)
            # A machine with other load takes longer than it sleeps.
            self._measured_step_s += (time.perf_counter() - began - self._measured_step_s) / 32
            chunk = b'data: {"choices":[{"text":" token"}]}\n\n'
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _load(self, name: str) -> Tier:
        cid = cid_of(name)
        tier = next((t for t, held in self._held.items() if cid in held), Tier.DISK)
        if tier is not Tier.DEVICE and cid not in self._loading:
            seconds = HOST_S if tier is Tier.HOST else DISK_S
            self._loading[cid] = asyncio.create_task(asyncio.sleep(seconds))
        if (loading := self._loading.get(cid)) is not None:
            await loading
            self._loading.pop(cid, None)
        self._use(cid)
        return tier

    def _use(self, cid: str) -> None:
        changed = {cid}
        for tier, held in self._held.items():
            held[cid] = None
            held.move_to_end(cid)
            if len(held) > self._sizes[tier]:
                changed.add(held.popitem(last=False)[0])
        moves = [
            (one, next((int(t) for t, held in self._held.items() if one in held), int(Tier.DISK)))
            for one in changed
        ]
        self._view.apply((one, tier) for one, tier in moves if self._view.tier_of(one) != tier)

    async def _report(self, query: dict[str, str], send: Any) -> None:
        since, instance = int(query["since"]), query.get("instance", "")
        if instance == self._view.instance and since == self._view.generation:
            await wait_for_move((self._view,), float(query["wait_s"]))
        moved = self._view.since(since, instance)
        report = ResidencyReport(
            instance=moved.instance,
            since=since,
            generation=moved.generation,
            full=moved.is_full,
            moves={key_of_cid(cid): int(tier) for cid, tier in moved.tiers.items()},
            state="ready",
            base="base",
            base_digest="base",
            revision=0,
            open=self._open,
            waiting=self._waiting,
            waiting_tokens=0,
            slots=self._slots,
            step_s=self._measured_step_s,
            token_s=3e-5,
            tier_s=[DISK_S, DISK_S, DISK_S, HOST_S, HOST_S / 2, 0.0],
            free_pages=0,
            answer_tokens=self._answer_tokens,
        )
        body = msgspec.json.encode(report)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    port, device, host, slots = map(int, sys.argv[1:5])

    async def serve() -> None:
        app = FakeReplica(device, host, slots, float(sys.argv[5]))
        config = uvicorn.Config(
            app, port=port, lifespan="off", log_level="warning", access_log=False
        )
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
