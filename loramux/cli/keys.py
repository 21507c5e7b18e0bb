"""`loramux keys` and `loramux share`: who may call the servers of a registry, and for what."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux.cli.console import printable, say
from loramux.cli.registry_options import DataFlag, JsonFlag, RegistryFlag, open_registry
from loramux.errors import InvalidRequest, suggest
from loramux.registry.names import AdapterName, parse_name_reference
from loramux.types.access import KeyScope
from loramux.types.limits import NO_LIMITS, change_limits

if TYPE_CHECKING:
    from loramux.registry.keys import KeyRecord, NewKey
    from loramux.registry.records import Share

UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)

app = typer.Typer(no_args_is_help=True, help="Create, list, revoke and rotate API keys.")

KeyArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The id of a key: 12 digits, see loramux keys list.")
]


@app.command()
def create(  # noqa: PLR0913  (one for each flag)
    tenant: Annotated[
        str | None,
        typer.Option(help="The tenant of the key. Default: none; it sees and manages all tenants."),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            help=f"A group of routes: {', '.join(KeyScope)}. May be repeated. Default: infer.",
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Adapters that the key may use, such as sql-* or acme/sql. May be repeated. "
            "Default: all that its tenant may use.",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Do not let it use the base without an adapter.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 30d, 12h or 90m. Default: never.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Such as requests_per_minute=60."),
    ] = None,
    note: Annotated[str, typer.Option(help="What the key is for.")] = "",
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Make a key and print it once; the registry stores a salted hash of it.

    [bold]Example[/bold]

    loramux keys create --tenant acme --scope infer --scope push --expires 90d
    """
    with open_registry(registry, data) as opened:
        # Imported here: `--help` needs no database.
        from loramux.registry.keys import KeyRights

        rights = KeyRights(
            tenant=tenant,
            scopes=parse_scopes(scope or [KeyScope.INFER]),
            adapters=None if adapters is None else tuple(adapters),
            may_use_base=not no_base,
        )
        limits, expires_in_s = parse_limits(limit or ()), parse_duration(expires)
        new = opened.access.create_key(rights, note=note, expires_in_s=expires_in_s, limits=limits)
    show_new(new, as_json=as_json)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """List the keys with their rights, without their secrets."""
    with open_registry(registry, data) as opened:
        found = opened.access.keys(tenant=tenant)
    if as_json:
        typer.echo(json.dumps({"keys": list(map(key_json, found))}, indent=2))
    elif found:
        Console().print(key_table(found))
    else:
        Console(stderr=True).print("No keys. Make one: loramux keys create --tenant NAME")


@app.command()
def revoke(key_id: KeyArgument, registry: RegistryFlag = None, data: DataFlag = None) -> None:
    """Make a key invalid for ever; running servers follow within a second."""
    with open_registry(registry, data) as opened:
        opened.access.revoke_key(key_id)
    say(Console(), "Revoked  ", key_id, style="bold")


@app.command()
def rotate(
    key_id: KeyArgument,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old key stays valid, such as 1d.")
    ] = "0s",
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Make a key with the same rights and print it once; the old one ends."""
    with open_registry(registry, data) as opened:
        new = opened.access.rotate_key(key_id, overlap_s=parse_duration(overlap) or 0.0)
    show_new(new, as_json=as_json)


# Shares

ShareArgument = Annotated[
    str,
    typer.Argument(metavar="TENANT/NAME[@VERSION]", help="Such as acme/sql, or acme/sql@1.4.2."),
]
WithFlag = Annotated[str, typer.Option("--with", help="The other tenant; '*' means all.")]


def share(
    reference: ShareArgument,
    tenant: WithFlag,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Let another tenant use an adapter, or one version of it, without changing it."""
    with open_registry(registry, data) as opened:
        adapter, version = parse_shared(reference)
        given = opened.access.share(adapter, tenant, version)
    say(Console(), "Shared   ", share_text(given), style="bold")


