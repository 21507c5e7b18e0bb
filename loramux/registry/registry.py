"""The registry: maps names, versions and aliases to CIDs; keeps statistics and receipts."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from loramux.adapters.identity import parse_cid
from loramux.adapters.recipe import CombinationOptions
from loramux.errors import AdapterNotFound, LoramuxError, RegistryUnavailable
from loramux.registry.access import AccessRecords
from loramux.registry.audit import Action, Actor, AuditLog, Event, Signer
from loramux.registry.changes import Change
from loramux.registry.database import Database
from loramux.registry.desired import DesiredRecords
from loramux.registry.names import (
    DEFAULT_TENANT,
    AdapterName,
    CidReference,
    NameReference,
    Reference,
    check_alias,
    parse_adapter_name,
    parse_name_reference,
    parse_push_reference,
    parse_reference,
    parse_version,
)
from loramux.registry.quota import check_limits, verify_signature
from loramux.registry.records import (
    AdapterInfo,
    AliasAction,
    AliasState,
    CatalogEntry,
    Content,
    DailyUsage,
    ReceiptFilter,
    RecentUse,
    Resolved,
    StoredReceipt,
    Target,
    Usage,
    Use,
    VersionInfo,
)
from loramux.registry.resolve import Route, check_targets, find_route, versions_of_cid
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows import aliases as alias_rows
from loramux.registry.rows import catalog as catalog_rows
from loramux.registry.rows import receipts as receipt_rows
from loramux.registry.rows import recipes as recipe_rows
from loramux.registry.rows import usage as usage_rows
from loramux.registry.tenants import TenantRecords
from loramux.registry.verify import find_faults
from loramux.registry.watch import DEFAULT_POLL_S, Watch
from loramux.types.modality import Modality

MAX_ROUTES = 100_000


class Registry:
    """A registry for all threads of a process; every change is one transaction.

    Adapters are named `name` (of the home tenant) or `tenant/name`.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        home_tenant: str = DEFAULT_TENANT,
        clock: Callable[[], float] = time.time,
        signer: Signer | None = None,
        anchor: Path | None = None,
    ) -> None:
        """Open the registry and upgrades its schema; a path means a SQLite file.

        `signer` signs the entries of the audit log, and the file `anchor` gets its end.
        """
        self._home_tenant = home_tenant
        self._clock = clock
        self._database = Database(url)
        self._actor = Actor()
        self.audit = AuditLog(self._database, clock=clock, signer=signer, anchor=anchor)

    def acting(self, actor: Actor) -> Registry:
        """Return this registry with another actor of its changes; it shares the database."""
        acting = copy(self)
        acting._actor = actor
        return acting

    def record(self, event: Event) -> None:
        """Add a change outside of the registry, such as of files, to the audit log."""
        self.audit.record(self._actor, event)

    @property
    def access(self) -> AccessRecords:
        """The keys, shares and fair shares."""
        return AccessRecords(self._database, self._changing, self._clock)

    @property
    def tenants(self) -> TenantRecords:
        """The limits, settings and signing keys of tenants."""
        return TenantRecords(self._database, self._changing)

    def desired(self, fleet: str) -> DesiredRecords:
        """Return the adapters that every server of a fleet should have."""
        return DesiredRecords(self._database, fleet, clock=self._clock)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Versions

    def push(
        self, reference: str, content: Content, *, require_signed: bool = False
    ) -> tuple[VersionInfo, bool]:
        """Add a version, by default the next free one; return it and whether it is new.

        A second push of the same content is accepted; other content raises RegistryConflict.
        """
        parsed = parse_push_reference(reference, home_tenant=self._home_tenant)
        parse_cid(content.cid)
        version = None if parsed.version is None else str(parsed.version)
        details = {"cid": content.cid, "source": content.source, "bytes": content.size_bytes}
        event = Event(Action.PUSH, parsed.adapter.tenant, str(parsed), details)
        with self._changing(event) as change:
            tenant = parsed.adapter.tenant
            verified = verify_signature(
                change.connection, tenant, content, is_required=require_signed
            )
            info, is_new = change.push(parsed.adapter, version, replace(content, verified=verified))
            event.target = f"{info.adapter}@{info.version}"
            event.details |= {"is_new": is_new, "signed_by": info.signed_by}
        return info, is_new

    def check_push(self, reference: str, content: Content, *, require_signed: bool = False) -> None:
        """Raise what push() would raise for its limits and its signature; change nothing."""
        parsed = parse_push_reference(reference, home_tenant=self._home_tenant)
        adapter = parsed.adapter
        event = Event(Action.PUSH, adapter.tenant, str(parsed), {"cid": content.cid})
        with self._recording_refusals(event), self._database.reading() as connection:
            verify_signature(connection, adapter.tenant, content, is_required=require_signed)
            row = adapter_rows.find_adapter(connection, adapter)
            version = None if parsed.version is None else str(parsed.version)
            if row is not None and version is not None:
                found = adapter_rows.find_version(connection, row.id, version)
                if found is not None and found.removed_at is None:
                    return
            check_limits(connection, adapter, content, self._actor.key_id)

    def push_recipe(
        self,
        reference: str,
        terms: Iterable[tuple[str, float]],
        options: CombinationOptions,
        *,
        any_base: bool = False,
    ) -> tuple[VersionInfo, bool]:
        """Add a version that is made of other versions, given by reference and weight.

        A sum of sums becomes one sum. With `any_base` the parts may record different bases.
        """
        parsed = parse_push_reference(reference, home_tenant=self._home_tenant)
        version = None if parsed.version is None else str(parsed.version)
        given = list(terms)
        named = [(self.parse(text), weight) for text, weight in given]
        details = {"recipe": options.method, "parts": [text for text, _ in given]}
        event = Event(Action.PUSH, parsed.adapter.tenant, str(parsed), details)
        with self._changing(event) as change:
            info, is_new = change.push_recipe(
                parsed.adapter, version, named, options, any_base=any_base
            )
            event.target = f"{info.adapter}@{info.version}"
            event.details |= {"is_new": is_new, "cid": info.cid}
        return info, is_new

    def remove(self, reference: str) -> None:
        """Remove a version, an alias, or an adapter with all its versions and aliases."""
        parsed = self._parse_name(reference)
        with self._changing(Event(Action.DELETE, parsed.adapter.tenant, str(parsed))) as change:
            if parsed.version is not None:
                change.remove_version(parsed.adapter, str(parsed.version))
            elif parsed.alias is not None:
                change.remove_alias(parsed.adapter, check_alias(parsed.alias), if_revision=None)
            else:
                change.remove_adapter(parsed.adapter)

    # Aliases; with `if_revision`, RegistryConflict unless the alias is at this revision

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
        """Split the alias by weights such as {"1.4.2": 90, "1.5.0": 10}."""
        named = [(str(parse_version(version)), weight) for version, weight in weights.items()]
        targets = check_targets(named)
        return self._move(adapter, alias, targets, AliasAction.SPLIT, if_revision)

    def rollback(self, adapter: str, *, alias: str, if_revision: int | None = None) -> AliasState:
        """Move the alias back to its previous state; repeated calls go further back."""
        name = self._parse_adapter(adapter)
        event = Event(Action.ROLLBACK, name.tenant, f"{name}@{check_alias(alias)}")
        with self._changing(event) as change:
            state = change.rollback(name, alias, if_revision=if_revision)
            event.details |= _moved(state)
        return state

    def previous(self, adapter: str, *, alias: str) -> tuple[AliasState, AliasState]:
        """Return the current state of the alias, and the state that a rollback would restore."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.get_adapter(connection, name)
            found = alias_rows.current_and_previous(connection, name, row.id, check_alias(alias))
            current, previous = map(alias_rows.alias_state, found)
            return current, previous

    def history(self, adapter: str, *, alias: str) -> list[AliasState]:
        """Return all states of the alias, the newest first."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.get_adapter(connection, name)
            return alias_rows.alias_history(connection, row.id, check_alias(alias))

    # Queries

    def resolve(
        self, reference: str, *, sticky_key: str | None = None, home_tenant: str | None = None
    ) -> Resolved:
        """Resolve a reference; a sticky key fixes the side of a split, else it is random."""
        route = self.route(self.parse(reference, home_tenant=home_tenant))
        return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)

    def route(self, reference: Reference) -> Route:
        with self._database.reading() as connection:
            return find_route(connection, reference)

    def find_cid(
        self, reference: CidReference, tenant: str | None
    ) -> list[tuple[AdapterName, Resolved]]:
        """Return the versions with a CID that are a tenant's, or shared with it; None: all."""
        with self._database.reading() as connection:
            return versions_of_cid(connection, reference, tenant)

    def parse(self, reference: str, *, home_tenant: str | None = None) -> Reference:
        return parse_reference(reference, home_tenant=home_tenant or self._home_tenant)

    def adapters(self, *, tenant: str | None = None) -> list[AdapterName]:
        with self._database.reading() as connection:
            return adapter_rows.list_adapters(connection, tenant)

    def catalog(self, *, tenant: str | None = None, limit: int) -> list[CatalogEntry]:
        """Return the versions of all adapters with the aliases that select them."""
        with self._database.reading() as connection:
            return catalog_rows.list_catalog(connection, tenant=tenant, limit=limit)

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

    def modality_of(self, cid: str) -> Modality:
        """Return what the adapter with a CID is for."""
        with self._database.reading() as connection:
            return adapter_rows.find_modality(connection, cid)

    def manifest(self, cid: str) -> Mapping[str, object]:
        with self._database.reading() as connection:
            manifest = adapter_rows.get_manifest(connection, cid)
        if manifest is None:
            raise AdapterNotFound(f"The registry has no record of {cid}.")
        return manifest

    def cids(self) -> set[str]:
        """Return the CIDs of all current versions."""
        with self._database.reading() as connection:
            return adapter_rows.named_cids(connection)

    def recipe_cids(self) -> set[str]:
        """Return the CIDs of recipes, which have no files."""
        with self._database.reading() as connection:
            return recipe_rows.recipe_cids(connection)

    def cids_of(self, adapter: str) -> set[str]:
        """Return the CIDs of all versions of an adapter, also of removed ones."""
        name = self._parse_adapter(adapter)
        with self._database.reading() as connection:
            row = adapter_rows.find_adapter(connection, name)
            if row is None:
                raise AdapterNotFound(f"No adapter {name} was ever in the registry.")
            return adapter_rows.cids_of(connection, row.id)

    def names_of(self, cid: str) -> list[tuple[AdapterName, str]]:
        """Return every (adapter, version) with this CID."""
        with self._database.reading() as connection:
            return adapter_rows.names_of(connection, cid)

    def sources_of(self, cid: str) -> list[str]:
        """Return the sources of the versions with this CID, the newest first."""
        with self._database.reading() as connection:
            return adapter_rows.sources_of(connection, cid)

    def verify(self) -> tuple[str, ...]:
        """Return one sentence for each violated invariant of the registry."""
        with self._database.reading() as connection:
            return tuple(find_faults(connection))

    def watch(
        self, *, poll_s: float = DEFAULT_POLL_S, on_access: Callable[[], None] | None = None
    ) -> Watch:
        """Return a feed of the adapters that change from now on.

        on_access: called on a thread after keys, shares or tenants have changed.
        """
        return Watch(self._database, poll_s=poll_s, on_access=on_access)

    def revision(self) -> int:
        """Return the number of the newest change of any name."""
        with self._database.reading() as connection:
            return adapter_rows.newest_revision(connection)

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

    def daily_usage(
        self, *, tenant: str | None = None, since_day: int, until_day: int
    ) -> list[DailyUsage]:
        """Return the usage by day, adapter and key; days count from 1970."""
        with self._database.reading() as connection:
            return usage_rows.find_daily(
                connection, tenant=tenant, since_day=since_day, until_day=until_day
            )

    def recent_use(self, *, pool_id: str, seconds: float) -> list[RecentUse]:
        """Return what was used on a server in the last seconds, as its receipts say."""
        since = self._clock() - seconds
        with self._database.reading() as connection:
            return receipt_rows.recent_use(connection, pool_id=pool_id, since=since)

    # Receipts

    def add_receipts(self, receipts: Iterable[StoredReceipt]) -> None:
        with self._database.writing() as connection:
            receipt_rows.add_receipts(connection, receipts)

    def receipt(self, receipt_id: str, *, tenant: str | None = None) -> StoredReceipt | None:
        """Return a receipt, of one tenant if it is given."""
        with self._database.reading() as connection:
            return receipt_rows.get_receipt(connection, receipt_id, tenant)

    def find_receipts(self, wanted: ReceiptFilter) -> list[StoredReceipt]:
        with self._database.reading() as connection:
            return receipt_rows.find_receipts(connection, wanted)

    def receipt_cids(self) -> set[str]:
        """Return the CIDs of all stored receipts."""
        with self._database.reading() as connection:
            return receipt_rows.receipt_cids(connection)

    def prune_receipts(
        self, *, max_age_s: float | None = None, max_count: int | None = None
    ) -> int:
        """Remove old receipts and return their number."""
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
        event = Event(_ACTIONS[action], name.tenant, f"{name}@{alias}")
        with self._changing(event) as change:
            state = change.move_alias(name, alias, targets, action=action, if_revision=if_revision)
            event.details |= _moved(state)
        return state

    @contextmanager
    def _changing(self, event: Event) -> Iterator[Change]:
        """Begins a change; its entry in the audit log is part of the transaction."""
        with self._recording_refusals(event):
            with self._database.writing() as connection:
                revision = adapter_rows.begin_change(connection)
                yield Change(connection, revision, self._clock(), self._actor)
                head = self.audit.append(connection, self._actor, event)
            self.audit.keep_anchor(head)

    @contextmanager
    def _recording_refusals(self, event: Event) -> Iterator[None]:
        try:
            yield
        except RegistryUnavailable:
            raise
        except LoramuxError as error:
            self.audit.record_refusal(self._actor, event, error)
            raise

    def _parse_name(self, reference: str) -> NameReference:
        return parse_name_reference(reference, home_tenant=self._home_tenant)

    def _parse_adapter(self, adapter: str) -> AdapterName:
        return parse_adapter_name(adapter, home_tenant=self._home_tenant)


