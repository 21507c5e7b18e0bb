"""Resolves references to adapters of the registry, and provides their files."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from loramux.adapters.identity import CID_PREFIX
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.names import NAME, AdapterName, Reference
from loramux.registry.records import Resolved
from loramux.registry.registry import Registry, RouteCache
from loramux.registry.watch import DEFAULT_POLL_S, Watch
from loramux.store.library import AdapterLibrary
from loramux.threads import QUERIES, STORE_READS

_log = logging.getLogger(__name__)


class RegistryAdapters:
    """Serves one event loop; its database queries and file accesses run on threads."""

    def __init__(self, library: AdapterLibrary) -> None:
        self.library = library
        self._routes = RouteCache(library.registry)
        self._materializing: dict[str, asyncio.Task[Path]] = {}
        self._watch: Watch | None = None
        self._follower: threading.Thread | None = None

    @property
    def registry(self) -> Registry:
        return self.library.registry

    def start(self, *, poll_s: float = DEFAULT_POLL_S) -> None:
        """Starts to follow changes that other processes make to the registry."""
        self._watch = self.registry.watch(poll_s=poll_s)
        self._follower = threading.Thread(target=self._follow, args=(self._watch,), daemon=True)
        self._follower.start()

    def close(self) -> None:
        if self._watch is not None and self._follower is not None:
            self._watch.close()
            self._follower.join()

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        self._routes.forget(adapters)

    async def resolve(
        self, text: str, *, sticky_key: str | None = None, tenant: str = ""
    ) -> Resolved:
        """Looks a bare name up in the given tenant, if any, and then in the home tenant."""
        if tenant and "/" not in text and NAME.fullmatch(tenant):
            try:
                return await self._resolve(text, sticky_key, tenant)
            except AdapterNotFound:
                pass
        return await self._resolve(text, sticky_key, None)

    def find_all(self, text: str) -> list[Resolved]:
        """Returns every version that the reference may select, for a split alias all of them.

        It queries the database: call it on a thread.
        """
        route = self.registry.route(self._parse(text, None))
        return [choice.resolved for choice in route.choices]

    async def materialize(self, cid: str) -> Path:
        """Returns the folder with the adapter's files; missing ones are fetched.

        Concurrent callers for one adapter share the work.
        """
        task = self._materializing.get(cid)
        if task is None:
            work = STORE_READS.run(self.library.materialize, cid)
            task = self._materializing[cid] = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._materialized(cid, done))
        return await asyncio.shield(task)

    def list_current(self, *, limit: int) -> list[Resolved]:
        """Returns the version that each adapter's bare name means now.

        It queries the database: call it on a thread.
        """
        found = []
        for name in islice(self.registry.adapters(), limit):
            try:
                found.append(self._routes.resolve(str(name), sticky_key=""))
            except AdapterNotFound:  # It was removed after it was listed.
                continue
        return found

    async def _resolve(self, text: str, sticky_key: str | None, home: str | None) -> Resolved:
        reference = self._parse(text, home)
        route = self._routes.peek(reference)
        if route is not None:
            return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)
        try:
            return await QUERIES.run(
                self._routes.resolve, text, sticky_key=sticky_key, home_tenant=home
            )
        except InvalidRequest as error:
            raise await QUERIES.run(self._ambiguous, reference) from error

    def _parse(self, text: str, home: str | None) -> Reference:
        try:
            return self.registry.parse(text, home_tenant=home)
        except InvalidRequest as error:
            if text.startswith(CID_PREFIX):
                raise
            raise AdapterNotFound(str(error)) from error

    def _ambiguous(self, reference: Reference) -> InvalidRequest:
        start = str(reference)
        num_found = sum(cid.startswith(start) for cid in self.registry.cids())
        return InvalidRequest(f"{num_found} content ids begin with {start}. Give more digits.")

    def _materialized(self, cid: str, task: asyncio.Task[Path]) -> None:
        del self._materializing[cid]
        # Reading the exception keeps asyncio from reporting it as never retrieved.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the files of %s cannot be read: %s", cid, error)

    def _follow(self, watch: Watch) -> None:
        for names in watch:
            self.forget(names)
