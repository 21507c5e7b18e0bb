"""GET /ui: the web page, and GET /v1/live, which it follows."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loramux.backend.host import EngineStats, Health
from loramux.errors import LoramuxError
from loramux.server.context import Context, HostContext
from loramux.server.http.call import Call
from loramux.server.http.routes import Route, Routes
from loramux.server.http.streaming import named_event, stream_events
from loramux.server.live.page import INDEX, file_response, page_files, to_page
from loramux.server.live.reports import tier_entry
from loramux.types.modality import Modality

INTERVAL_S = 1.0
MAX_ADAPTERS = 24
"""Adapters of the batch, tenants and names of loads in one event."""
MAX_CELLS = 512
"""Letters of the map of the page pool; a larger pool has several pages for each."""
# The engine answers between two steps; an event does not wait longer for the map of its pages.
_MAP_WAIT_S, _MAP_TIMEOUT_S = 0.2, 5.0
# An adapter's traffic is reported while it runs and this much longer.
_FOLLOWED_S = 30.0
# Events that a page may be behind, before it starts over with a whole state.
_MAX_BEHIND = 5
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
State = dict[str, Any]


@dataclass(slots=True, eq=False)
class _Follower:
    """One open page."""

    events: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(_MAX_BEHIND))


class LiveFeed:
    """Sends the state of the server to a new page, and then its changes each second.

    The work is done while a page is open, once for all of them.
    """

    def __init__(self, context: HostContext, *, interval_s: float = INTERVAL_S) -> None:
        self._context = context
        self._interval_s = interval_s
        self._followers: set[_Follower] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._state: State = {}
        self._hosts = [_HostView(host) for host in context.hosts]

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events until the server stops."""
        follower = _Follower()
        if not self._followers:
            self._begin()
        self._followers.add(follower)
        try:
            yield named_event("state", self._state)
            while (sent := await follower.events.get()) is not None:
                yield sent
        finally:
            self._followers.discard(follower)
            if not self._followers:
                self._end()

    def _begin(self) -> None:
        """Start over: nothing was recorded while no page was open."""
        for host in self._hosts:
            host.begin()
        self._state = self._read()
        self._ticking = asyncio.create_task(self._tick())

    def _end(self) -> None:
        for host in self._hosts:
            host.end()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            for host in self._hosts:
                await host.ask_for_map()
            state = self._read()
            moves = self._moves()
            changed = {name: new for name, new in state.items() if new != self._state.get(name)}
            self._state = state
            sent = named_event("delta", changed | moves)
            ends = self._context.backend.health in (Health.DRAINING, Health.STOPPED)
            for follower in list(self._followers):
                self._send(follower, sent, ends=ends)
            if ends:
                return

    def _send(self, follower: _Follower, sent: bytes, *, ends: bool) -> None:
        queue = follower.events
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            sent = named_event("state", self._state)
        queue.put_nowait(sent)
        if ends:
            # An open page must not delay the end of the server.
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def _read(self) -> State:
        """Return the state of the first model, and that of the image model beside it."""
        states = [host.read() for host in self._hosts]
        return {"time": round(time.time(), 3), **states[0]} | {
            host.modality: state for host, state in zip(self._hosts[1:], states[1:], strict=True)
        }

    def _moves(self) -> State:
        """Return the adapters that were loaded and evicted since the last event, of all models."""
        moves: dict[str, list[str]] = {}
        for host in self._hosts:
            for what, names in host.moves().items():
                moves.setdefault(what, []).extend(names)
        return dict(moves)


