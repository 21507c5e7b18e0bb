"""Names, versions and aliases of adapters -> content ids; statistics and receipts beside them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from loramux.adapters.identity import parse_cid
from loramux.errors import AdapterNotFound
from loramux.registry.changes import Change
from loramux.registry.database import Database
from loramux.registry.names import (
    DEFAULT_TENANT,
    AdapterName,
    NameReference,
    Reference,
    check_alias,
    parse_adapter_name,
    parse_name_reference,
    parse_push_reference,
    parse_reference,
    parse_version,
)
from loramux.registry.records import (
    AdapterInfo,
    AliasAction,
    AliasState,
    Content,
    Receipt,
    ReceiptFilter,
    Resolved,
    Target,
    Usage,
    Use,
    VersionInfo,
)
from loramux.registry.resolve import Route, check_targets, find_route
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from loramux.registry.rows import receipts as receipt_rows
from loramux.registry.rows import usage as usage_rows
from loramux.registry.verify import find_faults
from loramux.registry.watch import DEFAULT_POLL_S, Watch


class Registry:
    """Safe to use from any thread. Every change is one transaction, whole or not at all.

    Adapters are named as texts: `name` (of the home tenant) or `tenant/name`.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        home_tenant: str = DEFAULT_TENANT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A path means a SQLite file. The schema is made or upgraded."""
        self._home_tenant = home_tenant
        self._clock = clock
        self._database = Database(url)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Versions

    def push(self, reference: str, content: Content) -> tuple[VersionInfo, bool]:
        """The version, and whether it is new; without a number the next free one is taken.

        The same bytes again are fine. Raises RegistryConflict for other bytes.
        """
        parsed = parse_push_reference(reference, home_tenant=self._home_tenant)
        parse_cid(content.cid)
        version = None if parsed.version is None else str(parsed.version)
        with self._changing() as change:
            return change.push(parsed.adapter, version, content)

    def remove(self, reference: str) -> None:
        """A version, an alias, or the adapter with all of both."""
        parsed = self._parse_name(reference)
        with self._changing() as change:
            if parsed.version is not None:
                change.remove_version(parsed.adapter, str(parsed.version))
            elif parsed.alias is not None:
                change.remove_alias(parsed.adapter, check_alias(parsed.alias), if_revision=None)
            else:
                change.remove_adapter(parsed.adapter)

    # Aliases; `if_revision`: RegistryConflict unless the alias is still at this revision

    def promote(
        self, adapter: str, version: str, *, alias: str, if_revision: int | None = None
    ) -> AliasState:
        targets = (Target(str(parse_version(version))),)
        return self._move(adapter, alias, targets, AliasAction.PROMOTE, if_revision)

    def split(
        self,
        adapter: str,
        weights: Mapping[str, int],
        *,
        alias: str,
        if_revision: int | None = None,
    ) -> AliasState:
        """Weights such as {"1.4.2": 90, "1.5.0": 10}."""
        named = [(str(parse_version(version)), weight) for version, weight in weights.items()]
        targets = check_targets(named)
        return self._move(adapter, alias, targets, AliasAction.SPLIT, if_revision)

    def rollback(self, adapter: str, *, alias: str, if_revision: int | None = None) -> AliasState:
        """To the state before; once more: to the one before that."""
        name = self._parse_adapter(adapter)
        with self._changing() as change:
            return change.rollback(name, check_alias(alias), if_revision=if_revision)

    def previous(self, adapter: str, *, alias: str) -> tuple[AliasState, AliasState]:
        """What the alias is now, and what a rollback would make it."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.get_adapter(connection, name)
            found = alias_rows.current_and_previous(connection, name, row.id, check_alias(alias))
            current, previous = map(alias_rows.alias_state, found)
            return current, previous

    def history(self, adapter: str, *, alias: str) -> list[AliasState]:
        """Newest first."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.get_adapter(connection, name)
            return alias_rows.alias_history(connection, row.id, check_alias(alias))

    # Questions

    def resolve(
        self, reference: str, *, sticky_key: str | None = None, home_tenant: str | None = None
    ) -> Resolved:
        """The same sticky key always gets the same side of a split; none: a side by chance."""
        route = self.route(self.parse(reference, home_tenant=home_tenant))
        return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)

    def route(self, reference: Reference) -> Route:
        with self._database.reading() as connection:
            return find_route(connection, reference)

    def parse(self, reference: str, *, home_tenant: str | None = None) -> Reference:
        return parse_reference(reference, home_tenant=home_tenant or self._home_tenant)

    def adapters(self, *, tenant: str | None = None) -> list[AdapterName]:
        with self._database.reading() as connection:
            return adapter_rows.list_adapters(connection, tenant)

    def show(self, adapter: str) -> AdapterInfo:
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.get_adapter(connection, name)
            return AdapterInfo(
                adapter=name,
                latest=row.latest,
                versions=tuple(adapter_rows.list_versions(connection, name)),
                aliases=tuple(alias_rows.list_aliases(connection, row.id)),
                revision=row.revision,
            )

    def manifest(self, cid: str) -> Mapping[str, object]:
        with self._database.reading() as connection:
            manifest = adapter_rows.get_manifest(connection, cid)
        if manifest is None:
            raise AdapterNotFound(f"The registry has never known {cid}.")
        return manifest

    def cids(self) -> set[str]:
        """All that some version names."""
        with self._database.reading() as connection:
            return adapter_rows.named_cids(connection)

    def cids_of(self, adapter: str) -> set[str]:
        """All that the adapter's versions ever named: what its receipts are found by."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.find_adapter(connection, name)
            if row is None:
                raise AdapterNotFound(f"No adapter {name} was ever in the registry.")
            return adapter_rows.cids_of(connection, row.id)

    def names_of(self, cid: str) -> list[tuple[AdapterName, str]]:
        """Every (adapter, version) with this content."""
        with self._database.reading() as connection:
            return adapter_rows.names_of(connection, cid)

    def sources_of(self, cid: str) -> list[str]:
        """Where its versions came from, the newest first."""
        with self._database.reading() as connection:
            return adapter_rows.sources_of(connection, cid)

    def verify(self) -> tuple[str, ...]:
        """A sentence for each rule of the registry that its rows break."""
        with self._database.reading() as connection:
            return tuple(find_faults(connection))

    def watch(self, *, poll_s: float = DEFAULT_POLL_S) -> Watch:
        """The adapters that change from now on."""
        return Watch(self._database, poll_s=poll_s)

    # Statistics

    def add_uses(self, uses: Iterable[Use]) -> None:
        with self._database.writing() as connection:
            usage_rows.add_uses(connection, uses)

    def usage(self, cid: str) -> Usage | None:
        with self._database.reading() as connection:
            return usage_rows.get_usage(connection, cid)

    def most_used(self, *, limit: int, since: float = 0.0) -> list[Usage]:
        with self._database.reading() as connection:
            return usage_rows.most_used(connection, limit=limit, since=since)

    def used_since(self, since: float) -> set[str]:
        with self._database.reading() as connection:
            return usage_rows.used_since(connection, since)

    # Receipts

    def add_receipts(self, receipts: Iterable[Receipt]) -> None:
        with self._database.writing() as connection:
            receipt_rows.add_receipts(connection, receipts)

    def receipt(self, receipt_id: str) -> Receipt | None:
        with self._database.reading() as connection:
            return receipt_rows.get_receipt(connection, receipt_id)

    def find_receipts(self, wanted: ReceiptFilter) -> list[Receipt]:
        with self._database.reading() as connection:
            return receipt_rows.find_receipts(connection, wanted)

    def receipt_cids(self) -> set[str]:
        """All that a receipt which is still kept names."""
        with self._database.reading() as connection:
            return receipt_rows.receipt_cids(connection)

    def prune_receipts(
        self, *, max_age_s: float | None = None, max_count: int | None = None
    ) -> int:
        """How many were removed."""
        older_than = None if max_age_s is None else self._clock() - max_age_s
        with self._database.writing() as connection:
            return receipt_rows.prune_receipts(
                connection, older_than=older_than, max_count=max_count
            )

    def _move(
        self,
        adapter: str,
        alias: str,
        targets: tuple[Target, ...],
        action: AliasAction,
        if_revision: int | None,
    ) -> AliasState:
        name = self._parse_adapter(adapter)
        check_alias(alias)
        with self._changing() as change:
            return change.move_alias(name, alias, targets, action=action, if_revision=if_revision)

    @contextmanager
    def _changing(self) -> Iterator[Change]:
        with self._database.writing() as connection:
            yield Change(connection, adapter_rows.begin_change(connection), self._clock())

    def _parse_name(self, reference: str) -> NameReference:
        return parse_name_reference(reference, home_tenant=self._home_tenant)

    def _parse_adapter(self, adapter: str) -> AdapterName:
        return parse_adapter_name(adapter, home_tenant=self._home_tenant)


MAX_ROUTES = 100_000


class RouteCache:
    """Whoever watches the registry calls forget() with what changed. Misses are not kept."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._routes: dict[Reference, Route] = {}
        self._num_changes = 0
        self._lock = threading.Lock()

    def resolve(
        self, reference: str, *, sticky_key: str | None = None, home_tenant: str | None = None
    ) -> Resolved:
        route = self._route(self._registry.parse(reference, home_tenant=home_tenant))
        return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)

    def peek(self, reference: Reference) -> Route | None:
        """Without a query."""
        return self._routes.get(reference)

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        changed = set(adapters)
        with self._lock:
            self._num_changes += 1
            # A content id has no adapter: any change may end it, or make its prefix ambiguous.
            self._routes = {
                reference: route
                for reference, route in self._routes.items()
                if route.adapter is not None and route.adapter not in changed
            }

    def _route(self, reference: Reference) -> Route:
        route = self._routes.get(reference)
        if route is not None:
            return route
        before = self._num_changes
        route = self._registry.route(reference)
        with self._lock:
            # What was read before a change must not outlive it.
            if before == self._num_changes and len(self._routes) < MAX_ROUTES:
                self._routes[reference] = route
        return route
