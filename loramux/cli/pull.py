"""`loramux pull`: a stored adapter as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.byte_view import ByteView
from loramux.cli.doctor_view import say
from loramux.cli.registry_options import (
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
)
from loramux.cli.registry_view import reference_text


def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="tenant/name, tenant/name@1.4.2, tenant/name@prod or cidv1:sha256:….",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Copy an adapter out of the store, every byte checked: all of it or nothing.

    What is not in the data folder comes from the shared cache or the remote store.
    """
    view = ByteView()
    options = StoreOptions(shared_cache=shared_cache, remote_store=remote_store, sink=view)
    with open_library(registry, data, options) as library:
        with view:
            view.begin("Checking", None)
            resolved = library.pull(reference, folder)
        console = Console()
        say(console, "Pulled   ", reference_text(resolved), style="bold green")
        say(console, "CID      ", resolved.cid, style="bold")
        say(console, "Folder   ", str(folder), style="bold")
