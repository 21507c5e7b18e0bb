"""`loramux tenants` and `loramux usage`: limits, shares and signing keys, and what was used."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import printable, say, size_text
from loramux.cli.keys import parse_limits
from loramux.cli.registry_options import DataFlag, JsonFlag, RegistryFlag, open_registry
from loramux.errors import InvalidRequest
from loramux.types.limits import LIMITS, Limits

if TYPE_CHECKING:
    from loramux.registry.records import DailyUsage
    from loramux.registry.tenants import TenantInfo

MAX_KEY_BYTES = 4096

app = typer.Typer(
    no_args_is_help=True, help="Show and set limits, shares and signing keys of tenants."
)

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Such as acme.")]


@app.command("list")
def list_tenants(
    as_json: JsonFlag = False, registry: RegistryFlag = None, data: DataFlag = None
) -> None:
    """List the tenants with their limits and what they store."""
    with open_registry(registry, data) as opened:
        found = opened.tenants.all()
    if as_json:
        typer.echo(json.dumps({"tenants": list(map(tenant_json, found))}, indent=2))
    elif found:
        Console().print(tenant_table(found))
    else:
        Console(stderr=True).print("No tenants. Make one: loramux tenants set NAME")


@app.command()
def show(
    tenant: TenantArgument,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show a tenant's limits, share, stored adapters and signing keys."""
    with open_registry(registry, data) as opened:
        found = opened.tenants.show(tenant)
    if as_json:
        typer.echo(json.dumps(tenant_json(found), indent=2))
    else:
        show_tenant(found, Console())


@app.command("set")
def set_tenant(  # noqa: PLR0913  (one for each flag)
    tenant: TenantArgument,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help=f"A limit: {', '.join(LIMITS)}; `none` removes one. May be repeated.",
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="The share under fair scheduling; others have 1.")
    ] = None,
    require_signed: Annotated[
        bool | None,
        typer.Option(
            "--require-signed/--no-require-signed",
            help="Accept only adapters with a signature of one of the tenant's signing keys.",
        ),
    ] = None,
    add_signer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Accept signatures of this public key (PEM, Ed25519 or P-256)."
        ),
    ] = None,
    remove_signer: Annotated[
        str | None, typer.Option(metavar="KEY-ID", help="Accept no more signatures of this key.")
    ] = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Change a tenant's limits, share and signing keys; running servers follow within a second.

    [bold]Example[/bold]

    loramux tenants set acme --limit requests_per_minute=600 --limit max_rank=64 --share 2
    """
    with open_registry(registry, data) as opened:
        # Imported here: `--help` needs no database.
        from loramux.registry.tenants import SettingChanges

        records, limits = opened.tenants, parse_limits(limit or ())
        pem = None if add_signer is None else read_key(add_signer)
        is_empty = not limits and share is None and require_signed is None
        if not is_empty or (pem is None and remove_signer is None):
            records.set(
                tenant, SettingChanges(limits=limits, share=share, require_signed=require_signed)
            )
        if pem is not None and add_signer is not None:
            records.add_signer(tenant, pem, name=add_signer.stem)
        if remove_signer is not None:
            records.remove_signer(tenant, remove_signer)
        found = records.show(tenant)
    show_tenant(found, Console())


def read_key(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_KEY_BYTES + 1)
    if len(content) > MAX_KEY_BYTES:
        raise InvalidRequest(f"{path} is too large for a public key in PEM format.")
    return content.decode("utf-8", "replace")


def usage(  # noqa: PLR0913  (one for each flag)
    since: Annotated[
        str | None, typer.Option(metavar="DAY", help="First day. Default: 30 days in all.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DAY", help="Last day. Default: today, in UTC.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a heading.")] = False,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show requests and tokens by day, tenant, key and adapter, as stored receipts say.

    [bold]Example[/bold]

    loramux usage --since 2026-01-01 --csv > usage.csv
    """
    with open_registry(registry, data) as opened:
        from loramux.registry.usage_report import days_between, to_csv, usage_row

        first, last = days_between(since, until)
        found = opened.daily_usage(tenant=tenant, since_day=first, until_day=last)
    if as_csv:
        typer.echo(to_csv(found), nl=False)
    elif as_json:
        typer.echo(json.dumps({"usage": list(map(usage_row, found))}, indent=2))
    else:
        Console().print(usage_table(found))


def usage_table(found: Iterable[DailyUsage]) -> Table:
    from loramux.registry.usage_report import usage_row

    table = Table("day", "tenant", "key", "adapter")
    for column in ("requests", "prompt", "output", "reused"):
        table.add_column(column, justify="right")
    for one in found:
        day, tenant, key, adapter, *numbers = usage_row(one).values()
        names = (tenant, key or "–", adapter or "the base")
        texts = (Text(printable(str(name)), overflow="fold") for name in names)
        table.add_row(str(day), *texts, *(f"{number:,}" for number in numbers))
    return table


def limit_texts(limits: Limits) -> list[str]:
    given = msgspec.to_builtins(limits)
    return [f"{name}={value}" for name, value in given.items()]


def tenant_table(found: Iterable[TenantInfo]) -> Table:
    table = Table("tenant", "limits", "share", "signed only")
    table.add_column("adapters", justify="right")
    table.add_column("stored", justify="right")
    for one in found:
        table.add_row(
            one.name,
            "\n".join(limit_texts(one.settings.limits)) or "–",
            f"{one.settings.share:g}",
            "yes" if one.settings.require_signed else "no",
            str(one.num_adapters),
            size_text(one.stored_bytes),
        )
    return table


def show_tenant(tenant: TenantInfo, console: Console) -> None:
    settings = tenant.settings
    say(console, "Tenant   ", tenant.name, style="bold")
    say(console, "Limits   ", ", ".join(limit_texts(settings.limits)) or "none", style="bold")
    say(console, "Share    ", f"{settings.share:g}", style="bold")
    stored = f"{tenant.num_adapters} adapters, {size_text(tenant.stored_bytes)}"
    say(console, "Stored   ", stored, style="bold")
    needed = "required" if settings.require_signed else "optional"
    say(console, "Signature", f" {needed}", style="bold")
    for key in tenant.signing_keys:
        say(console, "Signer   ", f"{key.key_id} {key.name}".rstrip(), style="bold")


def tenant_json(tenant: TenantInfo) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "created_at": tenant.created_at,
        "limits": msgspec.to_builtins(tenant.settings.limits),
        "share": tenant.settings.share,
        "require_signed": tenant.settings.require_signed,
        "adapters": tenant.num_adapters,
        "stored_bytes": tenant.stored_bytes,
        "signing_keys": [
            {"key_id": key.key_id, "name": key.name, "created_at": key.created_at}
            for key in tenant.signing_keys
        ],
    }
