"""Commands on the names and versions of the registry."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from loramux.adapters.images.origin import trigger_words
from loramux.adapters.recipe import find_recipe
from loramux.cli.console import say, size_text, working
from loramux.cli.registry_options import (
    FAILED,
    AliasFlag,
    DataFlag,
    JsonFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    open_registry,
)
from loramux.cli.registry_view import (
    VersionDetails,
    adapter_json,
    adapter_table,
    details_json,
    show_adapter,
    show_alias,
    show_details,
)
from loramux.cli.roll_out import wait_until_settled, warm_on_servers
from loramux.client.wire import DEFAULT_URL
from loramux.errors import InvalidRequest, LoramuxError
from loramux.registry.names import (
    PROD,
    NameReference,
    check_name,
    parse_adapter_name,
    parse_name_reference,
)

if TYPE_CHECKING:
    from loramux.registry.resolve import Choice
    from loramux.store.library import AdapterLibrary

WarmFlag = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="First load it on the servers of --url, so that no request waits for it; if one of "
        "them fails, the alias stays.",
    ),
]
UrlsFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"With --warm: URL of a server; may be repeated. Default: {DEFAULT_URL}.",
        show_default=False,
    ),
]


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
    """Show an adapter's versions and aliases, or the details of one version."""
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
    cid, recipe = choice.resolved.cid, choice.resolved.recipe
    is_image = choice.resolved.modality == "image" and recipe is None
    metadata = stored_metadata(library, cid) if is_image else {}
    return VersionDetails(
        resolved=choice.resolved,
        share=choice.weight,
        names=tuple(f"{name}@{version}" for name, version in library.registry.names_of(cid)),
        manifest=library.registry.manifest(cid),
        usage=library.registry.usage(cid),
        is_stored=library.store.has(cid),
        sources=tuple(library.registry.sources_of(cid)),
        recipe=find_stored_recipe(library, cid) if recipe is None else recipe.to_dict(),
        trigger_words=trigger_words(metadata),
        declared={name: metadata[name] for name in DECLARED if name in metadata},
    )


DECLARED = ("ss_network_dim", "ss_network_alpha", "modelspec.architecture", "modelspec.title")
"""Fields of the header that trainers of image adapters write."""


def stored_metadata(library: AdapterLibrary, cid: str) -> dict[str, str]:
    """Return the metadata in the header of a stored adapter's weights; {} if it cannot be read."""
    if not library.store.has(cid):
        return {}
    try:
        return {name: str(value) for name, value in library.store.metadata(cid).items()}
    except LoramuxError:
        return {}


def find_stored_recipe(library: AdapterLibrary, cid: str) -> dict[str, object] | None:
    # `loramux verify` reports damaged files; the other details are shown anyway.
    recipe = find_recipe(stored_metadata(library, cid))
    return None if recipe is None else recipe.to_dict()


def verify(
    as_json: JsonFlag = False,
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Check every byte of the store and every row of the registry.

    Files missing from the data folder must be in the shared cache or the remote store, if given.
    Exit status 0: no fault was found; 1: there are faults.
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


NameArgument = Annotated[
    str, typer.Argument(metavar="TENANT/NAME", help="Such as alice/refund-flagger.")
]
VersionArgument = Annotated[
    str, typer.Argument(metavar="TENANT/NAME@VERSION", help="Such as alice/refund-flagger@1.5.0.")
]
SharesArgument = Annotated[
    list[str], typer.Argument(metavar="VERSION=SHARE...", help="Such as 1.4.2=90 1.5.0=10.")
]


def promote(
    reference: VersionArgument,
    alias: AliasFlag = PROD,
    warm: WarmFlag = False,
    url: UrlsFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Move an alias to this version; running servers follow with their next request."""
    with open_registry(registry, data) as opened:
        parsed = parse_name_reference(reference)
        if parsed.version is None:
            raise InvalidRequest(
                f"Give a version of {parsed.adapter}, such as {parsed.adapter}@1.4.2."
            )
        name = str(parsed.adapter)
        if warm:
            warm_on_servers([f"{name}@{parsed.version}"], url)
        state = opened.promote(name, str(parsed.version), alias=alias)
        show_alias(name, state, Console())
        if warm:
            wait_until_settled(url, opened.revision())


def rollback(
    adapter: NameArgument,
    alias: AliasFlag = PROD,
    warm: WarmFlag = False,
    url: UrlsFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Move an alias back to its previous state; a second time to the state before that."""
    with open_registry(registry, data) as opened:
        revision = None
        if warm:
            current, previous = opened.previous(adapter, alias=alias)
            name = parse_adapter_name(adapter)
            warm_on_servers([f"{name}@{target.version}" for target in previous.targets], url)
            # The alias moves only if its previous state is still what was warmed.
            revision = current.revision
        state = opened.rollback(adapter, alias=alias, if_revision=revision)
        show_alias(adapter, state, Console())
        if warm:
            wait_until_settled(url, opened.revision())


def split(  # noqa: PLR0913  (one for each flag)
    adapter: NameArgument,
    shares: SharesArgument,
    alias: AliasFlag = PROD,
    warm: WarmFlag = False,
    url: UrlsFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Split the requests of an alias among several versions.

    The same user always gets the same version.

    [bold]Example[/bold]

    loramux split alice/refund-flagger --alias prod 1.4.2=90 1.5.0=10
    """
    with open_registry(registry, data) as opened:
        by_version = parse_shares(shares)
        if warm:
            name = parse_adapter_name(adapter)
            warm_on_servers([f"{name}@{version}" for version in by_version], url)
        state = opened.split(adapter, by_version, alias=alias)
        show_alias(adapter, state, Console())
        if warm:
            wait_until_settled(url, opened.revision())


def remove(
    reference: Annotated[
        str,
        typer.Argument(metavar="REF", help="tenant/name@1.4.2, tenant/name@alias or tenant/name."),
    ],
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Remove a version, an alias, or an adapter with all its versions and aliases.

    A version cannot be removed while an alias points to it. `loramux gc` deletes the files.
    """
    with open_registry(registry, data) as opened:
        opened.remove(reference)
        say(Console(), "Removed  ", str(parse_name_reference(reference)), style="bold")


def parse_shares(shares: Iterable[str]) -> dict[str, int]:
    by_version: dict[str, int] = {}
    for share in shares:
        version, _, number = share.partition("=")
        if not (number.isascii() and number.isdigit()):
            raise InvalidRequest(f"{share!r} is not a share. Write it like 1.4.2=90.")
        if version in by_version:
            raise InvalidRequest(f"{version} is named twice.")
        by_version[version] = int(number)
    return by_version