def unshare(
    reference: ShareArgument,
    tenant: WithFlag,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """End a share; without a version all shares of the adapter with the tenant."""
    with open_registry(registry, data) as opened:
        adapter, version = parse_shared(reference)
        ended = opened.access.unshare(adapter, tenant, version)
    say(Console(), "Ended    ", share_text(ended), style="bold")


def shares(
    tenant: Annotated[
        str | None, typer.Argument(help="Only shares from or with this tenant.")
    ] = None,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """List which adapters are shared with which tenants."""
    with open_registry(registry, data) as opened:
        given = opened.access.snapshot().shares.values()
    found = [one for shares in given for one in shares]
    found = [one for one in found if tenant in (None, one.tenant, one.adapter.tenant)]
    if as_json:
        typer.echo(json.dumps({"shares": list(map(share_json, found))}, indent=2))
        return
    table = Table("adapter", "version", "with")
    for one in found:
        table.add_row(Text(str(one.adapter), overflow="fold"), one.version or "all", one.tenant)
    Console().print(table)


def parse_shared(reference: str) -> tuple[AdapterName, str | None]:
    parsed = parse_name_reference(reference)
    if parsed.alias is not None:
        raise InvalidRequest(
            f"{parsed.alias} is an alias, which may move. Share a version, or all of "
            f"{parsed.adapter}."
        )
    return parsed.adapter, None if parsed.version is None else str(parsed.version)


def share_text(share: Share) -> str:
    version = f"@{share.version}" if share.version else ""
    return f"{share.adapter}{version} with {share.tenant}"


def share_json(share: Share) -> dict[str, Any]:
    adapter = str(share.adapter)
    return {"adapter": adapter, "version": share.version or None, "with": share.tenant}


# Parsing and output


def parse_scopes(texts: Iterable[str]) -> frozenset[KeyScope]:
    for text in texts:
        if text not in list(KeyScope):
            raise InvalidRequest(
                f"{text!r} is not a scope. {suggest(text, list(KeyScope))}", param="scope"
            )
    return frozenset(map(KeyScope, texts))


def parse_duration(text: str | None) -> float | None:
    """Return the seconds of a text like 30d, 12h, 90m or 20s."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not a time. Write it like 30d, 12h, 90m or 20s.")
    return float(int(match[1]) * UNIT_S[match[2]])


def parse_limits(texts: Iterable[str]) -> dict[str, int | None]:
    """Return limits by name, checked; `none` removes one."""
    limits: dict[str, int | None] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if number != "none" and not (number.isascii() and number.isdigit()):
            raise InvalidRequest(f"{text!r} is not a limit. Write it like requests_per_minute=60.")
        limits[name.strip().replace("-", "_")] = None if number == "none" else int(number)
    change_limits(NO_LIMITS, limits)
    return limits


def show_new(new: NewKey, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"key": new.text, **key_json(new.record)}, indent=2))
        return
    # The key alone on standard output: it can be taken by a script.
    typer.echo(new.text)
    console = Console(stderr=True)
    say(console, "Id       ", new.record.key_id, style="bold")
    console.print("Keep the key now: it cannot be shown again.")


def key_json(key: KeyRecord) -> dict[str, Any]:
    rights = key.rights
    return {
        "id": key.key_id,
        "tenant": rights.tenant,
        "scopes": sorted(rights.scopes),
        "adapters": None if rights.adapters is None else list(rights.adapters),
        "may_use_base": rights.may_use_base,
        "note": key.note,
        "state": key.state(time.time()),
        "created_at": key.created_at,
        "ends_at": key.ends_at,
    }


def key_table(keys: Iterable[KeyRecord]) -> Table:
    table = Table("id", "tenant", "scopes", "adapters", "state", "ends (UTC)", "note")
    now = time.time()
    for key in keys:
        rights = key.rights
        allowed = ["all"] if rights.adapters is None else list(rights.adapters)
        base = [] if rights.may_use_base else ["no base"]
        table.add_row(
            key.key_id,
            rights.tenant or "all",
            ", ".join(sorted(rights.scopes)),
            Text("\n".join([*allowed, *base]), overflow="fold"),
            key.state(now),
            "never" if key.ends_at is None else time_text(key.ends_at),
            Text(printable(key.note), overflow="fold"),
        )
    return table


def time_text(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    # Older servers made keys that end at any number of seconds.
    except (OverflowError, ValueError, OSError):
        return "after 9999"
