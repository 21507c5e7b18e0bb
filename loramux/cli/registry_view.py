"""Formats adapters, versions and aliases of the registry for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.adapters.identity import CID_PREFIX
from loramux.cli.console import printable, say, size_text
from loramux.registry.records import (
    AdapterInfo,
    AliasState,
    Resolved,
    Target,
    Usage,
    VersionInfo,
)

SHORT_CID_DIGITS = 12
MAX_SOURCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDetails:
    """Everything that `loramux show` prints of a version."""

    resolved: Resolved
    share: int
    """Share of the alias's requests, relative to the other versions' shares."""
    names: tuple[str, ...]
    """All names of the same bytes."""
    manifest: Mapping[str, object]
    usage: Usage | None
    """None: never used."""
    is_stored: bool
    sources: tuple[str, ...] = ()
    """Where its files were pushed from, the newest first."""
    recipe: Mapping[str, object] | None = None
    """Parts, weights and method of a recipe, or of a combined adapter whose files are stored."""
    trigger_words: tuple[str, ...] = ()
    """The words that call an adapter of an image model up, as its trainer noted them."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """What the file of an adapter of an image model says of its rank, alpha and base."""


def adapter_table(found: Iterable[AdapterInfo]) -> Table:
    table = Table("adapter", "kind", "latest", "aliases", "base")
    table.add_column("versions", justify="right")
    table.add_column("size", justify="right")
    for info in found:
        latest = next((v for v in info.versions if v.version == info.latest), None)
        table.add_row(
            Text(str(info.adapter), overflow="fold"),
            latest.modality if latest else "–",
            info.latest,
            "\n".join(f"{state.alias} → {targets_text(state.targets)}" for state in info.aliases),
            Text(printable((latest.base_model if latest else None) or "–"), overflow="fold"),
            str(len(info.versions)),
            version_size(latest) if latest else "–",
        )
    return table


def version_size(version: VersionInfo) -> str:
    """Return the size of the files of a version; a recipe has none, and shows how many parts it
    has.
    """
    if version.recipe is None:
        return size_text(version.size_bytes)
    return f"{len(version.recipe.parts)} parts"


def show_adapter(info: AdapterInfo, console: Console) -> None:
    say(console, "Adapter  ", str(info.adapter), style="bold")
    say(console, "Latest   ", info.latest or "–", style="bold")
    for state in info.aliases:
        text = f"{targets_text(state.targets)} (revision {state.revision})"
        say(console, f"{state.alias:<8} ", text, style="bold")
    table = Table("version", "kind", "content id", "base")
    table.add_column("pushed (UTC)", no_wrap=True)
    table.add_column("size", justify="right")
    for version in info.versions:
        table.add_row(
            version.version,
            version.modality,
            short_cid(version.cid),
            Text(printable(version.base_model or "–"), overflow="fold"),
            time_text(version.created_at),
            version_size(version),
        )
    console.print(table)
    for version in info.versions:
        if version.recipe is not None:
            say(console, f"{version.version:<8} ", f"= {version.recipe}", style="bold")


def show_details(details: VersionDetails, console: Console) -> None:
    for label, value in detail_lines(details):
        say(console, f"{label:<15} ", value, style="bold")


def detail_lines(details: VersionDetails) -> Iterator[tuple[str, str]]:
    yield "Version", reference_text(details.resolved)
    yield "CID", details.resolved.cid
    if details.resolved.modality != "text":
        yield "Kind", details.resolved.modality
    yield "Names", ", ".join(details.names) or "–"
    if details.resolved.base_model is not None:
        yield "Base", details.resolved.base_model
    if details.resolved.recipe is None:
        yield "Stored", "yes" if details.is_stored else "no"
        yield "Signed by", details.resolved.signed_by or "no key"
    for source in details.sources[:MAX_SOURCES]:
        yield "Source", source
    usage = details.usage
    if usage is not None:
        yield "Requests", f"{usage.num_requests}, last {time_text(usage.last_used_at)}"
    if details.recipe is not None:
        yield from recipe_lines(details.recipe)
    if details.resolved.recipe is not None:
        return
    if details.resolved.modality != "text":
        yield "Trigger", ", ".join(details.trigger_words) or "the file names none"
    yield from details.declared.items()
    for name, value in manifest_config(details.manifest).items():
        yield name, str(value)


def recipe_lines(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the method and the parts of a combined adapter."""
    options = ("density", "majority_sign_method", "seed", "svd_rank")
    given = ", ".join(f"{name} {recipe[name]}" for name in options if name in recipe)
    yield "Method", recipe["method"] + (f" ({given})" if given else "")
    for part in recipe["parts"]:
        name = f"{part['name']} ({part['cid']})" if "name" in part else part["cid"]
        yield "Part", f"{part['weight']:g} * {name}"


def manifest_config(manifest: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of the adapter's config that are set."""
    config = manifest.get("config")
    values = config if isinstance(config, Mapping) else {}
    return {name: value for name, value in values.items() if value not in (None, False, [], {})}


def show_alias(adapter: str, state: AliasState, console: Console) -> None:
    label = f"{adapter}@{state.alias} "
    targets = targets_text(state.targets) or "nothing"
    say(console, label, f"→ {targets} (revision {state.revision})", style="bold green")


def targets_text(targets: tuple[Target, ...]) -> str:
    """Format the targets of an alias: 1.4.2, or 1.4.2 90%, 1.5.0 10%."""
    if len(targets) == 1:
        return targets[0].version
    total = sum(target.weight for target in targets)
    return ", ".join(f"{t.version} {100 * t.weight / total:.4g}%" for t in targets)


def reference_text(resolved: Resolved) -> str:
    if resolved.name is None:
        return short_cid(resolved.cid)
    via = f" (as {resolved.alias})" if resolved.alias else ""
    return f"{resolved.tenant}/{resolved.name}@{resolved.version}{via}"


def short_cid(cid: str) -> str:
    """Return the first digits of a CID, enough for a reference."""
    return cid.removeprefix(CID_PREFIX)[:SHORT_CID_DIGITS]


def time_text(seconds: float) -> str:
    """Format a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def adapter_json(info: AdapterInfo) -> dict[str, Any]:
    return {
        "adapter": str(info.adapter),
        "tenant": info.adapter.tenant,
        "name": info.adapter.name,
        "latest": info.latest,
        "versions": [version_json(version) for version in info.versions],
        "aliases": [msgspec.to_builtins(state) for state in info.aliases],
    }


def version_json(version: VersionInfo) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(version)
    recipe = None if version.recipe is None else version.recipe.to_dict()
    return {name: value for name, value in values.items() if name != "adapter"} | {"recipe": recipe}


def details_json(details: VersionDetails) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(details)
    return {**values.pop("resolved"), **values}
