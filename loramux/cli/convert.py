"""`loramux convert`: rewrite an adapter that is refused for its form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.adapters.recipe import DTYPES
from loramux.cli.console import say, working
from loramux.cli.push import CheckBaseFlag, check_on_base
from loramux.cli.registry_options import reporting_errors
from loramux.errors import InvalidRequest


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Adapter folder.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    initial: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The adapter as it was saved before training; needed for PiSSA, OLoRA, CorDA and "
            "LoRA-GA.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the tensors: {', '.join(DTYPES)}. Default: unchanged."),
    ] = None,
    check_base: CheckBaseFlag = None,
) -> None:
    """Rewrite an adapter as a plain PEFT LoRA that can be served.

    Pickles become safetensors, without running code in them; tensor names of older tools and
    training wrappers become PEFT's; 8-bit floats become bfloat16; PiSSA and OLoRA become plain
    LoRA. Exit status 0: written; 1: refused; 2: wrong usage.

    [bold]Examples[/bold]

    loramux convert ./old-lora --out ./lora

    loramux convert ./pissa --initial ./pissa-init --out ./lora
    """
    with reporting_errors():
        if dtype is not None and dtype not in DTYPES:
            raise InvalidRequest(
                f"{dtype!r} is not a dtype for adapters. Valid values: {', '.join(DTYPES)}."
            )
        # Imported here: torch takes seconds to import.
        from loramux.adapters.convert.convert import convert_adapter
        from loramux.adapters.peft.writer import new_folder

        with new_folder(out) as folder:
            with working("Converting"):
                done = convert_adapter(source, folder, initial=initial, dtype=dtype)
            if check_base is not None:
                check_on_base(folder, check_base)
    console = Console()
    say(console, "Converted ", str(out), style="bold green")
    say(console, "CID       ", done.adapter.cid, style="bold")
    for change in done.changes or ("Nothing had to be changed.",):
        say(console, "Change    ", change, style="bold")
    for warning in done.adapter.warnings:
        say(console, "warning: ", warning, style="bold yellow")
