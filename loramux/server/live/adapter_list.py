"""The list of adapters: versions of the registry among those that the engine knows, and search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from loramux.registry.records import CatalogEntry
from loramux.wire.text import AdapterEntry


def with_stored(
    entries: Sequence[AdapterEntry], catalog: Iterable[CatalogEntry]
) -> list[AdapterEntry]:
    """Add versions of the registry as names of adapters that are there, or as stored ones."""
    # Adapters that were not read yet have no CID.
    found = {entry.cid or entry.id: entry for entry in entries}
    for version in catalog:
        known = found.get(version.cid) or _stored(version)
        found[version.cid] = _named(known, version)
    return list(found.values())


def matching(entries: list[AdapterEntry], text: str) -> list[AdapterEntry]:
    """Return the entries of which a name, an alias or the CID contains the text."""
    wanted = text.strip().lower()
    if not wanted:
        return entries
    return [entry for entry in entries if any(wanted in one.lower() for one in _texts(entry))]


def _texts(entry: AdapterEntry) -> list[str]:
    aliases = [] if entry.aliases is UNSET else entry.aliases
    return [*entry.names, *aliases, entry.cid or ""]


def _named(entry: AdapterEntry, version: CatalogEntry) -> AdapterEntry:
    full_name = f"{version.adapter}@{version.version}"
    names = entry.names if full_name in entry.names else [*entry.names, full_name]
    before = [] if entry.aliases is UNSET else entry.aliases
    aliases = [*before, *(f"{version.adapter}@{alias}" for alias in version.aliases)]
    return replace(
        entry,
        id=names[0],
        names=names,
        aliases=aliases,
        signed_by=version.signed_by or entry.signed_by,
        modality="image" if version.modality == "image" else UNSET,
    )


def _stored(version: CatalogEntry) -> AdapterEntry:
    return AdapterEntry(
        id=version.cid,
        names=[],
        state="stored",
        cid=version.cid,
        path=None,
        rank=0,
        bytes=version.size_bytes,
        tier="source",
        pinned=False,
        hits=0,
        misses=0,
        last_use=None,
        running=0,
        waiting=0,
        cached_tokens=0,
        requests=0,
        prompt_tokens=0,
        generation_tokens=0,
    )
