"""`loramux push`: an adapter folder becomes a version that never changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.byte_view import ByteView
from loramux.cli.doctor import diagnose, measure
from loramux.cli.doctor_view import say, show_report, size_text
from loramux.cli.push_source import (
    FetchOptions,
    FetchTimeoutFlag,
    FetchWorkersFlag,
    MaxSizeFlag,
    PrivateHostsFlag,
    source_folder,
)
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    RegistryFlag,
    RemoteStoreFlag,
    SharedCacheFlag,
    StoreOptions,
    open_library,
    reporting_errors,
)
from loramux.cli.registry_view import show_alias
from loramux.config.fields import parse_bytes
from loramux.registry.names import check_alias, parse_push_reference

if TYPE_CHECKING:
    from loramux.store.library import Pushed


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Adapter folder, as PEFT saves it; or hf:owner/name[@revision], s3://, gs:// or "
        "az:// with bucket/folder, https://host/folder.",
    ),
]
ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TENANT/NAME[@VERSION]",
        help="Such as alice/refund-flagger@1.4.2. Without a version: the next free one.",
    ),
]
PromoteFlag = Annotated[
    str | None, typer.Option(help="Also promote the version, such as --alias prod.")
]
CheckBaseFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="First check it on this base model, all that `loramux doctor` does.",
    ),
]


def push(  # noqa: PLR0913  (one for each flag)
    source: SourceArgument,
    reference: ReferenceArgument,
    alias: PromoteFlag = None,
    check_base: CheckBaseFlag = None,
    max_adapter_size: MaxSizeFlag = "8GiB",
    fetch_timeout_s: FetchTimeoutFlag = 1800.0,
    fetch_workers: FetchWorkersFlag = 4,
    private_http_hosts: PrivateHostsFlag = None,
    shared_cache: SharedCacheFlag = None,
    remote_store: RemoteStoreFlag = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Store an adapter and give it a name and a version.

    What is no sound LoRA adapter is refused. The same bytes are stored once, whoever pushes them;
    a version never changes. Exit status 0: it is there; 1: refused; 2: wrong usage.

    [bold]Example[/bold]

    loramux push ./my-lora alice/refund-flagger@1.4.2 --alias prod

    loramux push hf:alice/refund-flagger alice/refund-flagger --remote-store s3://adapters/prod
    """
    with reporting_errors():
        # Before anything is copied or a model is read.
        parse_push_reference(reference)
        if alias is not None:
            check_alias(alias)
        max_adapter_bytes = parse_bytes(max_adapter_size)
    view = ByteView()
    fetch = FetchOptions(
        data=data,
        max_adapter_bytes=max_adapter_bytes,
        timeout_s=fetch_timeout_s,
        num_workers=fetch_workers,
        private_hosts=tuple(private_http_hosts or ()),
    )
    options = StoreOptions(
        shared_cache=shared_cache,
        remote_store=remote_store,
        max_adapter_bytes=max_adapter_bytes,
        sink=view,
    )
    with open_library(registry, data, options) as library:
        with view, source_folder(source, fetch, view) as (folder, name):
            if check_base is not None:
                view.begin("Checking the adapter on its base model", None)
                check_on_base(folder, check_base)
            pushed = library.push(folder, reference, source=name)
        show_pushed(pushed, Console())
        if alias is not None:
            name = f"{pushed.tenant}/{pushed.name}"
            state = library.registry.promote(name, pushed.version, alias=alias)
            show_alias(name, state, Console())


def check_on_base(folder: Path, model: Path) -> None:
    report = diagnose(folder, model, strict_base=False, max_rank=None)
    if report.ok:
        report = measure(report, model)
    if not report.ok or report.warnings:
        show_report(report, Console(stderr=True))
    if not report.ok:
        raise typer.Exit(FAILED)


def show_pushed(pushed: Pushed, console: Console) -> None:
    label = "Pushed   " if pushed.is_new else "Known    "
    say(console, label, f"{pushed.tenant}/{pushed.name}@{pushed.version}", style="bold green")
    say(console, "CID      ", pushed.cid, style="bold")
    say(console, "Size     ", size_text(pushed.size_bytes), style="bold")
