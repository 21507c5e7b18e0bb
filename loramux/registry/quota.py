"""The limits of a push: stored adapters, stored bytes, rank, and the signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from loramux.adapters.signature import Verified, find_verified
from loramux.errors import AdapterRefused, QuotaExceeded
from loramux.registry.names import AdapterName
from loramux.registry.records import Content
from loramux.registry.rows import tenants as tenant_rows
from loramux.types.limits import LIMITS, Limits


@dataclass(frozen=True, slots=True)
class _Owner:
    """A tenant, or a key of it, with limits."""

    name: str
    limits: Limits
    api_key_id: str | None = None


def check_limits(
    connection: Connection, adapter: AdapterName, content: Content, api_key_id: str
) -> None:
    """Raise QuotaExceeded if the content may not become a version of the adapter.

    What is stored already may be over a limit that was lowered; it only may not grow.
    """
    for owner in _owners(connection, adapter.tenant, api_key_id):
        limits = owner.limits
        check_rank(owner.name, limits, highest_rank(content.manifest))
        where = (adapter.tenant, owner.api_key_id)
        if limits.adapters is not None and not _has_adapter(connection, adapter, owner):
            found = tenant_rows.count_adapters(connection, *where)
            _refuse_over(owner, "adapters", limits.adapters, found, 1)
        if limits.stored_bytes is not None and content.size_bytes:
            is_stored = tenant_rows.has_content(
                connection, adapter.tenant, content.cid, owner.api_key_id
            )
            found = tenant_rows.stored_bytes(connection, *where)
            added = 0 if is_stored else content.size_bytes
            _refuse_over(owner, "stored_bytes", limits.stored_bytes, found, added)


def check_rank(owner: str, limits: Limits, rank: int) -> None:
    if limits.max_rank is not None and rank > limits.max_rank:
        raise QuotaExceeded(
            f"{owner} may use adapters up to rank {limits.max_rank}, and this one has rank {rank}.",
            limit="max_rank",
        )


def highest_rank(manifest: Mapping[str, Any]) -> int:
    """Return the highest rank that the adapter's config names; 0 for a kind without rank."""
    config = manifest.get("config", {})
    ranks = [config.get("r", 0), config.get("init_r", 0)]
    for name in ("rank_pattern", "ranks"):
        ranks += [rank for _, rank in config.get(name, ())]
    return max(rank or 0 for rank in ranks)


def verify_signature(
    connection: Connection, tenant: str, content: Content, *, is_required: bool
) -> Verified | None:
    """Return the verified signature of the content, or None if it has none.

    Raises AdapterRefused for signatures that no key of the tenant has made, and if one is required
    by the caller or by the tenant's settings and there is none.
    """
    if content.signatures:
        keys = tenant_rows.signing_keys_of(connection, tenant)
        verified = find_verified(content.manifest, content.signatures, keys)
        if verified is None:
            known = ", ".join(key.key_id for key in keys) or "none"
            raise AdapterRefused(
                "bad_signature",
                f"No signing key of the tenant {tenant} (it has {known}) has made this signature "
                f"of {content.cid}.",
                fix="Sign this content with a registered key, or register the key: loramux "
                "tenants set TENANT --add-signer FILE.",
            )
        return verified
    if is_required or tenant_rows.settings_of(connection, tenant).require_signed:
        raise AdapterRefused(
            "unsigned",
            "The adapter has no signature, and this push needs one.",
            fix="Sign it: loramux sign FOLDER --key KEY.",
        )
    return None


def _owners(connection: Connection, tenant: str, api_key_id: str) -> Iterator[_Owner]:
    yield _Owner(f"The tenant {tenant}", tenant_rows.settings_of(connection, tenant).limits)
    if api_key_id:
        limits = tenant_rows.limits_of_key(connection, api_key_id)
        yield _Owner(f"The API key {api_key_id}", limits, api_key_id)


def _has_adapter(connection: Connection, adapter: AdapterName, owner: _Owner) -> bool:
    return tenant_rows.has_adapter(connection, adapter.tenant, adapter.name, owner.api_key_id)


def _refuse_over(owner: _Owner, limit: str, value: int, found: int, added: int) -> None:
    if added and found + added > value:
        left = max(0, value - found)
        raise QuotaExceeded(
            f"{owner.name} may have {value} {LIMITS[limit]}, and {left} are left; this push needs "
            f"{added}. Remove versions that are not used, or have the limit raised.",
            limit=limit,
        )
