"""`loramux push`: an adapter folder becomes a version that never changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loramux.cli.doctor import diagnose, measure
from loramux.cli.doctor_view import say, show_report, size_text
from loramux.cli.registry_options import (
    FAILED,
    DataFlag,
    RegistryFlag,
    open_library,
    reporting_errors,
    working,
)
from loramux.cli.registry_view import show_alias
from loramux.registry.names import check_alias, parse_push_reference

if TYPE_CHECKING:
    from loramux.adapters.library import Pushed


def push(
    folder: Annotated[Path, typer.Argument(help="Adapter folder, as PEFT saves it.")],
    reference: Annotated[
        str,
        typer.Argument(
            metavar="TENANT/NAME[@VERSION]",
            help="Such as alice/refund-flagger@1.4.2. Without a version: the next free one.",
        ),
    ],
    alias: Annotated[
        str | None, typer.Option(help="Also promote the version, such as --alias prod.")
    ] = None,
    check_base: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="First check it on this base model, all that `loramux doctor` does.",
        ),
    ] = None,
    registry: RegistryFlag = None,
    data: DataFlag = None,
) -> None:
    """Store an adapter and give it a name and a version.

    What is no sound LoRA adapter is refused. The same bytes are stored once, whoever pushes them;
    a version never changes. Exit status 0: it is there; 1: refused; 2: wrong usage.

    [bold]Example[/bold]

    loramux push ./my-lora alice/refund-flagger@1.4.2 --alias prod
    """
    with reporting_errors():
        # Before anything is copied or a model is read.
        parse_push_reference(reference)
        if alias is not None:
            check_alias(alias)
        if check_base is not None:
            check_on_base(folder, check_base)
    with open_library(registry, data) as library:
        with working(f"Storing {size_text(folder_bytes(folder))}"):
            pushed = library.push(folder, reference)
        show_pushed(pushed, Console())
        if alias is not None:
            name = f"{pushed.tenant}/{pushed.name}"
            state = library.registry.promote(name, pushed.version, alias=alias)
            show_alias(name, state, Console())


def check_on_base(folder: Path, model: Path) -> None:
    with working("Checking the adapter on its base model"):
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


def folder_bytes(folder: Path) -> int:
    """0 for what is no folder: the store says what is wrong with it."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.glob("adapter_*") if path.is_file())
