"""`loramux audit`: list the changes of a registry, and verify that none was altered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.base.signing import read_public_key
from loramux.cli.console import printable, say, working
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    JsonFlag,
    RegistryFlag,
    open_registry,
)
from loramux.cli.registry_view import time_text

if TYPE_CHECKING:
    from loramux.registry.audit import StoredEntry

app = typer.Typer(no_args_is_help=True, help="List and verify the log of all changes.")


@app.command("list")
def list_entries(
    tenant: Annotated[
        str | None, typer.Option(help="Only changes of what belongs to this tenant.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only one action, such as push or key.create.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of entries, the newest ones.")] = 50,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """List changes with actor, address, target and result, the newest first."""
    with open_registry(registry, data) as opened:
        found = opened.audit.entries(tenant=tenant, action=action, limit=limit)
    if as_json:
        typer.echo(json.dumps({"entries": [one.to_dict() for one in found]}, indent=2))
    else:
        Console().print(entry_table(found))


@app.command()
def verify(
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Public key of a server that signs its entries, in PEM; may be repeated.",
        ),
    ] = None,
    anchor: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Copy of an earlier end of the log (serve --audit-anchor); may be repeated.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Check that no entry was changed or removed.

    Entries that were cut off from the end are found by an anchor that was kept elsewhere. Exit
    status 0: no fault; 1: there are faults.
    """
    with open_registry(registry, data) as opened, working("Reading the audit log"):
        # Imported here: `--help` needs no database.
        from loramux.registry.audit import read_anchor

        report = opened.audit.verify(
            keys=[read_public_key(path) for path in key or ()],
            anchors=[read_anchor(path) for path in anchor or ()],
        )
    if as_json:
        typer.echo(json.dumps({"is_sound": not report.faults, **asdict(report)}, indent=2))
    else:
        console = Console()
        for fault in report.faults:
            say(console, "fault: ", fault, style="bold red")
        signed = f", {report.num_signed} signatures verified" if key else ""
        label = "Damaged  " if report.faults else "Sound    "
        say(console, label, f"{report.num_entries} entries{signed}", style="bold")
        say(console, "End      ", report.head.to_json(), style="bold")
    raise typer.Exit(FAILED if report.faults else 0)


def entry_table(found: Iterable[StoredEntry]) -> Table:
    table = Table("number", "time (UTC)", "action", "target", "by", "from", "result")
    for stored in found:
        entry, actor = stored.entry, stored.entry.actor
        by = " ".join(filter(None, (actor.tenant, actor.key_id))) or "–"
        result = entry.result if not entry.reason else f"{entry.result}: {entry.reason}"
        texts = (entry.action, entry.target, by, actor.address or "–", result)
        table.add_row(
            str(entry.number),
            time_text(entry.created_at),
            *(Text(printable(text), overflow="fold") for text in texts),
        )
    return table
