"""`loramux gc --remote`: what a bucket holds and nobody names."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from loramux.cli.doctor_view import say, size_text
from loramux.cli.registry_options import open_registry, working
from loramux.config.paths import find_places
from loramux.errors import InvalidRequest, RegistryConflict

if TYPE_CHECKING:
    from loramux.registry.registry import Registry
    from loramux.store.gc import BucketPlan

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Seconds; 24h, 30m, 7d, 90s or 90."""
    found = DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{text!r} is no time. Write it like 24h, 30m, 7d or 90s.")
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
        from loramux.compose import open_bucket
        from loramux.store.gc import collect_bucket, plan_bucket

        since = time.time() - parse_duration(older_than)
        bucket = open_bucket(find_places(registry=registry, data=data, remote_store=remote_store))
        with working("Looking"):
            plan = plan_bucket(bucket, lambda: referred_cids(opened, since), older_than=since)
        if not is_empty_right:
            refuse_other_registry(plan)
        if is_dry:
            show_plan(plan, Console())
        else:
            with working("Removing"):
                plan = collect_bucket(bucket, plan, lambda: referred_cids(opened, since))
        show_total(plan, Console(), is_dry=is_dry)


def referred_cids(registry: Registry, since: float) -> set[str]:
    """By a version, and so by every alias; by a receipt that is still kept; or used since."""
    return registry.cids() | registry.receipt_cids() | registry.used_since(since)


def refuse_other_registry(plan: BucketPlan) -> None:
    """Most likely it is the wrong one: it would cost every adapter in the bucket."""
    if plan.records and not plan.num_referred:
        raise RegistryConflict(
            "The bucket has adapters and the registry refers to none of them. Check --registry, "
            "--data and --remote-store; if all of them shall go, say --all."
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
            f"{cid}: no file is removed before it is pushed again",
            style="bold red",
        )
