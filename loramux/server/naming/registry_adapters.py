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
from loramux.base.threads import QUERIES, STORE_READS
from loramux.errors import AdapterNotFound, InvalidRequest
from loramux.registry.access import NO_ACCESS, AccessSnapshot
from loramux.registry.names import (
    AdapterName,
    CidReference,
    NameReference,
    Reference,
    parse_version,
)
from loramux.registry.records import Resolved
from loramux.registry.registry import Registry, RouteCache
from loramux.registry.watch import DEFAULT_POLL_S, Watch
from loramux.server.auth.quotas import SECONDS, QuotaTable
from loramux.server.naming.view import WHOLE_VIEW, View
from loramux.store.library import AdapterLibrary

_log = logging.getLogger(__name__)


class RegistryAdapters:
    """Serves one event loop; its database queries and file accesses run on threads."""

    def __init__(self, library: AdapterLibrary) -> None:
        self.library = library
        self.quotas = QuotaTable()
        """The limits that the registry records of tenants and keys."""
        self.access: AccessSnapshot = NO_ACCESS
        """The keys and shares of the registry."""
        self._routes = RouteCache(library.registry)
        self._materializing: dict[str, asyncio.Task[Path]] = {}
        self._watch: Watch | None = None
        self._follower: threading.Thread | None = None

    @property
    def registry(self) -> Registry:
        return self.library.registry

    @property
    def revision(self) -> int:
        """The revision up to which this server has dropped all names that were changed."""
        return 0 if self._watch is None else self._watch.handled

    def start(self, *, poll_s: float = DEFAULT_POLL_S) -> None:
        """Start to follow changes that other processes make to the registry."""
        self._watch = self.registry.watch(poll_s=poll_s, on_access=self.follow_access)
        # Read after the watch has begun, so that no change is missed.
        self.follow_access()
        self._follower = threading.Thread(target=self._follow, args=(self._watch,), daemon=True)
        self._follower.start()

    def follow_access(self) -> None:
        """Read keys, shares, and the limits of tenants and keys; it queries the database."""
        self.access = self.registry.access.snapshot()
        self.quotas.replace(*self.registry.tenants.rate_limits())

    def recall_use(self, pool_id: str) -> None:
        """Charges what this server's receipts say was used in the minute before its start."""
        self.quotas.recall(self.registry.recent_use(pool_id=pool_id, seconds=SECONDS))

    def close(self) -> None:
        if self._watch is not None and self._follower is not None:
            self._watch.close()
            self._follower.join()

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        self._routes.forget(adapters)

    async def resolve(
        self, text: str, *, sticky_key: str | None = None, view: View = WHOLE_VIEW
    ) -> Resolved:
        """Look a bare name up in the caller's tenant, and then in the home tenant.

        Raises AdapterNotFound also for what the caller does not see, without looking it up.
        """
        missing = AdapterNotFound(f"No adapter {text} is in the registry.")
        for home in view.homes(text):
            reference = self._parse(text, home)
            if isinstance(reference, CidReference) and not view.is_whole:
                return await self._resolve_cid(reference, view)
            if isinstance(reference, NameReference) and not view.allows(reference):
                continue
            try:
                found = await self._resolve(reference, sticky_key)
            except AdapterNotFound as error:
                missing = error
                continue
            if not view.has_parts(found.recipe, found.tenant):
                raise AdapterNotFound(f"A part of {text} is not shared with {found.tenant}.")
            return found
        raise missing

    def find_all(self, text: str) -> list[Resolved]:
        """Return every version that the reference may select, for a split alias all of them.

        It queries the database: call it on a thread.
        """
        route = self.registry.route(self._parse(text, None))
        return [choice.resolved for choice in route.choices]

    async def materialize(self, cid: str) -> Path:
        """Return the folder with the adapter's files; missing ones are fetched.

        Concurrent callers for one adapter share the work.
        """
        task = self._materializing.get(cid)
        if task is None:
            work = STORE_READS.run(self.library.materialize, cid)
            task = self._materializing[cid] = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._materialized(cid, done))
        return await asyncio.shield(task)

    def names_in(self, view: View, *, limit: int) -> list[AdapterName]:
        """Return the adapters in the view; it queries the database: call it on a thread."""
        if view.is_confined:
            names = [*self.registry.adapters(tenant=view.tenant), *view.shared_adapters()]
        else:
            names = self.registry.adapters()
        return list(islice((one for one in names if view.allows(NameReference(one))), limit))

    def list_current(self, view: View, *, limit: int) -> list[Resolved]:
        """Return the version that the bare name of each adapter in the view means now.

        It queries the database: call it on a thread.
        """
        found = []
        for name in self.names_in(view, limit=limit):
            try:
                found.append(self._routes.resolve(str(name), sticky_key=""))
            except AdapterNotFound:  # It was removed after it was listed.
                continue
        return found

    async def _resolve_cid(self, reference: CidReference, view: View) -> Resolved:
        """Find a content id among the versions that the caller sees."""
        tenant = view.tenant if view.is_confined else None
        versions = await QUERIES.run(self.registry.find_cid, reference, tenant)
        seen = [
            resolved
            for name, resolved in versions
            if view.allows(NameReference(name, parse_version(resolved.version or "")))
            and view.has_parts(resolved.recipe, name.tenant)
        ]
        if not seen:
            raise AdapterNotFound(f"No version in the registry has the content id {reference}.")
        num_found = len({resolved.cid for resolved in seen})
        if num_found > 1:
            raise InvalidRequest(
                f"{num_found} content ids begin with {reference}. Give more digits."
            )
        recipe = seen[0].recipe
        return Resolved(
            cid=seen[0].cid,
            recipe=None if recipe is None else recipe.without_names(),
            modality=seen[0].modality,
        )

    async def _resolve(self, reference: Reference, sticky_key: str | None) -> Resolved:
        sticky_key = secrets.token_hex(16) if sticky_key is None else sticky_key
        route = self._routes.peek(reference)
        if route is not None:
            return route.choose(sticky_key)
        try:
            return (await QUERIES.run(self._routes.route, reference)).choose(sticky_key)
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
