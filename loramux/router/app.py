"""The router's ASGI application: own routes, routes of the whole fleet, and the relay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from loramux import __version__
from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.asked import MAX_BODY_BYTES, Asked, BodyTooLarge, ClientLeft, read_asked
from loramux.router.fan_out import FanOut
from loramux.router.fleet import Fleet, Replica, State
from loramux.router.follow import Followers
from loramux.router.members import Members
from loramux.router.metrics import RouterMetrics
from loramux.router.prewarm import Prewarmer
from loramux.router.relay import Cut, Relay
from loramux.router.rollout import RollOut
from loramux.router.upstream import Upstream

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from loramux.router.resolve import RegistryNames

REPLICAS_PATH = "/v1/replicas"


class RouterApp:
    def __init__(
        self,
        members: Members,
        *,
        api_key: str | None = None,
        fleet: Fleet | None = None,
        names: RegistryNames | None = None,
    ) -> None:
        """`api_key`: for the router's own polls; requests keep those of their clients.

        `names`: resolves the names of requests before a replica is chosen.
        """
        self.fleet = fleet or Fleet()
        self.upstream = Upstream()
        self.metrics = RouterMetrics(self.fleet)
        self._names = names
        self._prewarmer = Prewarmer(self.fleet, self.upstream, api_key=api_key)
        relay = Relay(self.fleet, self.upstream, self.metrics, on_use=self._prewarmer.used)
        self._relay = relay
        self._fan_out = FanOut(self.fleet, relay)
        own_revision = None if names is None else lambda: names.revision
        self._roll_out = RollOut(self.fleet, relay, own_revision=own_revision)
        self._warming: set[asyncio.Task[int]] = set()
        self._followers = Followers(
            self.fleet,
            members,
            self.upstream,
            api_key=api_key,
            on_join=self._on_join,
            on_silence=relay.on_silence,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.upstream)
            if self._names is not None:
                await stack.enter_async_context(self._names)
            await self._followers.look()
            following = asyncio.create_task(self._followers.run())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            following.cancel()
            await asyncio.gather(following, *self._cancelled_warming(), return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _on_join(self, replica: Replica) -> None:
        await self._fan_out.repeat_on(replica)
        # Beside the reports, which must go on.
        task = asyncio.create_task(self._prewarmer.warm(replica))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    def _cancelled_warming(self) -> list[asyncio.Task[int]]:
        for task in self._warming:
            task.cancel()
        return list(self._warming)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._own(scope["method"], scope["path"])
        if own is not None:
            await own.send(send)
            return
        try:
            asked = await read_asked(scope, receive)
        except BodyTooLarge:
            message = f"The body is larger than {MAX_BODY_BYTES} bytes."
            await error_answer(413, message).send(send)
            return
        except ClientLeft:
            return
        work = asyncio.create_task(self._work(asked, send))
        left = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A client that left takes its request at the replica along.
            left.cancel()
            if not work.done():
                work.cancel()
        # A cut answer ends without its last bytes, and the server closes the connection.
        with contextlib.suppress(asyncio.CancelledError, Cut):
            await work

    async def _work(self, asked: Asked, send: Send) -> None:
        if self._fan_out.handles(asked):
            await (await self._fan_out.answer(asked)).send(send)
        elif self._roll_out.handles(asked):
            await (await self._roll_out.answer(asked)).send(send)
        else:
            if self._names is not None:
                asked = await self._names.resolve(asked, self.fleet)
            await self._relay.pass_on(asked, send)

    def _own(self, method: str, path: str) -> Whole | None:
        if method not in ("GET", "HEAD"):
            return None
        match path:
            case "/live":
                return json_answer({"status": "live"})
            case "/version":
                return json_answer({"version": __version__})
            case "/health" | "/ping" | "/v1/health":
                return self._health()
            case "/metrics":
                kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
                return Whole(200, [kind], self.metrics.render())
            case "/v1/replicas" | "/v1/stats":
                return json_answer({"object": "list", "data": self._replicas()})
        return None

    def _health(self) -> Whole:
        states = [replica.state for replica in self.fleet.replicas.values()]
        num_ready = states.count(State.READY)
        told = {
            "status": "ready" if num_ready else "starting",
            "replicas": len(states),
            "ready": num_ready,
        }
        return json_answer(told, status=200 if num_ready else 503).with_retry_after()

    def _replicas(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "name": replica.name,
                "url": replica.url,
                "state": replica.state.value,
                "base": replica.base,
                "base_digest": replica.base_digest,
                "revision": replica.revision,
                "instance": replica.instance,
                "adapters": len(replica.tiers),
                "open": replica.load,
                "waiting": replica.waiting,
                "slots": replica.slots,
                "report_age_s": round(min(now - replica.reported_s, 1e6), 3),
            }
            for replica in self.fleet.replicas.values()
        ]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
