"""`loramux receipts`: what served each request, how slow it was and why."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from loramux.adapters.identity import CID_PREFIX, is_digest
from loramux.cli.doctor_view import say
from loramux.cli.receipts_verify import verify
from loramux.cli.receipts_view import receipt_lines, receipt_table
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    JsonFlag,
    RegistryFlag,
    open_registry,
    reporting_errors,
)
from loramux.cli.serve_view import show_error
from loramux.errors import InvalidRequest
from loramux.receipts.signing import make_key_files, public_key_path
from loramux.registry.names import CidReference, NameReference
from loramux.registry.records import ReceiptFilter

if TYPE_CHECKING:
    from loramux.registry.registry import Registry

SLOW = "--slow"
ANY_LATENCY = "0"
NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)", re.ASCII)
UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class ReceiptsGroup(TyperGroup):
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, with_latency(args))


def with_latency(args: list[str]) -> list[str]:
    """--slow without a number -> --slow 0"""
    expanded: list[str] = []
    for arg, following in zip(args, [*args, ""][1:], strict=True):
        is_bare = arg == SLOW and not NUMBER.fullmatch(following)
        expanded += [arg, ANY_LATENCY] if is_bare else [arg]
    return expanded


app = typer.Typer(cls=ReceiptsGroup, invoke_without_command=True)
app.command("verify")(verify)


@app.callback()
def receipts(  # noqa: PLR0913  (one for each flag)
    context: typer.Context,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Only of these bytes: tenant/name, tenant/name@prod or cidv1:sha256:….",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    slow: Annotated[
        float | None,
        typer.Option(
            SLOW, min=0, metavar="[MS]", help="Slowest first, and only those of MS or more."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only of the last 30s, 15m, 1h or 7d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 50,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show what served each request: newest first, or the slowest.

    [bold]Examples[/bold]

    loramux receipts --adapter alice/refund-flagger --slow 500 --since 1h

    loramux receipts verify --all --key receipts.pem.pub
    """
    if context.invoked_subcommand is not None:
        return
    with open_registry(registry, data) as opened:
        wanted = ReceiptFilter(
            tenant=tenant,
            cids=None if adapter is None else find_cids(opened, adapter),
            since=None if since is None else time.time() - parse_duration_s(since),
            min_latency_ms=slow,
            slowest_first=slow is not None,
            limit=limit,
        )
        found = opened.find_receipts(wanted)
    if as_json:
        typer.echo(json.dumps({"receipts": [dict(receipt.body) for receipt in found]}, indent=2))
    elif found:
        Console().print(receipt_table(found))
    else:
        Console(stderr=True).print("No receipts.")


@app.command("show")
def show(
    receipt_id: Annotated[str, typer.Argument(metavar="ID", help="As x-loramux-receipt gave it.")],
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show all of one receipt."""
    with open_registry(registry, data) as opened:
        receipt = opened.receipt(receipt_id)
    if receipt is None:
        message = f"No receipt {receipt_id} is in the registry; it may be older than is kept."
        show_error(Console(stderr=True), message)
        raise typer.Exit(FAILED)
    if as_json:
        typer.echo(json.dumps({"serving": dict(receipt.body)}, indent=2))
        return
    for label, value in receipt_lines(receipt.body):
        say(Console(), f"{label:<18}", value, style="bold")


@app.command("keygen")
def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes.")],
) -> None:
    """Make a key to sign receipts with: FILE for the server, FILE.pub for those who verify."""
    with reporting_errors():
        key_id = make_key_files(file)
    say(Console(), "Private key  ", f"{file} (keep it secret)", style="bold")
    say(Console(), "Public key   ", str(public_key_path(file)), style="bold")
    say(Console(), "Key id       ", key_id, style="bold")


def find_cids(registry: Registry, adapter: str) -> tuple[str, ...]:
    """Also of versions that were removed, where a name or a whole CID is given."""
    parsed = registry.parse(adapter)
    if isinstance(parsed, CidReference) and is_digest(parsed.digest_start):
        return (CID_PREFIX + parsed.digest_start,)
    if isinstance(parsed, NameReference) and parsed == NameReference(parsed.adapter):
        return tuple(sorted(registry.cids_of(adapter)))
    return tuple(choice.resolved.cid for choice in registry.route(parsed).choices)


def parse_duration_s(text: str) -> float:
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is no time. Write it like 30s, 15m, 1h or 7d.")
    return float(match[1]) * UNIT_S[match[2]]
