"""Names of a registry, resolved by the router so that all replicas serve the same version.

During a roll-out replicas follow the registry at slightly different times. A request that names its
version means the same on each of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace

import msgspec

from loramux.base.threads import QUERIES
from loramux.errors import LoramuxError
from loramux.registry.access import NO_ACCESS, AccessSnapshot
from loramux.registry.keys import parse_key
from loramux.registry.names import AdapterName, NameReference
from loramux.registry.records import Resolved
from loramux.registry.registry import Registry, RouteCache
from loramux.registry.watch import DEFAULT_POLL_S, Watch
from loramux.router.asked import Asked, credentials
from loramux.router.fleet import Fleet

_log = logging.getLogger(__name__)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS = msgspec.json.Decoder(list[str])
_TEXT = msgspec.json.Decoder(str)


class RegistryNames:
    """Adds versions to full names of the registry; used as an asynchronous context.

    A name is resolved only if the caller may use it. Every other request is passed as it came, so
    that its answer does not tell whether a foreign adapter exists.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        api_key: str | None = None,
        tenant_header: str | None = None,
        poll_s: float = DEFAULT_POLL_S,
    ) -> None:
        """`api_key`: one that opens every route of the servers.

        `tenant_header`: the servers' setting. Requests with the header are passed as they came.
        """
        self._registry = registry
        self._routes = RouteCache(registry)
        self._api_key = api_key
        self._tenant_header = (tenant_header or "").lower()
        self._poll_s = poll_s
        self._access: AccessSnapshot = NO_ACCESS
        self._watch: Watch | None = None
        self._follower: threading.Thread | None = None

    @property
    def revision(self) -> int:
        """The revision up to which this router has dropped all names that were changed."""
        return 0 if self._watch is None else self._watch.handled

    async def __aenter__(self) -> RegistryNames:
        await QUERIES.run(self._start)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watch is not None and self._follower is not None:
            self._watch.close()
            await asyncio.to_thread(self._follower.join)
        self._registry.close()

    async def resolve(self, asked: Asked, fleet: Fleet) -> Asked:
        """Return the request with versions in place of aliases, and tell the fleet their CIDs."""
        if asked.method != "POST" or not asked.is_repeatable or "/" not in asked.name:
            return asked
        try:
            fields = _FIELDS.decode(asked.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return asked
        found: dict[str, Resolved | None] = {}
        changed = {}
        for field in ("model", "artifact", "adapters"):
            if field in fields:
                changed[field] = await self._field(fields[field], asked, found)
        names = {text: one for text, one in found.items() if one is not None}
        if not names:
            return asked
        for one in names.values():
            if one.recipe is None:
                fleet.learn(_exact(one), one.cid)
        body = msgspec.json.encode(fields | changed)
        parts = [_exact(names[p]) if p in names else p for p in asked.name.split("+")]
        return replace(asked, body=body, name="+".join(parts))

    async def _field(
        self, raw: msgspec.Raw, asked: Asked, found: dict[str, Resolved | None]
    ) -> object:
        """Return the value of a field with exact names, or as it was."""
        try:
            if bytes(raw).lstrip()[:1] == b"[":
                return [await self._text(text, asked, found) for text in _TEXTS.decode(raw)]
            return await self._text(_TEXT.decode(raw), asked, found)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw

    async def _text(self, text: str, asked: Asked, found: dict[str, Resolved | None]) -> str:
        if text not in found:
            found[text] = await self._find(text, asked)
        resolved = found[text]
        return text if resolved is None else _exact(resolved)

    async def _find(self, text: str, asked: Asked) -> Resolved | None:
        """Return None for what has a version, is unknown, is split, or is not the caller's."""
        try:
            reference = self._registry.parse(text)
        except LoramuxError:
            return None
        if not isinstance(reference, NameReference) or reference.version or "/" not in text:
            return None
        if not self._may_use(reference.adapter, asked):
            return None
        try:
            route = self._routes.peek(reference)
            if route is None:
                route = await QUERIES.run(self._routes.route, reference)
        except LoramuxError:
            # The replica says what is wrong, or knows more.
            return None
        # The replicas choose a version of a split alias by rules of their own.
        return route.choices[0].resolved if len(route.choices) == 1 else None

    def _may_use(self, adapter: AdapterName, asked: Asked) -> bool:
        """Decides by the name and the caller alone, before anything is looked up."""
        if self._tenant_header and asked.header(self._tenant_header):
            return False
        given = credentials(asked.headers)
        if not given or given == {self._api_key}:
            return True
        key = parse_key(next(iter(given))) if len(given) == 1 else None
        record = None if key is None else self._access.keys.get(key[0])
        if key is None or record is None or not record.opens(key[1], now=time.time()):
            return False
        rights = record.rights
        if rights.adapters is not None:
            return False
        is_own = rights.tenant in (None, adapter.tenant)
        return is_own or self._access.is_shared(adapter, rights.tenant or "", None)

    def _start(self) -> None:
        self._watch = self._registry.watch(poll_s=self._poll_s, on_access=self._follow_access)
        # Read after the watch has begun, so that no change is missed.
        self._follow_access()
        self._follower = threading.Thread(target=self._follow, args=(self._watch,), daemon=True)
        self._follower.start()

    def _follow_access(self) -> None:
        self._access = self._registry.access.snapshot()

    def _follow(self, watch: Watch) -> None:
        for names in watch:
            self._routes.forget(names)


def _exact(resolved: Resolved) -> str:
    return f"{resolved.tenant}/{resolved.name}@{resolved.version}"
