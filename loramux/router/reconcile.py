"""Brings every replica to the desired adapters, one loop for each, by the router's own key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import msgspec

from loramux.base.threads import QUERIES
from loramux.errors import LoramuxError
from loramux.router.answers import Whole
from loramux.router.asked import Asked
from loramux.router.desired import DesiredStore
from loramux.router.expect import FRESH_S
from loramux.router.fleet import Fleet, Replica
from loramux.router.relay import Relay
from loramux.types.desired import Desired, DesiredAdapter, DesiredConflict, DesiredState

_log = logging.getLogger(__name__)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# Of a server that was not reached, or did not answer in time.
SILENT = (502, 504)
LOAD_S = 60.0
"""How long a replica may take to load an adapter."""
_LIST_S = 10.0
# Often enough that requests need not read the record.
_POLL_S = FRESH_S / 2
_REFRESH_S = 2.0
# What a replica has is looked at this often, also without a change.
_LOOK_S = 60.0
# This often while a change that did not end in time may still happen.
_SOON_S, _UNSURE_S = 5.0, 120.0
# A replica that has joined takes requests after this time, also if loads are still missing.
_PREPARE_S = 30.0
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
# A change this much older than the time for its loads is one of a router that has ended.
_ABANDONED_S = 30.0
_LOADS_AT_ONCE = 4


class _Entry(msgspec.Struct):
    names: list[str]
    cid: str | None = None
    path: str | None = None


class _List(msgspec.Struct):
    data: list[_Entry]


_LISTS = msgspec.json.Decoder(_List)
_ENTRIES = msgspec.json.Decoder(_Entry)


@dataclass(slots=True)
class _Kept:
    """The loop of one replica."""

    replica: Replica
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    problems: frozenset[str] = frozenset()
    task: asyncio.Task[None] | None = None
    names: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """A name is changed by one request at a time."""
    doubts: set[str] = field(default_factory=set)
    """Names whose change did not come to an end in time: it may still happen."""
    unsure_until: float = 0.0
    """A change that did not come to an end in time may still happen, perhaps after later ones."""
    is_told: bool = False
    """Whether it has been called prepared."""


OnPrepared = Callable[[Replica], None]


class Reconciler:
    def __init__(
        self,
        fleet: Fleet,
        relay: Relay,
        store: DesiredStore,
        *,
        api_key: str | None,
        load_s: float = LOAD_S,
        on_prepared: OnPrepared = lambda replica: None,
    ) -> None:
        """`api_key`: needs the scope admin where servers need keys.

        `on_prepared`: called when a replica that joined has what it should have.
        """
        self._fleet = fleet
        self._relay = relay
        self._store = store
        self._api_key = api_key
        self.load_s = load_s
        self._on_prepared = on_prepared
        self._desired = Desired()
        self._read_at = -math.inf
        self._is_away = False
        self._refreshing = asyncio.Lock()
        self._kept: dict[str, _Kept] = {}

    @property
    def desired(self) -> Desired:
        return self._desired

    async def refresh(self) -> Desired:
        """Read the desired adapters, and wake the loops if they have changed."""
        began = time.monotonic()
        if await QUERIES.run(self._store.revision) != self._desired.revision:
            read = await QUERIES.run(self._store.read)
            # Another task may have read a later one meanwhile.
            if read.revision > self._desired.revision:
                self._desired = read
                for kept in self._kept.values():
                    kept.wake.set()
        self._read_at = max(self._read_at, began)
        return self._desired

    async def fresh(self) -> Desired:
        """Return the desired adapters, no older than FRESH_S unless their store is away."""
        if self._is_fresh:
            return self._desired
        async with self._refreshing:
            if not self._is_fresh:
                await self._newest()
        return self._desired

    async def _newest(self) -> Desired:
        """Return the record as it is now, or as it was known while its store is away."""
        if not self._is_away:
            try:
                async with asyncio.timeout(_REFRESH_S):
                    await self.refresh()
            # What was loaded is served on.
            except Exception as error:
                self._went_away(error)
        return self._desired

    async def settled(self) -> None:
        """Wait until no router can act on the record before the last change."""
        if self._store.is_shared:
            await asyncio.sleep(FRESH_S)

    def distrust(self, replica: Replica, names: frozenset[str]) -> None:
        """Send a replica no requests for these names until it was brought to the record."""
        kept = self._kept.get(replica.name)
        if kept is not None:
            replica.lacking |= names
            kept.wake.set()

    @property
    def _is_fresh(self) -> bool:
        is_recent = time.monotonic() - self._read_at <= FRESH_S
        return is_recent or self._is_away or not self._store.is_shared

    def _went_away(self, error: Exception) -> None:
        if not self._is_away:
            _log.warning("the desired adapters cannot be read: %s", error)
        self._is_away = True

    async def write(self, adapter: DesiredAdapter, *, if_revision: int) -> DesiredAdapter:
        """Record an adapter; raises DesiredConflict."""
        changed = await QUERIES.run(self._store.write, adapter, if_revision=if_revision)
        await self.refresh()
        return changed

    async def run(self) -> None:
        """Follow the store until it is cancelled."""
        try:
            while True:
                try:
                    await self.refresh()
                    self._is_away = False
                    await self._end_abandoned()
                    self._forget_gone_replicas()
                # Without this loop, changes of other routers would never arrive.
                except Exception as error:
                    self._went_away(error)
                    if not isinstance(error, (LoramuxError, OSError)):
                        _log.exception("following the desired adapters failed, and goes on")
                await asyncio.sleep(_POLL_S)
        finally:
            tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def joined(self, replica: Replica) -> None:
        """Prepare a replica that is ready with a new process: what was loaded there is lost."""
        replica.is_prepared = not self._desired.adapters
        kept = self._kept.get(replica.name)
        if kept is not None and kept.task is not None:
            kept.task.cancel()
        kept = self._kept[replica.name] = _Kept(replica)
        kept.task = asyncio.create_task(self._keep(kept))

    async def bring(self, replica: Replica) -> bool:
        """Bring a replica to the desired adapters now; returns whether it has them all."""
        kept = self._kept.get(replica.name)
        if kept is None:
            return False
        async with kept.lock:
            return await self._pass(kept)

    async def ask(
        self, replica: Replica, method: str, path: str, body: object = None, *, limit_s: float
    ) -> Whole:
        """Ask a replica by the router's own key."""
        headers = [("content-type", "application/json")]
        if self._api_key is not None:
            headers.append(("authorization", f"Bearer {self._api_key}"))
        content = b"" if body is None else json.dumps(body).encode()
        asked = Asked(
            method=method, path=path, target=path, headers=headers, body=content, name="",
            request_id="",
        )  # fmt: skip
        return await self._relay.ask(asked, replica, limit_s=limit_s)

    async def load(self, replica: Replica, name: str, source: str) -> Whole:
        body = _load_body(name, source)
        async with self._held(replica, name):
            return await self._change(replica, LOAD, name, body)

    async def unload(self, replica: Replica, name: str) -> Whole:
        async with self._held(replica, name):
            return await self._change(replica, UNLOAD, name, {"lora_name": name})

    def _held(self, replica: Replica, name: str) -> AbstractAsyncContextManager[None]:
        kept = self._kept.get(replica.name)
        return contextlib.nullcontext() if kept is None else kept.names[name]

    async def _change(self, replica: Replica, path: str, name: str, body: object) -> Whole:
        told = await self.ask(replica, "POST", path, body, limit_s=self.load_s)
        kept = self._kept.get(replica.name)
        if kept is None:
            return told
        if told.status in SILENT:
            kept.doubts.add(name)
            kept.unsure_until = time.monotonic() + _UNSURE_S
            replica.lacking |= {name}
            kept.wake.set()
        else:
            # Servers change a name in the order of the requests: the one before has ended too.
            kept.doubts.discard(name)
        return told

    async def cid_of(self, replica: Replica, name: str) -> str | None:
        """Return the CID of a name on a replica; None if it has none, or does not answer."""
        found = await self._entry(replica, name)
        return None if found is None else found.cid

    async def source_of(self, replica: Replica, name: str) -> str:
        """Return the folder of a name on a replica; empty if it does not tell."""
        found = await self._entry(replica, name)
        return "" if found is None else found.path or ""

    async def _entry(self, replica: Replica, name: str) -> _Entry | None:
        path = f"/v1/adapters/{quote(name, safe='')}"
        told = await self.ask(replica, "GET", path, limit_s=_LIST_S)
        if told.status != 200:
            return None
        try:
            return _ENTRIES.decode(told.body)
        except msgspec.DecodeError:
            return None

    async def _keep(self, kept: _Kept) -> None:
        pause_s = _RETRY_S
        loop = asyncio.get_running_loop()
        loop.call_later(_PREPARE_S, self._prepare, kept)
        while True:
            kept.wake.clear()
            try:
                async with kept.lock:
                    is_whole = await self._pass(kept)
            # Without this loop, the replica would keep what it has.
            except Exception:
                _log.exception("%s could not be brought to its adapters", kept.replica.name)
                is_whole = False
            if is_whole:
                self._prepare(kept)
            pause_s = _RETRY_S if is_whole else min(2 * pause_s, _MAX_RETRY_S)
            with contextlib.suppress(TimeoutError):
                look_s = _LOOK_S if time.monotonic() > kept.unsure_until else _SOON_S
                async with asyncio.timeout(look_s if is_whole else pause_s):
                    await kept.wake.wait()

    def _prepare(self, kept: _Kept) -> None:
        if self._kept.get(kept.replica.name) is kept and not kept.is_told:
            kept.is_told = kept.replica.is_prepared = True
            self._on_prepared(kept.replica)

    async def _pass(self, kept: _Kept) -> bool:
        """Load and unload what differs; returns whether the replica has all that it should."""
        replica, desired = kept.replica, self._desired
        settled = [
            one for one in desired.adapters.values() if one.state is not DesiredState.CHANGING
        ]
        if not settled:
            self._note(kept, {})
            return not kept.doubts
        wanted = frozenset(one.name for one in settled if one.state is DesiredState.WANTED)
        actual = await self._actual(replica)
        if actual is None:
            self._note(kept, dict.fromkeys(wanted, "it does not list its adapters"))
            return False
        places = asyncio.Semaphore(_LOADS_AT_ONCE)
        differing = [one for one in settled if one.name in kept.doubts or not _is_met(one, actual)]
        # Requests for the others may go there from now on.
        replica.lacking = wanted & frozenset(one.name for one in differing) | kept.doubts
        results = await asyncio.gather(*(self._apply(replica, one, places) for one in differing))
        problems = {
            one.name: problem
            for one, problem in zip(differing, results, strict=True)
            if problem is not None
        }
        self._note(kept, problems, lacking=wanted & problems.keys())
        return not problems

    async def _apply(
        self, replica: Replica, one: DesiredAdapter, places: asyncio.Semaphore
    ) -> str | None:
        """Load or unload an adapter; returns the problem."""
        unload = {"lora_name": one.name}
        async with places, self._held(replica, one.name):
            # Another router may have changed it since this pass began.
            if (await self._newest()).adapters.get(one.name) != one:
                # It was changed meanwhile; the loop was woken.
                return "it is being changed"
            if one.state is DesiredState.GONE:
                told = await self._change(replica, UNLOAD, one.name, unload)
                return None if told.status in (200, 404) else _reason(told)
            body = _load_body(one.name, one.source)
            told = await self._change(replica, LOAD, one.name, body)
            if told.status != 200:
                return _reason(told)
            found = await self.cid_of(replica, one.name)
            if one.cid and found != one.cid:
                # Other files than those that the other replicas serve by this name.
                await self._change(replica, UNLOAD, one.name, unload)
                return f"its source {one.source} has other files than when it was loaded"
            return None

    async def _actual(self, replica: Replica) -> dict[str, str] | None:
        """Return CID by name of what a replica has; None if it does not tell."""
        told = await self.ask(replica, "GET", "/v1/adapters", limit_s=_LIST_S)
        if told.status != 200:
            _log.info("%s does not list its adapters: %s", replica.name, _reason(told))
            return None
        try:
            listed = _LISTS.decode(told.body)
        except msgspec.DecodeError:
            return None
        return {name: one.cid or "" for one in listed.data for name in one.names}

    def _note(
        self, kept: _Kept, problems: dict[str, str], *, lacking: frozenset[str] | None = None
    ) -> None:
        """Record what a replica lacks, and log problems once."""
        kept.replica.lacking = frozenset(problems if lacking is None else lacking) | kept.doubts
        told = frozenset(f"{name}: {problem}" for name, problem in problems.items())
        for text in sorted(told - kept.problems):
            _log.warning("%s lacks %s", kept.replica.name, text)
        kept.problems = told

    async def _end_abandoned(self) -> None:
        """Take changes back whose router has ended before they were complete."""
        for one in self._desired.adapters.values():
            is_old = time.time() - one.changed_at > 2 * self.load_s + _ABANDONED_S
            if one.state is DesiredState.CHANGING and is_old:
                _log.warning("the load of %s was not completed, and is undone", one.name)
                try:
                    await self.write(undone(one), if_revision=one.revision)
                except DesiredConflict:
                    _log.info("another router has undone the load of %s", one.name)

    def _forget_gone_replicas(self) -> None:
        for name in [name for name in self._kept if name not in self._fleet.replicas]:
            kept = self._kept.pop(name)
            if kept.task is not None:
                kept.task.cancel()


def _load_body(name: str, source: str) -> dict[str, Any]:
    # In place: the name may be there by a load that arrived late.
    return {"lora_name": name, "lora_path": source, "load_inplace": True}


def undone(one: DesiredAdapter) -> DesiredAdapter:
    """Return what is wanted after a change that failed."""
    state = DesiredState.WANTED if one.previous_source else DesiredState.GONE
    return replace(
        one,
        state=state,
        source=one.previous_source,
        cid=one.previous_cid,
        previous_source="",
        previous_cid="",
    )


def _is_met(one: DesiredAdapter, actual: dict[str, str]) -> bool:
    if one.state is DesiredState.GONE:
        return one.name not in actual
    return one.name in actual and (not one.cid or actual[one.name] == one.cid)


def _reason(told: Whole) -> str:
    if told.status in (401, 403):
        return f"status {told.status}: the router's LORAMUX_API_KEY needs the scope admin"
    return f"status {told.status}: {told.body[:300].decode('utf-8', 'replace')}"
