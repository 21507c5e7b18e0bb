"""A proxy before a real server that makes it answer 500, lie in its reports, or hang in loads."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

CONTROL = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
INFERENCE = "/v1/completions"
HOP_BY_HOP = ("transfer-encoding", "connection", "keep-alive", "content-length", "host")


@dataclass
class Tries:
    """How often each request of a client has reached any server."""

    counts: Counter[str] = field(default_factory=Counter)
    highest: int = 0

    def note(self, request: web.Request) -> None:
        given = request.headers.get("x-request-id", "")
        self.counts[given] += 1
        self.highest = max(self.highest, int(request.headers.get("x-loramux-attempt", 1)))

    @property
    def most(self) -> int:
        return max(self.counts.values(), default=0)


class FaultProxy:
    def __init__(self, port: int, target: str, tries: Tries) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._target = target
        self._tries = tries
        self.is_failing = False
        self.lie: dict[str, Any] = {}
        """Fields of reports that are replaced."""
        self.hangs_in_loads = asyncio.Event()
        """Set: loads pass. Cleared: they have reached the server, and are not answered."""
        self.hangs_in_loads.set()
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def close(self) -> None:
        self.hangs_in_loads.set()
        await self._session.close()
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.path == INFERENCE:
            self._tries.note(request)
            if self.is_failing:
                return web.json_response({"error": {"message": "made to fail"}}, status=500)
        if request.path in CONTROL:
            await self.hangs_in_loads.wait()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        begun: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                f"{self._target}{request.raw_path}",
                headers=headers,
                data=await request.read() or None,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
                if request.path == "/v1/residency" and self.lie and answer.status == 200:
                    told = json.loads(await answer.read()) | self.lie
                    return web.json_response(told)
                if "event-stream" not in answer.headers.get("content-type", ""):
                    body = await answer.read()
                    return web.Response(status=answer.status, headers=kept, body=body)
                begun = web.StreamResponse(status=answer.status, headers=kept)
                await begun.prepare(request)
                async for chunk in answer.content.iter_any():
                    await begun.write(chunk)
                await begun.write_eof()
                return begun
        except (aiohttp.ClientError, OSError):
            # As of a server that was killed.
            if request.transport is not None:
                request.transport.abort()
            return begun or web.Response(status=502)
