"""The records of tenants: limits, share, signing keys; and the limits of API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection

from loramux.adapters.signature import SigningKey, parse_signing_key
from loramux.errors import InvalidRequest, RecordNotFound
from loramux.registry.audit import Action, Event
from loramux.registry.changes import Changing
from loramux.registry.database import Database
from loramux.registry.names import check_name
from loramux.registry.rows import tenants as rows
from loramux.registry.rows.access import make_tenant
from loramux.types.limits import Limits, TenantSettings, change_limits, check_share

MAX_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    name: str
    created_at: float
    settings: TenantSettings
    num_adapters: int
    stored_bytes: int
    signing_keys: tuple[SigningKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanges:
    """New values of settings; None leaves a setting as it is."""

    limits: Mapping[str, int | None] = field(default_factory=dict)
    """By name; None removes a limit, and what is absent stays."""
    share: float | None = None
    require_signed: bool | None = None

    def apply(self, settings: TenantSettings) -> TenantSettings:
        """Return the changed settings; raise InvalidRequest."""
        check_share(self.share)
        given = {"share": self.share, "require_signed": self.require_signed}
        changed = {name: value for name, value in given.items() if value is not None}
        return replace(settings, limits=change_limits(settings.limits, self.limits), **changed)

    def details(self) -> dict[str, Any]:
        given = {"share": self.share, "require_signed": self.require_signed}
        return {
            **{name: "none" if value is None else value for name, value in self.limits.items()},
            **{name: value for name, value in given.items() if value is not None},
        }


class TenantRecords:
    """Reads and changes the records of tenants; each change is audited."""

    def __init__(self, database: Database, changing: Changing) -> None:
        self._database = database
        self._changing = changing

    def all(self) -> list[TenantInfo]:
        with self._database.reading() as connection:
            return [_info(connection, row.name) for row in rows.list_tenants(connection)]

    def show(self, name: str) -> TenantInfo:
        with self._database.reading() as connection:
            return _info(connection, name)

    def rate_limits(self) -> tuple[dict[str, TenantSettings], dict[str, Limits], dict[str, str]]:
        """Return the settings of all tenants, limits of keys, and the buckets of rotated keys."""
        with self._database.reading() as connection:
            return (
                rows.all_settings(connection),
                rows.limits_of_keys(connection),
                rows.buckets_of_keys(connection),
            )

    def set(self, name: str, changes: SettingChanges) -> TenantInfo:
        """Change the settings of a tenant, which is created if needed."""
        check_name(name, "tenant")
        with self._changing(Event(Action.TENANT_SET, name, name, changes.details())) as change:
            connection = change.connection
            tenant_id = make_tenant(connection, name, now=change.now)
            settings = changes.apply(rows.settings_of(connection, name))
            rows.set_settings(connection, tenant_id, settings)
            change.note_access()
            return _info(connection, name)

    def set_key_limits(self, key_id: str, limits: Mapping[str, int | None]) -> Limits:
        """Change the limits of an API key; None removes one."""
        details = SettingChanges(limits=limits).details()
        with self._changing(Event(Action.KEY_LIMITS, "", key_id, details)) as change:
            connection = change.connection
            changed = change_limits(rows.limits_of_key(connection, key_id), limits)
            if not rows.set_limits_of_key(connection, key_id, changed):
                raise RecordNotFound(f"There is no API key {key_id[:100]}.")
            change.note_access()
            return changed

    def add_signer(self, tenant: str, public_key: str, *, name: str = "") -> SigningKey:
        """Accept signatures of a public key, given in PEM, for pushes of the tenant."""
        check_name(tenant, "tenant")
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise InvalidRequest(
                f"A name has at most {MAX_NAME_CHARACTERS} printable characters.", param="name"
            )
        key = parse_signing_key(public_key, name=name)
        event = Event(Action.SIGNER_ADD, tenant, f"{tenant} {key.key_id}", {"name": name})
        with self._changing(event) as change:
            tenant_id = make_tenant(change.connection, tenant, now=change.now)
            rows.add_signing_key(change.connection, tenant_id, key, now=change.now)
        return key

    def remove_signer(self, tenant: str, key_id: str) -> None:
        """Refuses later signatures of a key; versions that it has signed stay."""
        with self._changing(Event(Action.SIGNER_REMOVE, tenant, f"{tenant} {key_id}")) as change:
            if not rows.remove_signing_key(change.connection, tenant, key_id):
                raise RecordNotFound(f"The tenant {tenant} has no signing key {key_id[:100]}.")


def _info(connection: Connection, name: str) -> TenantInfo:
    row = rows.find_tenant(connection, name)
    if row is None:
        raise RecordNotFound(f"There is no tenant {name[:100]}.")
    return TenantInfo(
        name=row.name,
        created_at=row.created_at,
        settings=rows.read_settings(row),
        num_adapters=rows.count_adapters(connection, name),
        stored_bytes=rows.stored_bytes(connection, name),
        signing_keys=tuple(rows.signing_keys_of(connection, name)),
    )