class _HostView:
    """What the live view follows of one model."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._resident: tuple[str, ...] = ()
        self._followed: dict[str, float] = {}
        self._map = ""
        self._asking: asyncio.Task[None] | None = None

    @property
    def modality(self) -> Modality:
        return self._context.modality

    def begin(self) -> None:
        metrics = self._context.metrics
        metrics.newest_first_token.take()
        metrics.newest_inter_token.take()
        self._followed.clear()
        self._map = ""
        self._resident = self._context.backend.stats.resident_adapters

    def end(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def ask_for_map(self) -> None:
        """Asks for the map of the page pool, unless an earlier question is still open."""
        if not isinstance(self._context, Context):
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read_map(self._context))
        await asyncio.wait({self._asking}, timeout=_MAP_WAIT_S)

    async def _read_map(self, context: Context) -> None:
        with contextlib.suppress(LoramuxError, TimeoutError):
            async with asyncio.timeout(_MAP_TIMEOUT_S):
                self._map = cells_of(await context.backend.page_kinds())

    def read(self) -> State:
        context = self._context
        backend, stats, total = context.backend, context.backend.stats, context.metrics.total
        metrics = context.metrics
        return {
            "modality": context.modality,
            "status": backend.health.value,
            "restarts": backend.num_restarts,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions,
            "pages": _pages(stats),
            "map": self._map,
            "requests": total.num_requests,
            "prompt_tokens": total.num_prompt_tokens,
            "generation_tokens": total.num_generation_tokens,
            "prefix_query_tokens": stats.prefix_query_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "loads": stats.num_adapter_loads,
            "evictions": stats.num_adapter_evictions,
            "tiers": [msgspec.to_builtins(tier_entry(tier)) for tier in stats.tiers],
            "batch": self._named(stats.running_adapters),
            "queue": self._named(stats.waiting_adapters),
            "tenants": _largest(stats.waiting_tenants),
            "ttft": _percentiles(metrics.newest_first_token.take()),
            "inter_token": _percentiles(metrics.newest_inter_token.take()),
            "traffic": self._traffic(stats),
        }

    def moves(self) -> dict[str, list[str]]:
        """Return the adapters that were loaded and evicted since the last call."""
        before, now = self._resident, self._context.backend.stats.resident_adapters
        if before is now:
            return {}
        self._resident = now
        was, still = set(before), set(now)
        moves = {"loaded": still - was, "evicted": was - still}
        return {what: self._names(cids) for what, cids in moves.items() if cids}

    def _traffic(self, stats: EngineStats) -> dict[str, int]:
        """Return the tokens generated so far by the adapters that ran lately."""
        now = time.monotonic()
        self._followed |= dict.fromkeys(stats.running_adapters, now)
        self._followed = {cid: at for cid, at in self._followed.items() if now - at <= _FOLLOWED_S}
        newest = sorted(self._followed, key=self._followed.__getitem__)[-MAX_ADAPTERS:]
        traffic = self._context.metrics.traffic
        return {self._name(cid): traffic.total(cid).num_generation_tokens for cid in newest}

    def _names(self, cids: Iterable[str]) -> list[str]:
        return [self._name(cid) for cid in sorted(cids)[:MAX_ADAPTERS]]

    def _named(self, counts: Mapping[str, int]) -> dict[str, int]:
        return {self._name(cid): number for cid, number in _largest(counts).items()}

    def _name(self, cid: str) -> str:
        names: Sequence[str] = self._context.names.names_of(cid)
        return names[0] if names else cid


def _pages(stats: EngineStats) -> dict[str, int]:
    held = stats.num_adapter_pages + stats.num_prefix_pages + stats.num_free_pages
    return {
        "total": stats.num_pages,
        "free": stats.num_free_pages,
        "adapters": stats.num_adapter_pages,
        "prefixes": stats.num_prefix_pages,
        "kv": max(0, stats.num_pages - held),
    }


def cells_of(kinds: bytes, num_cells: int = MAX_CELLS) -> str:
    """Return a letter for each of up to `num_cells` ranges of pages: what most of a range is.

    Between two kinds of one number, the one that holds something is shown.
    """
    count = min(num_cells, len(kinds))
    ends = [len(kinds) * number // count for number in range(count + 1)] if count else []
    ranges = (kinds[start:end] for start, end in zip(ends, ends[1:], strict=False))
    return "".join(max("kpa.", key=lambda kind: pages.count(kind.encode())) for pages in ranges)


def _largest(counts: Mapping[str, int]) -> dict[str, int]:
    largest = sorted(counts.items(), key=lambda entry: entry[1], reverse=True)
    return dict(largest[:MAX_ADAPTERS])


def _percentiles(samples: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles in milliseconds of sorted seconds; None without a sample."""
    if not samples:
        return None
    last = len(samples) - 1
    return {
        name: round(samples[round(share * last)] * 1000, 2) for name, share in PERCENTILES.items()
    }


def page_routes(context: HostContext) -> list[Route]:
    routes = Routes()
    feed = LiveFeed(context)

    @routes.get("/v1/live")
    async def live(request: Call) -> Response:
        """Server-sent events without an end: the state of the engine, then its changes."""
        context.require_known()
        return await stream_events(request, feed.events())

    if not context.options.ui:
        return routes.found

    @routes.on("/ui", "GET", "HEAD")
    async def without_slash(request: Call) -> Response:
        return to_page(request)

    @routes.on("/ui/{path:path}", "GET", "HEAD")
    async def page(request: Call) -> Response:
        file = page_files().get(request.path_params["path"] or INDEX)
        if file is None:
            raise HTTPException(404)
        return file_response(request, file)

    return routes.found
