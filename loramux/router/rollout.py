"""Rolls a version out: warm where it will be used, promote once, wait until all replicas follow.

WARMING -> PROMOTED -> SETTLED; a warm that fails ends it, and the alias stays as it was.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from loramux.router.answers import Whole, error_answer, json_answer
from loramux.router.asked import Asked
from loramux.router.fleet import Fleet, Replica, State
from loramux.router.relay import Relay

_PREFIX = "/v1/adapters/"
_CHANGES = ("/promote", "/rollback", "/split")
REVISION_HEADER = b"x-loramux-revision"
# A replica that has not followed by then is reported as behind.
_SETTLE_S = 15.0
_LOOK_S = 0.05


class RollOut:
    def __init__(
        self, fleet: Fleet, relay: Relay, *, own_revision: Callable[[], int] | None = None
    ) -> None:
        """`own_revision`: the revision of the registry that this router itself follows."""
        self._fleet = fleet
        self._own_revision = own_revision
        self._relay = relay

    def handles(self, asked: Asked) -> bool:
        if asked.method != "POST" or not asked.path.startswith(_PREFIX):
            return False
        return asked.path.endswith(("/warm", *_CHANGES))

    async def answer(self, asked: Asked) -> Whole:
        name, _, action = asked.path.removeprefix(_PREFIX).rpartition("/")
        if action == "warm":
            return await self._warm(asked, name)
        try:
            body = json.loads(asked.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            # The replica says what is wrong with it.
            return await self._change(asked)
        if body.get("warm") is True and action in ("promote", "split"):
            versions = [body.get("version")] if action == "promote" else body.get("weights") or []
            for version in versions:
                warmed = await self._warm(asked, f"{name}@{version}")
                if warmed.status != 200:
                    return warmed
            body["warm"] = False
            asked = replace(asked, body=json.dumps(body).encode())
        changed = await self._change(asked)
        if changed.status != 200:
            return changed
        return await self._settled(changed, name, str(body.get("alias", "prod")))

    async def _warm(self, asked: Asked, name: str) -> Whole:
        """Load an adapter where its hash places it and where it is; stop at a failure."""
        target = f"{_PREFIX}{quote(unquote(name), safe='/@')}/warm"
        warm = replace(asked, method="POST", target=target, path=target, body=b"{}")
        entry: dict[str, Any] = {}
        replicas: dict[str, str] = {}
        while (replica := self._next_to_warm(name, replicas)) is not None:
            told = await self._relay.ask(warm, replica)
            if told.status != 200:
                return told
            found = json.loads(told.body)
            entry = entry or found
            replicas[replica.id] = found.get("tier", "device")
            if found.get("cid"):
                # Its places follow from its CID from now on.
                self._fleet.learn(name, found["cid"], base_digest=replica.base_digest)
        if not replicas:
            return error_answer(503, "No replica is ready.")
        return json_answer(entry | {"replicas": replicas})

    def _next_to_warm(self, name: str, warmed: dict[str, str]) -> Replica | None:
        now = time.monotonic()
        places = self._fleet.homes(name, now=now) + self._fleet.holders(name, now=now)
        return next((one for one in places if one.id not in warmed), None)

    async def _change(self, asked: Asked) -> Whole:
        """Asks one replica: the registry is shared."""
        for replica in self._fleet.usable(time.monotonic()):
            answer = await self._relay.ask(asked, replica)
            if answer.status != 503:
                return answer
        return error_answer(503, "No replica is ready.")

    async def _settled(self, changed: Whole, name: str, alias: str) -> Whole:
        """Wait until all ready replicas have dropped what the names meant before."""
        told = json.loads(changed.body)
        revision = int(changed.header(REVISION_HEADER) or 0)
        deadline = time.monotonic() + _SETTLE_S
        while (behind := self._is_behind(revision)) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        names = (f"{name}@{alias}", name) if alias == "prod" else (f"{name}@{alias}",)
        targets = list(told.get("targets", {}))
        if len(targets) == 1:
            keys = self._fleet.keys_of(f"{name}@{targets[0]}")
            self._fleet.move(names, keys)
        state = {one.id: one.revision for one in self._fleet.replicas.values()}
        told |= {"settled": not behind, "registry_revision": revision, "replicas": state}
        return json_answer(told)

    def _is_behind(self, revision: int) -> bool:
        if self._own_revision is not None and self._own_revision() < revision:
            return True
        replicas = self._fleet.replicas.values()
        ready = [r for r in replicas if r.state in (State.READY, State.DRAINING)]
        return any(replica.revision < revision for replica in ready)
