"""`loramux gc`: delete stored adapters that the registry does not reference."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from loramux.cli.console import say, size_text, working
from loramux.cli.registry_options import (
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    open_library,
    open_registry,
)
from loramux.config.paths import find_data_paths
from loramux.errors import InvalidRequest, RegistryConflict

if TYPE_CHECKING:
    from loramux.registry.registry import Registry
    from loramux.store.gc import BucketPlan
    from loramux.store.library import AdapterLibrary

DEFAULT_GRACE_S = 3600.0
DEFAULT_REMOTE_GRACE = "24h"
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def collect(  # noqa: PLR0913  (one for each flag)
    grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Keep adapters that were pushed, opened or used in the last GRACE_S seconds.",
        ),
    ] = DEFAULT_GRACE_S,
    is_empty_right: Annotated[
        bool,
        typer.Option("--all", help="Continue even if the registry references no adapter at all."),
    ] = False,
    is_remote: Annotated[
        bool,
        typer.Option("--remote", help="Collect in the remote store instead of the data folder."),
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="With --remote: only show what would be deleted.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --remote: keep objects newer than this, such as 24h, 30m or 7d. "
            f"Default: {DEFAULT_REMOTE_GRACE}.",
        ),
    ] = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Delete stored files that no version references.

    With --remote: from the bucket behind the store, what neither a version nor a stored receipt
    of this registry references. Other registries must not share the bucket's folder.
    """
    if is_remote:
        collect_remote(
            registry,
            data,
            remote_store,
            older_than=older_than or DEFAULT_REMOTE_GRACE,
            is_dry=is_dry,
            is_empty_right=is_empty_right,
        )
        return
    with open_library(registry, data) as library:
        if is_dry or older_than is not None or remote_store is not None:
            raise InvalidRequest("--dry-run, --older-than and --remote-store need --remote.")
        if not is_empty_right:
            refuse_empty_registry(library)
        with working("Removing"):
            removed = library.gc(grace_s=grace_s)
            record(library.registry, str(library.store.root), **asdict(removed))
        count = f"{removed.num_adapters} adapters, {removed.num_files} files"
        say(Console(), "Removed  ", f"{count}, {size_text(removed.freed_bytes)}", style="bold")


def refuse_empty_registry(library: AdapterLibrary) -> None:
    """Refuse an empty registry, which is probably the wrong one: it would delete every adapter."""
    if library.store.cids() and not library.registry.cids():
        raise RegistryConflict(
            "The store has adapters and the registry names none. Check --registry and --data; "
            "to delete all of them, add --all."
        )


def parse_duration(text: str) -> float:
    """Parse 24h, 30m, 7d, 90s or 90 into seconds."""
    found = DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{text!r} is not a duration. Write it like 24h, 30m, 7d or 90s.")
    return float(found[1]) * SECONDS[found[2]]


def collect_remote(
    registry: str | None,
    data: Path | None,
    remote_store: str | None,
    *,
    older_than: str,
    is_dry: bool,
    is_empty_right: bool,
) -> None:
    with open_registry(registry, data) as opened:
        from loramux.launch.library import open_bucket
        from loramux.store.gc import Collected, collect_bucket, plan_bucket

        since = time.time() - parse_duration(older_than)
        bucket = open_bucket(
            find_data_paths(registry=registry, data=data, remote_store=remote_store)
        )
        with working("Listing the bucket"):
            plan = plan_bucket(bucket, lambda: referred_cids(opened, since), older_than=since)
        if not is_empty_right:
            refuse_other_registry(plan)
        if is_dry:
            show_plan(plan, Console())
        else:
            with working("Removing"):
                plan = collect_bucket(bucket, plan, lambda: referred_cids(opened, since))
            removed = Collected(len(plan.records), len(plan.blobs), plan.freed_bytes)
            record(opened, "the remote store", **asdict(removed))
        show_total(plan, Console(), is_dry=is_dry)


def record(registry: Registry, place: str, **removed: int) -> None:
    """Add the collection to the audit log."""
    from loramux.registry.audit import Action, Event

    registry.record(Event(Action.GC, "", place, dict(removed)))


def referred_cids(registry: Registry, since: float) -> set[str]:
    """CIDs that a version or a stored receipt references, or that were used since."""
    return registry.cids() | registry.receipt_cids() | registry.used_since(since)


def refuse_other_registry(plan: BucketPlan) -> None:
    """Refuse a registry that is probably the wrong one: every adapter would be deleted."""
    if plan.records and not plan.num_referred:
        raise RegistryConflict(
            "The bucket has adapters and the registry refers to none of them. Check --registry, "
            "--data and --remote-store; to delete all of them, add --all."
        )


def show_plan(plan: BucketPlan, console: Console) -> None:
    table = Table("object", "written")
    table.add_column("size", justify="right")
    for found in plan.objects:
        written = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.modified_at))
        table.add_row(found.key, f"{written} UTC", size_text(found.size_bytes))
    console.print(table)


def show_total(plan: BucketPlan, console: Console, *, is_dry: bool) -> None:
    label = "Would go " if is_dry else "Removed  "
    count = f"{len(plan.records)} adapters, {len(plan.blobs)} files"
    say(console, label, f"{count}, {size_text(plan.freed_bytes)}", style="bold")
    for cid in plan.damaged:
        say(
            console,
            "Damaged  ",
            f"{cid}: no file is deleted until it is pushed again",
            style="bold red",
        )
