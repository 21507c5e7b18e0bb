"""Application `engines`: replicas, each a whole `loramux serve` on a port of its own.

Ray starts, counts and replaces them. Requests reach them by HTTP from the router, so that Ray has
to be told what it cannot see: the load, and that open streams have to end before a replica stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from loramux.deploy.prewarm import own_adapters
from loramux.deploy.replica import ReplicaServer
from loramux.deploy.serve_config import ENGINE, FRONT, ROUTER, build_of
from loramux.deploy.slots import take_slot

_log = logging.getLogger(__name__)
AUTO_HOST = "auto"
# The router may not be there yet; the server starts meanwhile, and takes longer.
_FRONT_S = 30.0
# Routers hear of a replica that leaves by then, and send nothing more to it.
_LEAVE_S = 1.0
_NUM_STARTS = 2


class Engine:
    """Keeps one server running; its adapters are those of the newest `reconfigure`."""

    def __init__(self, args: Mapping[str, Any], build: str) -> None:
        host = args["host"]
        if host == AUTO_HOST:
            host = ray.util.get_node_ip_address()
        self._args = args
        self._build = build
        self._slot = take_slot(host, int(args["port"]))
        self._server = ReplicaServer(args["settings"], host=host, slot=self._slot)
        self._target_load = 1.0
        self._revision = ""
        self._fault = ""
        self._prewarmed: list[str] = []
        self._is_started = False

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Start the server, or change what can be changed while it runs.

        A change that the server refuses is told by `describe`: raising here would make Ray
        replace a replica that works.
        """
        self._target_load = float(config["target_load"])
        if not self._is_started:
            await self._start(config)
            return
        try:
            await self._server.set_limits(config["limits"])
            await self._server.apply(config["adapters"])
            self._fault = ""
        except Exception as error:
            _log.exception("the change %s was refused", config["revision"])
            self._fault = str(error)
        self._revision = config["revision"]

    async def _start(self, config: Mapping[str, Any]) -> None:
        busiest = asyncio.create_task(self._own_busiest())
        try:
            await self._server.set_limits(config["limits"])
            await self._server.start(config["adapters"], timeout_s=self._args["start_s"])
            self._prewarmed = await self._server.warm(await busiest)
        except BaseException:
            busiest.cancel()
            await self._server.stop()
            raise
        self._slot.keep()
        self._revision = config["revision"]
        self._is_started = True

    async def _own_busiest(self) -> list[str]:
        """Return the busy adapters that a router's hash places here."""
        count = int(self._args["prewarm"])
        if not count:
            return []
        try:
            front = serve.get_deployment_handle(ROUTER, FRONT)
            told = await asyncio.wait_for(front.busiest.remote(count), _FRONT_S)
        except Exception as error:
            _log.info("no router tells the busiest adapters: %r", error)
            return []
        # Replicas of another build leave, and their adapters come to those of this one.
        members = [url for url, build in told["members"].items() if build == self._build]
        return own_adapters(told["adapters"], own=self._server.url, members=members)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what routers know of the replica; Ray asks once, when it is ready."""
        return {"url": self._server.url, "build": self._build}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load as a share of what one replica should have."""
        report = await self._server.report()
        if report is None:
            return {}
        waiting, running = report.waiting, max(0, report.open - report.waiting)
        return {"load": (waiting + running / 2) / self._target_load}

    async def check_health(self) -> None:
        if self._is_started:
            await self._server.check()

    async def describe(self) -> dict[str, Any]:
        return {
            "url": self._server.url,
            "actor_pid": os.getpid(),
            "server_pid": self._server.pid,
            "build": self._build,
            "revision": self._revision,
            "fault": self._fault,
            "prewarmed": self._prewarmed,
            "log": str(self._server.log),
        }

    async def __del__(self) -> None:
        """Wait for open streams; Ray waits for this, up to its graceful_shutdown_timeout_s."""
        has_failed = self._is_started and not self._server.is_running
        if self._is_started and not has_failed:
            await asyncio.sleep(_LEAVE_S)
        await self._server.stop()
        if has_failed:
            self._slot.release()
        else:
            self._slot.free()


def engines(args: dict[str, Any]) -> serve.Application:
    """Build the application from the `args` of its configuration."""
    deployment = serve.deployment(Engine, name=ENGINE, max_constructor_retry_count=_NUM_STARTS)
    return deployment.bind(args, build_of(args))
