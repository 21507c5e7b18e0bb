"""Adapters of the registry as requests meet them: found by name, made known to the engine once."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from loramux.adapters.identity import CID_PREFIX
from loramux.backend import AdapterCard, Backend
from loramux.errors import AdapterNotFound, InvalidRequest, StoreDamaged
from loramux.registry.names import NAME, AdapterName, Reference
from loramux.registry.records import Resolved
from loramux.registry.registry import Registry, RouteCache
from loramux.registry.watch import DEFAULT_POLL_S, Watch
from loramux.store.library import AdapterLibrary

_log = logging.getLogger(__name__)


class RegistryAdapters:
    """Belongs to one event loop; queries and files are for threads."""

    def __init__(self, library: AdapterLibrary) -> None:
        self.library = library
        self._routes = RouteCache(library.registry)
        self._adding: dict[str, asyncio.Task[AdapterCard]] = {}
        self._restoring: dict[str, asyncio.Task[Path]] = {}
        self._names: dict[str, str] = {}
        self._labels: dict[str, dict[str, None]] = {}
        self._watch: Watch | None = None
        self._follower: threading.Thread | None = None

    @property
    def registry(self) -> Registry:
        return self.library.registry

    def start(self, *, poll_s: float = DEFAULT_POLL_S) -> None:
        """From now on what others change is served on the next request."""
        self._watch = self.registry.watch(poll_s=poll_s)
        self._follower = threading.Thread(target=self._follow, args=(self._watch,), daemon=True)
        self._follower.start()

    def close(self) -> None:
        if self._watch is not None and self._follower is not None:
            self._watch.close()
            self._follower.join()

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        self._routes.forget(adapters)

    def name_of(self, cid: str) -> str:
        """What it was last asked for as, with its version."""
        return self._names.get(cid, cid)

    def labels_of(self, name: str) -> tuple[str, ...]:
        """What metrics call an adapter of the engine: all that it was asked for as."""
        return tuple(self._labels.get(name, ())) or (name,)

    async def resolve(
        self, text: str, *, sticky_key: str | None = None, tenant: str = ""
    ) -> Resolved:
        """A bare name is looked for in the tenant, if there is one, and then at home."""
        if tenant and "/" not in text and NAME.fullmatch(tenant):
            try:
                return await self._resolve(text, sticky_key, tenant)
            except AdapterNotFound:
                pass
        return await self._resolve(text, sticky_key, None)

    def find_all(self, text: str) -> list[Resolved]:
        """Every version that the text may mean: both sides of a split. Queries: for threads."""
        route = self.registry.route(self._parse(text, None))
        return [choice.resolved for choice in route.choices]

    async def make_known(self, backend: Backend, resolved: Resolved) -> None:
        """To the engine, under its CID; however many ask, it is added once."""
        cid = resolved.cid
        self._labels.setdefault(cid, {})[label_of(resolved)] = None
        if resolved.name is not None:
            self._names[cid] = f"{resolved.tenant}/{resolved.name}@{resolved.version}"
        if cid in backend.adapters:
            return
        task = self._adding.get(cid)
        if task is None:
            task = self._adding[cid] = asyncio.create_task(self._add(backend, cid))
            task.add_done_callback(lambda done: self._added(cid, done))
        # Others may wait for it too: who leaves does not take it along.
        await asyncio.shield(task)

    async def restore(self, name: str) -> bool:
        """The engine could not load it. True: it is the registry's, and its files are there now.

        However many ask, what is missing is fetched once.
        """
        if not name.startswith(CID_PREFIX):
            return False
        task = self._restoring.get(name)
        if task is None:
            work = asyncio.to_thread(self.library.materialize, name)
            task = self._restoring[name] = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._restored(name, done))
        await asyncio.shield(task)
        return True

    def list_current(self, *, limit: int) -> list[Resolved]:
        """What each adapter's bare name means now. Queries: for threads."""
        found = []
        for name in islice(self.registry.adapters(), limit):
            try:
                found.append(self._routes.resolve(str(name), sticky_key=""))
            # Removed since it was listed.
            except AdapterNotFound:
                continue
        return found

    async def _resolve(self, text: str, sticky_key: str | None, home: str | None) -> Resolved:
        reference = self._parse(text, home)
        route = self._routes.peek(reference)
        if route is not None:
            return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)
        try:
            return await asyncio.to_thread(
                self._routes.resolve, text, sticky_key=sticky_key, home_tenant=home
            )
        except InvalidRequest as error:
            raise await asyncio.to_thread(self._ambiguous, reference) from error

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

    async def _add(self, backend: Backend, cid: str) -> AdapterCard:
        folder = await asyncio.to_thread(self.library.materialize, cid)
        card = await backend.add_adapter(cid, str(folder))
        if card.cid != cid:
            await backend.remove_adapter(cid)
            raise StoreDamaged(f"The store's files of {cid} are those of {card.cid}.")
        return card

    def _added(self, cid: str, task: asyncio.Task[AdapterCard]) -> None:
        del self._adding[cid]
        # Looked at, so that a failure which nobody waits for any more is not reported as lost.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s cannot be served: %s", self.name_of(cid), error)

    def _restored(self, cid: str, task: asyncio.Task[Path]) -> None:
        del self._restoring[cid]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s cannot be served: %s", self.name_of(cid), error)

    def _follow(self, watch: Watch) -> None:
        for names in watch:
            self.forget(names)


def label_of(resolved: Resolved) -> str:
    """The adapter, whatever its version; a content id alone has no name."""
    return resolved.cid if resolved.name is None else f"{resolved.tenant}/{resolved.name}"
