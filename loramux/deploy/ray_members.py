"""Which replicas there are, from Ray."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

from ray.serve.request_router import RequestRouter

from loramux.deploy import member_table
from loramux.deploy.member_table import Member

_LOOK_S = 0.05
_CONNECT_S = 1.0


class FollowingRouter(RequestRouter):
    """Sees the replicas in each process that has a handle to them; it chooses for calls only."""

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        found = {}
        for one in replicas:
            told = one.replica_metadata
            if "url" in told:
                found[one.replica_id.unique_id] = Member(told["url"], told["build"])
        member_table.TABLE.replace(found)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        member_table.TABLE.died(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        return [candidate_replicas]


class RayMembers:
    """The replicas that Ray names, and those that it no longer names but that still listen.

    Ray leaves a replica out while it changes its adapters, and as soon as it is to stop; its own
    report says what it does. Names are URLs: a successor takes the port of its predecessor.
    """

    def __init__(self, table: member_table.MemberTable = member_table.TABLE) -> None:
        self._table = table
        self._seen = -1

    async def current(self) -> dict[str, str]:
        self._seen = self._table.version
        gone = list(self._table.gone())
        listening = await asyncio.gather(*map(_is_listening, gone))
        for url, is_listening in zip(gone, listening, strict=True):
            if not is_listening:
                self._table.forget(url)
        urls = {**self._table.running(), **self._table.gone()}
        return {url: url for url in urls}

    async def changed(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._table.version == self._seen and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)


async def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
