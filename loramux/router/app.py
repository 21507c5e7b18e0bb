"""The router's ASGI application: own routes, routes of the whole fleet, and the relay."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loramux import __version__
from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.asked import (
    Asked,
    BodiesTooLarge,
    BodyLimits,
    BodyTooLarge,
    ClientLeft,
    credentials,
    make_asked,
    read_body,
)
from loramux.router.desired import DesiredStore, MemoryDesired
from loramux.router.expect import expectation_of
from loramux.router.fleet import Fleet, Replica, State
from loramux.router.follow import Followers
from loramux.router.lists import Lists
from loramux.router.loads import Loads
from loramux.router.members import Members
from loramux.router.metrics import RouterMetrics
from loramux.router.prewarm import Prewarmer
from loramux.router.reconcile import LOAD_S, Reconciler
from loramux.router.relay import Cut, Relay
from loramux.router.rollout import RollOut
from loramux.router.upstream import Upstream

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from loramux.router.resolve import RegistryNames

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 * 2**20
_STATUS_PATHS = ("/metrics", "/v1/replicas", "/v1/stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    api_key: str | None = None
    """For the router's own requests, which need the scopes metrics, push and admin; it opens the
    status routes. Requests keep the keys of their clients."""
    is_status_open: bool = False
    """Whether the status routes, which tell internal addresses, need no key."""
    tenant_header: str | None = None
    """The servers' setting."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = 16 * MAX_BODY_BYTES
    """The bodies of all open requests may have this size together."""
    load_s: float = LOAD_S
    """How long a replica may take to load an adapter."""


class RouterApp:
    def __init__(
        self,
        members: Members,
        options: RouterOptions | None = None,
        *,
        fleet: Fleet | None = None,
        names: RegistryNames | None = None,
        desired: DesiredStore | None = None,
    ) -> None:
        """`names`: resolves the names of requests before a replica is chosen.

        `desired`: keeps the adapters that are loaded at run time; else they end with the router.
        """
        self._options = options = options or RouterOptions()
        self.fleet = fleet or Fleet()
        self.upstream = Upstream()
        self.metrics = RouterMetrics(self.fleet)
        self._names = names
        self._bodies = BodyLimits(options.max_body_bytes, options.max_bodies_bytes)
        key = options.api_key
        self._prewarmer = Prewarmer(self.fleet, self.upstream, api_key=key)
        self._relay = relay = Relay(
            self.fleet,
            self.upstream,
            self.metrics,
            on_use=self._prewarmer.used,
            expect=lambda asked: expectation_of(self._reconciler, asked.names),
        )
        self._lists = Lists(self.fleet, relay)
        self._reconciler = Reconciler(
            self.fleet,
            relay,
            desired or MemoryDesired(),
            api_key=key,
            load_s=options.load_s,
            on_prepared=self._prewarm,
        )
        self._loads = Loads(self.fleet, relay, self._reconciler, self._lists)
        own_revision = None if names is None else lambda: names.revision
        self._roll_out = RollOut(self.fleet, relay, own_revision=own_revision)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._followers = Followers(
            self.fleet,
            members,
            self.upstream,
            api_key=key,
            on_join=self._reconciler.joined,
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
            try:
                await self._reconciler.refresh()
            # The loop below goes on trying.
            except Exception as error:
                _log.warning("the desired adapters cannot be read: %s", error)
            await self._followers.look()
            self._start(self._followers.run())
            self._start(self._reconciler.run())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._loads.finish()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the router ended", exc_info=error)

    def _prewarm(self, replica: Replica) -> None:
        # Beside the reports, which must go on.
        self._start(self._prewarmer.warm(replica))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._own(scope)
        if own is not None:
            await own.send(send)
            return
        try:
            body = await read_body(receive, self._bodies)
        except BodyTooLarge:
            message = f"The body is larger than {self._bodies.each} bytes."
            await error_answer(413, message).send(send)
        except BodiesTooLarge:
            await error_answer(503, "The bodies of open requests fill the memory.").send(send)
        except ClientLeft:
            return
        else:
            tenant_header = (self._options.tenant_header or "").lower()
            asked = make_asked(scope, body, tenant_header=tenant_header)
            try:
                await self._answer_asked(asked, receive, send)
            finally:
                self._bodies.give_back(len(body))

    async def _answer_asked(self, asked: Asked, receive: Receive, send: Send) -> None:
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
        if self._loads.handles(asked):
            await (await self._loads.answer(asked)).send(send)
        elif self._lists.handles(asked):
            await (await self._lists.answer(asked)).send(send)
        elif asked.method == "POST" and asked.path.endswith(":push"):
            # On one replica, the others would answer with the version before.
            text = "A router takes no pushes: push to each server, or load from a shared folder."
            await error_answer(501, text).send(send)
        elif self._roll_out.handles(asked):
            await (await self._roll_out.answer(asked)).send(send)
        else:
            if self._names is not None:
                asked = await self._names.resolve(asked, self.fleet)
            await self._relay.pass_on(asked, send)

    def _own(self, scope: Scope) -> Whole | None:
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if scope["path"] in _STATUS_PATHS and not self._opens_status(scope):
            return error_answer(
                401,
                "This route tells of the servers behind the router: it needs the router's own key "
                "(LORAMUX_API_KEY), or --open-status.",
            )
        match scope["path"]:
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

    def _opens_status(self, scope: Scope) -> bool:
        key = self._options.api_key
        if self._options.is_status_open:
            return True
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        given = credentials(headers)
        return key is not None and any(
            hmac.compare_digest(one.encode(), key.encode()) for one in given
        )

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
                "id": replica.id,
                "name": replica.name,
                "url": replica.url,
                "state": replica.state.value,
                "base": replica.base,
                "base_digest": replica.base_digest,
                "revision": replica.revision,
                "instance": replica.instance,
                "adapters": len(replica.tiers),
                "lacking": sorted(replica.lacking),
                "is_prepared": replica.is_prepared,
                "is_ejected": replica.conduct.is_out(now),
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
