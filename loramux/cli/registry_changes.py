"""Commands that change what names mean, or remove what has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.bucket_gc import collect_remote
from loramux.cli.doctor_view import say, size_text
from loramux.cli.registry_options import (
    AliasFlag,
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    open_library,
    open_registry,
    working,
)
from loramux.cli.registry_view import show_alias
from loramux.cli.warming import UrlsFlag, WarmFlag, warm_on_servers
from loramux.errors import InvalidRequest, RegistryConflict
from loramux.registry.names import PROD, parse_adapter_name, parse_name_reference

if TYPE_CHECKING:
    from loramux.store.library import AdapterLibrary

DEFAULT_GRACE_S = 3600.0
DEFAULT_REMOTE_GRACE = "24h"

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
    """Let an alias name this version: running servers follow with their next request."""
    with open_registry(registry, data) as opened:
        parsed = parse_name_reference(reference)
        if parsed.version is None:
            raise InvalidRequest(f"Say which version of {parsed.adapter}: {parsed.adapter}@1.4.2.")
        name = str(parsed.adapter)
        if warm:
            warm_on_servers([f"{name}@{parsed.version}"], url)
        state = opened.promote(name, str(parsed.version), alias=alias)
        show_alias(name, state, Console())


def rollback(
    adapter: NameArgument,
    alias: AliasFlag = PROD,
    warm: WarmFlag = False,
    url: UrlsFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Move an alias back to what it named before; once more: to the state before that."""
    with open_registry(registry, data) as opened:
        revision = None
        if warm:
            current, previous = opened.previous(adapter, alias=alias)
            name = parse_adapter_name(adapter)
            warm_on_servers([f"{name}@{target.version}" for target in previous.targets], url)
            # What was warmed is what the alias moves to, or it does not move.
            revision = current.revision
        state = opened.rollback(adapter, alias=alias, if_revision=revision)
        show_alias(adapter, state, Console())


def split(  # noqa: PLR0913  (one for each flag)
    adapter: NameArgument,
    shares: SharesArgument,
    alias: AliasFlag = PROD,
    warm: WarmFlag = False,
    url: UrlsFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Let an alias name several versions, each for its share of the requests.

    The same user always meets the same version.

    [bold]Example[/bold]

    loramux split alice/refund-flagger --alias prod 1.4.2=90 1.5.0=10
    """
    with open_registry(registry, data) as opened:
        weights = parse_shares(shares)
        if warm:
            name = parse_adapter_name(adapter)
            warm_on_servers([f"{name}@{version}" for version in weights], url)
        state = opened.split(adapter, weights, alias=alias)
        show_alias(adapter, state, Console())


def remove(
    reference: Annotated[
        str,
        typer.Argument(metavar="REF", help="tenant/name@1.4.2, tenant/name@alias or tenant/name."),
    ],
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Remove a version, an alias, or an adapter with all of both.

    A version that an alias names stays until the alias moves. The bytes go with `loramux gc`.
    """
    with open_registry(registry, data) as opened:
        opened.remove(reference)
        say(Console(), "Removed  ", str(parse_name_reference(reference)), style="bold")


def collect(  # noqa: PLR0913  (one for each flag)
    grace_s: Annotated[
        float,
        typer.Option(min=0, help="Keep what was pushed, opened or used in the last seconds."),
    ] = DEFAULT_GRACE_S,
    is_empty_right: Annotated[
        bool, typer.Option("--all", help="Go on although the registry names no adapter at all.")
    ] = False,
    is_remote: Annotated[
        bool, typer.Option("--remote", help="In the remote store, and not in the data folder.")
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="With --remote: only show what would go.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --remote: keep what was written since, such as 24h, 30m or 7d. "
            f"Default: {DEFAULT_REMOTE_GRACE}.",
        ),
    ] = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Remove stored bytes that no version names.

    With --remote: from the bucket that stands behind the store, what neither a version nor a
    kept receipt of this registry names. Other registries must not share the bucket's folder.
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
        count = f"{removed.num_adapters} adapters, {removed.num_files} files"
        say(Console(), "Removed  ", f"{count}, {size_text(removed.freed_bytes)}", style="bold")


def refuse_empty_registry(library: AdapterLibrary) -> None:
    """Most likely it is the wrong one: it would cost every adapter in the store."""
    if library.store.cids() and not library.registry.cids():
        raise RegistryConflict(
            "The store has adapters and the registry names none. Check --registry and --data; "
            "if all of them shall go, say --all."
        )


def parse_shares(shares: Iterable[str]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for share in shares:
        version, _, weight = share.partition("=")
        if not (weight.isascii() and weight.isdigit()):
            raise InvalidRequest(f"{share!r} is no share. Write it like 1.4.2=90.")
        if version in weights:
            raise InvalidRequest(f"{version} is named twice.")
        weights[version] = int(weight)
    return weights
