"""Keys of callers, shares between tenants, and fair shares, as records of the registry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection

from loramux.errors import InvalidRequest, QuotaExceeded, RecordNotFound
from loramux.registry.audit import Action, Event
from loramux.registry.changes import Changing
from loramux.registry.database import Database
from loramux.registry.keys import (
    MAX_KEYS_OF_TENANT,
    MAX_LIFETIME_S,
    KeyRecord,
    KeyRights,
    NewKey,
    make_key,
)
from loramux.registry.names import AdapterName, check_name, parse_version
from loramux.registry.records import ALL_TENANTS, Share
from loramux.registry.rows import access as rows
from loramux.registry.rows import adapters as adapter_rows
from loramux.registry.rows.tenants import limits_of_key, set_limits_of_key
from loramux.types.limits import NO_LIMITS, Limits, change_limits


@dataclass(frozen=True, slots=True)
class AccessSnapshot:
    """All keys, shares and fair shares at one time."""

    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    """By id; also revoked and expired ones."""
    shares: Mapping[AdapterName, Sequence[Share]] = field(default_factory=dict)
    fair_shares: Mapping[str, float] = field(default_factory=dict)
    """By tenant; others have 1."""

    def is_shared(self, adapter: AdapterName, tenant: str, version: str | None) -> bool:
        """Whether a tenant may use a version of another's adapter; None: all of them."""
        return any(
            share.tenant in (tenant, ALL_TENANTS) and share.version in ("", version)
            for share in self.shares.get(adapter, ())
        )

    def shared_versions(self, adapter: AdapterName, tenant: str) -> frozenset[str]:
        """Return the versions that a tenant may use of another's adapter; "" means all."""
        given = self.shares.get(adapter, ())
        return frozenset(one.version for one in given if one.tenant in (tenant, ALL_TENANTS))


NO_ACCESS = AccessSnapshot()


