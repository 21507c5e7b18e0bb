"""Commands that ask the registry and the store, and change neither."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from loramux.cli.doctor_view import say, size_text
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    JsonFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    open_registry,
    working,
)
from loramux.cli.registry_view import (
    VersionDetails,
    adapter_json,
    adapter_table,
    details_json,
    show_adapter,
    show_details,
)
from loramux.registry.names import NameReference, check_name

if TYPE_CHECKING:
    from loramux.registry.resolve import Choice
    from loramux.store.library import AdapterLibrary


def list_adapters(
    tenant: Annotated[str | None, typer.Argument(help="Only this tenant's adapters.")] = None,
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show all adapters with their versions and aliases."""
    with open_registry(registry, data) as opened:
        if tenant is not None:
            check_name(tenant, "tenant")
        found = [opened.show(str(name)) for name in opened.adapters(tenant=tenant)]
    if as_json:
        typer.echo(json.dumps({"adapters": list(map(adapter_json, found))}, indent=2))
    elif found:
        Console().print(adapter_table(found))
    else:
        Console(stderr=True).print("No adapters. Push one: loramux push DIR tenant/name@1.0.0")


def show(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="tenant/name, tenant/name@1.4.2, tenant/name@prod or cidv1:sha256:….",
        ),
    ],
    as_json: JsonFlag = False,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Show an adapter's versions and aliases, or all that is known of one version."""
    with open_library(registry, data) as library:
        parsed = library.registry.parse(reference)
        if isinstance(parsed, NameReference) and parsed == NameReference(parsed.adapter):
            info = library.registry.show(reference)
            if as_json:
                typer.echo(json.dumps(adapter_json(info), indent=2))
            else:
                show_adapter(info, Console())
            return
        choices = library.registry.route(parsed).choices
        details = [version_details(library, choice) for choice in choices]
    if as_json:
        typer.echo(json.dumps({"versions": list(map(details_json, details))}, indent=2))
        return
    for version in details:
        show_details(version, Console())


def version_details(library: AdapterLibrary, choice: Choice) -> VersionDetails:
    cid = choice.resolved.cid
    return VersionDetails(
        resolved=choice.resolved,
        share=choice.weight,
        names=tuple(f"{name}@{version}" for name, version in library.registry.names_of(cid)),
        manifest=library.registry.manifest(cid),
        usage=library.registry.usage(cid),
        is_stored=library.store.has(cid),
    )


def verify(
    as_json: JsonFlag = False,
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Read every byte of the store and every row of the registry.

    What is not in the data folder must be in the shared cache or the remote store, where these
    are named. Exit status 0: all is sound; 1: something is not.
    """
    options = StoreOptions(shared_cache=shared_cache, remote_store=remote_store)
    with open_library(registry, data, options) as library, working("Reading the store"):
        report = library.verify()
    if as_json:
        body = {"is_sound": not report.faults, **msgspec.to_builtins(report)}
        typer.echo(json.dumps(body, indent=2))
    else:
        console = Console()
        for fault in report.faults:
            say(console, "fault: ", fault, style="bold red")
        size = size_text(report.size_bytes)
        found = f"{report.num_adapters} adapters, {report.num_files} files, {size}"
        say(console, "Damaged  " if report.faults else "Sound    ", found, style="bold")
    raise typer.Exit(FAILED if report.faults else 0)