_ACTIONS = {AliasAction.PROMOTE: Action.PROMOTE, AliasAction.SPLIT: Action.SPLIT}


def _moved(state: AliasState) -> dict[str, Any]:
    targets = {target.version: target.weight for target in state.targets}
    return {"revision": state.revision, "targets": targets}


class RouteCache:
    """Caches resolved references; the watcher of the registry calls forget() after a change.

    Failed lookups are not cached.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._routes: dict[Reference, Route] = {}
        self._num_changes = 0
        self._lock = threading.Lock()

    def resolve(
        self, reference: str, *, sticky_key: str | None = None, home_tenant: str | None = None
    ) -> Resolved:
        route = self.route(self._registry.parse(reference, home_tenant=home_tenant))
        return route.choose(secrets.token_hex(16) if sticky_key is None else sticky_key)

    def peek(self, reference: Reference) -> Route | None:
        """Return the cached route, or None, without a query."""
        return self._routes.get(reference)

    def forget(self, adapters: Iterable[AdapterName]) -> None:
        changed = set(adapters)
        with self._lock:
            self._num_changes += 1
            # A CID has no adapter: any change may remove it, or make its start ambiguous.
            self._routes = {
                reference: route
                for reference, route in self._routes.items()
                if route.adapter is not None and route.adapter not in changed
            }

    def route(self, reference: Reference) -> Route:
        """Return the route from the cache, or from a query that the cache keeps."""
        route = self._routes.get(reference)
        if route is not None:
            return route
        before = self._num_changes
        route = self._registry.route(reference)
        with self._lock:
            # A route that was read before a change must not be cached after it.
            if before == self._num_changes and len(self._routes) < MAX_ROUTES:
                self._routes[reference] = route
        return route