class AccessRecords:
    """Reads and changes keys, shares and tenants; every change is one transaction."""

    def __init__(
        self, database: Database, changing: Changing, clock: Callable[[], float] = time.time
    ) -> None:
        """Begin changes that the audit log records with `changing`."""
        self._database = database
        self._begin = changing
        self._clock = clock

    def snapshot(self) -> AccessSnapshot:
        with self._database.reading() as connection:
            keys, shares = rows.list_keys(connection), rows.list_shares(connection)
            fair_shares = rows.fair_shares(connection)
        by_adapter: dict[AdapterName, list[Share]] = {}
        for share in shares:
            by_adapter.setdefault(share.adapter, []).append(share)
        return AccessSnapshot({key.key_id: key for key in keys}, by_adapter, fair_shares)

    # Keys

    def create_key(
        self,
        rights: KeyRights,
        *,
        note: str = "",
        expires_in_s: float | None = None,
        limits: Mapping[str, int | None] = MappingProxyType({}),
        not_after: float | None = None,
    ) -> NewKey:
        """Make a key; its text cannot be read again.

        `not_after`: when its maker's own key or token ends, and so the new key at the latest.
        """
        details = {**_rights_details(rights), **({"limits": dict(limits)} if limits else {})}
        event = Event(Action.KEY_CREATE, rights.tenant or "", "", details)
        with self._changing(event) as connection:
            until = _expiry(expires_in_s, now=self._clock(), not_after=not_after)
            new = self._add_key(connection, rights, note, until)
            event.target = new.record.key_id
            _set_limits(connection, new, change_limits(NO_LIMITS, limits))
        return new

    def keys(self, *, tenant: str | None = None) -> list[KeyRecord]:
        with self._database.reading() as connection:
            found = rows.list_keys(connection)
        return [key for key in found if tenant in (None, key.rights.tenant)]

    def revoke_key(self, key_id: str, *, tenant: str | None = None) -> KeyRecord:
        """Make a key invalid for ever; with a tenant, only a key of that tenant."""
        event = Event(Action.KEY_REVOKE, tenant or "", key_id)
        with self._changing(event) as connection:
            key = self._valid_key(connection, key_id, tenant)
            event.tenant = key.rights.tenant or ""
            rows.set_revoked(connection, key_id, self._clock())
        return key

    def rotate_key(
        self,
        key_id: str,
        *,
        overlap_s: float = 0.0,
        tenant: str | None = None,
        not_after: float | None = None,
    ) -> NewKey:
        """Make a key with the same rights and limits; the old one stays valid for the overlap.

        What the old key has used counts on. With a tenant, only a key of that tenant is rotated.
        `not_after`: as for create_key.
        """
        if not 0 <= overlap_s <= MAX_LIFETIME_S:
            raise InvalidRequest(
                f"The overlap must be 0 to {MAX_LIFETIME_S:.0f} seconds.", param="overlap_s"
            )
        event = Event(Action.KEY_ROTATE, tenant or "", key_id, {"overlap_s": overlap_s})
        with self._changing(event) as connection:
            old = self._valid_key(connection, key_id, tenant)
            event.tenant = old.rights.tenant or ""
            lifetime_s = None
            if old.expires_at is not None:
                # Older servers set no bound.
                lifetime_s = min(old.expires_at - old.created_at, MAX_LIFETIME_S)
            until = _expiry(lifetime_s, now=self._clock(), not_after=not_after)
            bucket, limits = rows.bucket_of(connection, key_id), limits_of_key(connection, key_id)
            rows.set_revoked(connection, key_id, self._clock() + overlap_s)
            new = self._add_key(connection, old.rights, old.note, until, bucket)
            _set_limits(connection, new, limits)
            event.details["new_key"] = new.record.key_id
        return new

    # Shares

    def share(self, adapter: AdapterName, tenant: str, version: str | None = None) -> Share:
        """Lets a tenant, or all ("*"), use an adapter; raises AdapterNotFound."""
        share = self._checked(adapter, tenant, version)
        with self._changing(_share_event(Action.SHARE, share)) as connection:
            row = adapter_rows.get_adapter(connection, adapter)
            if share.version:
                adapter_rows.get_version(connection, row, adapter, share.version)
            rows.add_share(connection, row.id, share, now=self._clock())
        return share

    def unshare(self, adapter: AdapterName, tenant: str, version: str | None = None) -> Share:
        """End a share; without a version all shares of the adapter with the tenant."""
        share = self._checked(adapter, tenant, version)
        with self._changing(_share_event(Action.UNSHARE, share)) as connection:
            row = adapter_rows.get_adapter(connection, adapter)
            rows.remove_share(connection, row.id, share)
        return share

    def shares(self, adapter: AdapterName) -> list[Share]:
        with self._database.reading() as connection:
            return [share for share in rows.list_shares(connection) if share.adapter == adapter]

    # Tenants

    def set_fair_share(self, tenant: str, fair_share: float) -> None:
        if not 0 < fair_share < math.inf:
            raise InvalidRequest("A fair share is a number over 0.", param="fair_share")
        event = Event(Action.TENANT_SET, tenant, tenant, {"share": fair_share})
        with self._changing(event) as connection:
            tenant_id = rows.make_tenant(
                connection, check_name(tenant, "tenant"), now=self._clock()
            )
            rows.set_fair_share(connection, tenant_id, fair_share)

    def _add_key(
        self,
        connection: Connection,
        rights: KeyRights,
        note: str,
        expires_at: float | None,
        bucket: str | None = None,
    ) -> NewKey:
        now = self._clock()
        new = make_key(rights, note=note, now=now, expires_at=expires_at)
        tenant, tenant_id = rights.tenant, None
        if tenant is not None:
            tenant_id = rows.make_tenant(connection, tenant, now=now)
            if rows.count_valid_keys(connection, tenant_id, now) >= MAX_KEYS_OF_TENANT:
                raise QuotaExceeded(
                    f"The tenant {tenant} has {MAX_KEYS_OF_TENANT} valid keys, which is the most. "
                    "Revoke the unused ones.",
                    limit="keys",
                )
            rows.forget_ended_keys(connection, tenant_id, now, kept=MAX_KEYS_OF_TENANT)
        rows.add_key(connection, new.record, tenant_id, bucket)
        return new

    def _valid_key(
        self, connection: Connection, key_id: str, tenant: str | None = None
    ) -> KeyRecord:
        for key in rows.list_keys(connection):
            is_asked = key.key_id == key_id and tenant in (None, key.rights.tenant)
            if is_asked and key.is_valid(self._clock()):
                return key
        raise RecordNotFound(f"There is no valid key {key_id[:100]!r}. See loramux keys list.")

    def _checked(self, adapter: AdapterName, tenant: str, version: str | None) -> Share:
        if tenant != ALL_TENANTS:
            check_name(tenant, "tenant")
        if tenant == adapter.tenant:
            raise InvalidRequest(f"{adapter} belongs to {tenant}.", param="tenant")
        return Share(adapter, tenant, "" if version is None else str(parse_version(version)))

    @contextmanager
    def _changing(self, event: Event) -> Iterator[Connection]:
        with self._begin(event) as change:
            yield change.connection
            change.note_access()


def _expiry(
    expires_in_s: float | None, *, now: float, not_after: float | None = None
) -> float | None:
    """Return when a new key expires; None: never. Raises InvalidRequest."""
    if expires_in_s is not None and not 0 < expires_in_s <= MAX_LIFETIME_S:
        raise InvalidRequest(
            f"A key expires after more than 0 and at most {MAX_LIFETIME_S:.0f} seconds (100 "
            "years). Leave expires_in_s out for a key without an end.",
            param="expires_in_s",
        )
    ends = [] if expires_in_s is None else [now + expires_in_s]
    if not_after is not None:
        if not_after <= now:
            raise InvalidRequest("The key or token of the caller has ended.")
        ends.append(not_after)
    return min(ends, default=None)


def _rights_details(rights: KeyRights) -> dict[str, Any]:
    return {
        "scopes": sorted(rights.scopes),
        "adapters": None if rights.adapters is None else list(rights.adapters),
        "may_use_base": rights.may_use_base,
    }


def _set_limits(connection: Connection, key: NewKey, limits: Limits) -> None:
    if limits != NO_LIMITS:
        set_limits_of_key(connection, key.record.key_id, limits)


def _share_event(action: Action, share: Share) -> Event:
    details = {"with": share.tenant, "version": share.version or "all"}
    return Event(action, share.adapter.tenant, str(share.adapter), details)
