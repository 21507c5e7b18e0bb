"""Application `front`: the router, on a listener of its own and behind Ray's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx2
import uvicorn
from ray import serve

from loramux.deploy import member_table
from loramux.deploy.guarded import GuardedApp
from loramux.deploy.prewarm import busiest_adapters
from loramux.deploy.ray_members import RayMembers
from loramux.deploy.serve_config import ENGINE, ENGINES, ROUTER
from loramux.router.app import RouterApp, RouterOptions

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)
_START_S = 30.0
_LOOK_S = 0.02
_LIST_S = 10.0


class Front:
    """Runs the router. Requests reach it over its own listener, or as the ASGI app of Ray."""

    # Ray awaits it.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._router = RouterApp(
            RayMembers(), RouterOptions(api_key=os.environ.get("LORAMUX_API_KEY"))
        )
        self._app = GuardedApp(self._router, runtime_loads=args["runtime_loads"])
        self._socket = listen(args["host"], int(args["port"]))
        config = uvicorn.Config(
            self._app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(args["drain_s"]),
        )
        self._server = uvicorn.Server(config)
        # Signals belong to Ray's worker.
        vars(self._server)["capture_signals"] = contextlib.nullcontext
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._following = asyncio.create_task(self._follow())
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                if self._serving.done():
                    await self._serving
                    raise RuntimeError("The router did not start.")
                await asyncio.sleep(_LOOK_S)

    def __serve_build_asgi_app__(self) -> Any:
        return without_lifespan(self._app)

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("The router's listener has ended.")

    async def describe(self) -> dict[str, Any]:
        host, port = self._socket.getsockname()[:2]
        return {"pid": os.getpid(), "host": host, "port": port}

    async def busiest(self, count: int) -> dict[str, Any]:
        """Return the fleet's busiest adapters, and the build of each replica by its URL."""
        # Asked over its own listener, as a client with the router's key.
        host, port = self._socket.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        key = os.environ.get("LORAMUX_API_KEY")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        listed: list[dict[str, Any]] = []
        async with httpx2.AsyncClient(timeout=_LIST_S, headers=headers, trust_env=False) as client:
            told = await client.get(
                f"http://{place}:{port}/v1/adapters", params={"order": "busiest", "limit": count}
            )
            if told.status_code == 200:
                listed = told.json()["data"]
        builds = {url: one.build for url, one in member_table.TABLE.running().items()}
        return {"adapters": busiest_adapters(listed, count), "members": builds}

    async def _follow(self) -> None:
        """Make Ray tell this process of the replicas: it begins with the first call."""
        engines = serve.get_deployment_handle(ENGINE, ENGINES)
        while True:
            try:
                await engines.describe.remote()
                return
            except Exception as error:
                _log.info("no replica yet: %r", error)
                await asyncio.sleep(1)

    async def __del__(self) -> None:
        """Wait for open answers; Ray waits for this."""
        self._following.cancel()
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._socket.close()


def without_lifespan(app: GuardedApp) -> Any:
    """Return the application for a second server: the first one starts and stop it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return answer


def listen(host: str, port: int) -> socket.socket:
    """Listen; several routers of one machine share the port, also while one replaces another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def front(args: dict[str, Any]) -> serve.Application:
    """Build the application from the `args` of its configuration."""
    deployment = serve.deployment(serve.ingress()(Front), name=ROUTER)
    return deployment.bind(args)
