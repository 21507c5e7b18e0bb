"""`loramux pull`: copy a stored adapter into a PEFT folder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loramux.cli.console import ByteView, say
from loramux.cli.registry_options import (
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    reporting_errors,
)
from loramux.cli.registry_view import reference_text
from loramux.cli.serve import flag_parameter
from loramux.config.file import load_serve_config
from loramux.config.serve import SETTINGS
from loramux.sources.config import SOURCE_SETTINGS, source_config

SOURCES_PANEL = "Sources for missing files (lists: repeat the flag)"


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
    **flags: Any,
) -> None:
    """Copy an adapter out of the store; every byte is verified, and the copy is atomic.

    Files missing from the data folder are read from the shared cache or the remote store, else
    from the source that was pushed, if these options allow it.
    """
    with reporting_errors():
        given = {name: value for name, value in flags.items() if value is not None}
        config = load_serve_config(given)
    view = ByteView()
    options = StoreOptions(
        shared_cache=shared_cache,
        remote_store=remote_store,
        max_adapter_bytes=config.max_adapter_size,
        sink=view,
        sources=source_config(config),
        on_fetch=lambda now: view.set_done(now.received_bytes, now.total_bytes),
    )
    with open_library(registry, data, options) as library:
        with view:
            view.begin("Checking", None)
            resolved = library.pull(reference, folder)
        console = Console()
        say(console, "Pulled   ", reference_text(resolved), style="bold green")
        say(console, "CID      ", resolved.cid, style="bold")
        say(console, "Folder   ", str(folder), style="bold")


def pull_signature() -> inspect.Signature:
    """Return the signature of `pull`, with the settings of `serve` that limit what may
    be fetched.
    """
    own = inspect.signature(pull, eval_str=True).parameters.values()
    limits = [flag_parameter(SETTINGS[name], panel=SOURCES_PANEL) for name in SOURCE_SETTINGS]
    kept = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*kept, *limits])


vars(pull)["__signature__"] = pull_signature()
