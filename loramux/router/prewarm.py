"""Warms a replica that joined or restarted with what the hash makes its own."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from loramux.router.fleet import Fleet, Replica, State
from loramux.router.upstream import Broken, Unreachable, Upstream
from loramux.types.residency import Tier, key_of_cid

_log = logging.getLogger(__name__)
MAX_BUSIEST = 256
"""Adapters of the fleet that are considered."""
MAX_WARMED = 64
_MAX_COUNTED = 16_384
_TIMEOUT_S = 120.0


class Prewarmer:
    """Counts which adapters the fleet answers for, and loads the busiest of them where they belong.

    The counts are halved now and then, so that old traffic is forgotten.
    """

    def __init__(self, fleet: Fleet, upstream: Upstream, *, api_key: str | None = None) -> None:
        """`api_key`: needs the scope push."""
        self._fleet = fleet
        self._upstream = upstream
        self._headers = [("content-type", "application/json")]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._uses: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def used(self, name: str, cids: str) -> None:
        """Count an answer; `cids` are joined by commas, and empty for the base."""
        for cid in filter(None, cids.split(",")):
            self._uses[cid] = self._uses.get(cid, 0) + 1
            if "," not in cids and "\0" not in name:
                self._names[cid] = name
        if len(self._uses) > _MAX_COUNTED:
            self._uses = {cid: n // 2 for cid, n in self._uses.items() if n > 1}
            self._names = {cid: name for cid, name in self._names.items() if cid in self._uses}

    def missing(self, replica: Replica, now: float) -> list[str]:
        """Return the CIDs that belong on a replica and are not in its memory, busiest first."""
        busiest = sorted(self._uses, key=lambda cid: -self._uses[cid])[:MAX_BUSIEST]
        return [
            cid
            for cid in busiest
            if replica in self._fleet.homes_of((key_of_cid(cid),), now=now, count=1)
            and replica.tiers.get(key_of_cid(cid), Tier.SOURCE) < Tier.HOST
        ][:MAX_WARMED]

    async def warm(self, replica: Replica) -> int:
        """Load what is missing, one after another; return how many were loaded."""
        num_loaded = 0
        for cid in self.missing(replica, time.monotonic()):
            if replica.state is not State.READY:
                break
            status = await self._load(replica, self._names.get(cid, cid))
            if status in (401, 403):
                _log.warning("%s is not pre-warmed: the key needs the scope push", replica.name)
                break
            num_loaded += status == 200
        if num_loaded:
            _log.info("%s is pre-warmed with %d adapters", replica.name, num_loaded)
        return num_loaded

    async def _load(self, replica: Replica, name: str) -> int:
        """Return the status; 0: there was no answer."""
        url = f"{replica.url}/v1/adapters/{quote(name, safe='/@')}/warm"
        try:
            async with self._upstream.ask(
                "POST", url, headers=self._headers, body=b"{}", timeout_s=_TIMEOUT_S
            ) as answer:
                await answer.whole()
                return answer.status
        except (Unreachable, Broken):
            return 0
