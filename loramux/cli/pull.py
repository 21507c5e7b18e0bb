"""`loramux pull`: a stored adapter as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.doctor_view import say
from loramux.cli.registry_options import DataFlag, RegistryFlag, open_library, working
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
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Copy an adapter out of the store, every byte checked: all of it or nothing."""
    with open_library(registry, data) as library:
        with working("Checking and copying"):
            resolved = library.pull(reference, folder)
        console = Console()
        say(console, "Pulled   ", reference_text(resolved), style="bold green")
        say(console, "CID      ", resolved.cid, style="bold")
        say(console, "Folder   ", str(folder), style="bold")
