"""Follows the residency reports of all replicas, one long poll for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from loramux.router.fleet import Fleet, Gap, Replica, State
from loramux.router.members import Members
from loramux.router.reports import MAX_REPORT_BYTES, UnusableReport, read_report
from loramux.router.upstream import Broken, Unreachable, Upstream
from loramux.types.replica_report import ResidencyReport

_log = logging.getLogger(__name__)
_WAIT_S = 0.25
_TIMEOUT_S = 1.25
# A burst of moves is one report.
_PAUSE_S = 0.02
_RETRY_S = 0.3
_LOOK_S = 5.0

OnJoin = Callable[[Replica], None]
OnSilence = Callable[[Replica, float], None]


class Followers:
    """Keeps a fleet in step with its members and their reports."""

    def __init__(
        self,
        fleet: Fleet,
        members: Members,
        upstream: Upstream,
        *,
        api_key: str | None = None,
        on_join: OnJoin = lambda replica: None,
        on_silence: OnSilence = lambda replica, seconds: None,
    ) -> None:
        """`on_join`: called at once when a replica is ready and has another instance than before.

        `on_silence`: called again and again while a replica sends no reports.
        """
        self._fleet = fleet
        self._members = members
        self._upstream = upstream
        self._headers = [] if api_key is None else [("Authorization", f"Bearer {api_key}")]
        self._on_join = on_join
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_silence = on_silence
        self._unusable: set[str] = set()
        """Names of the replicas whose last report could not be used."""

    async def run(self) -> None:
        """Look for members until it is cancelled."""
        try:
            while True:
                try:
                    await self._members.changed(_LOOK_S)
                    await self.look()
                # Without this loop, the router would never hear of another replica.
                except Exception:
                    _log.exception("the members of the fleet could not be looked up")
                    await asyncio.sleep(_RETRY_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def look(self) -> None:
        """Start to follow new members, and forget those that are gone."""
        current = await self._members.current()
        for name in [name for name in self._tasks if name not in current]:
            self._tasks.pop(name).cancel()
            self._unusable.discard(name)
            self._fleet.remove(name)
        for name, url in current.items():
            known = self._fleet.replicas.get(name)
            if known is not None and known.url != url:
                # It restarted elsewhere, and keeps what the hash makes its own.
                known.url, known.generation = url, -1
            if name not in self._tasks:
                replica = Replica(name=name, url=url)
                self._fleet.add(replica)
                self._tasks[name] = asyncio.create_task(self._keep_following(replica))

    async def _keep_following(self, replica: Replica) -> None:
        while True:
            try:
                await self._follow(replica)
            # Without this loop, the replica would be lost to the fleet.
            except Exception:
                _log.exception("following %s failed and starts again", replica.name)
                self._fleet.without_report(replica)
                await asyncio.sleep(_RETRY_S)

    async def _follow(self, replica: Replica) -> None:
        joined = ""
        while True:
            own, full = replica.own, replica.generation < 0
            try:
                report = await self._report(replica, full=full)
                self._fleet.apply(replica, report, now=time.monotonic(), own=own)
            except Gap:
                replica.generation = -1
                await asyncio.sleep(_PAUSE_S)
            except UnusableReport as error:
                self._refuse(replica, str(error))
                await asyncio.sleep(_RETRY_S)
            except (Unreachable, Broken) as error:
                self._miss(replica, error)
                await asyncio.sleep(_RETRY_S)
            else:
                self._unusable.discard(replica.name)
                if replica.state is State.READY and joined != report.instance:
                    joined = report.instance
                    self._on_join(replica)
                await asyncio.sleep(_PAUSE_S)

    def _refuse(self, replica: Replica, reason: str) -> None:
        """Treats a replica as one without a report, and says once why."""
        if replica.name not in self._unusable:
            _log.warning("the report of %s cannot be used: %s", replica.name, reason)
        self._unusable.add(replica.name)
        self._fleet.without_report(replica)

    def _miss(self, replica: Replica, error: Exception) -> None:
        """Record that a replica sent no report."""
        if not isinstance(error.__cause__, TimeoutError):
            # It does not listen, or not to this router; one that is silent may just be slow.
            if replica.state is not State.UNKNOWN:
                _log.warning("no report of %s: %s", replica.name, error)
            replica.state, replica.generation = State.UNKNOWN, -1
        self._on_silence(replica, time.monotonic() - replica.reported_s)

    async def _report(self, replica: Replica, *, full: bool) -> ResidencyReport:
        since = -1 if full else replica.generation
        query = f"since={since}&instance={replica.instance}&wait_s={_WAIT_S}"
        url = f"{replica.url}/v1/residency?{query}"
        async with self._upstream.ask(
            "GET", url, headers=self._headers, timeout_s=_TIMEOUT_S
        ) as answer:
            body = await answer.whole(MAX_REPORT_BYTES)
            if answer.status != 200:
                raise Broken(f"status {answer.status}: {body[:200]!r}")
            return read_report(body)
