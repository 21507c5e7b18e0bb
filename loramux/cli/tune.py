"""`loramux tune`: choose the fastest GEMM algorithms for a model's shapes on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.cli.console import ByteView, say, show_error
from loramux.errors import LoramuxError, UnsupportedModel

DTYPES = ("bfloat16", "float16")


def tune(
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH|ORG/NAME",
            help="Model folder, config.json, GGUF file, or a model of the hub as org/name. Only "
            "its shapes are read: the weights need not be there.",
        ),
    ],
    device: Annotated[
        str, typer.Option(help="The GPU to tune for, such as cuda:1; auto is the first usable one.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = DTYPES[0],
    lora_augmented_ranks: Annotated[
        int, typer.Option(min=0, help="The value that the server is started with.")
    ] = 256,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the table here instead of the cache folder, where the server finds it.",
        ),
    ] = None,
) -> None:
    """Time cuBLASLt algorithms for every GEMM shape of a model and keep the fastest.

    Takes some minutes on an idle GPU. The server uses the table at its next start; tables for some
    GPUs and models are included. Without a table the library's default algorithms are used.
    """
    console = Console(stderr=True)
    if dtype not in DTYPES:
        show_error(console, f"--dtype is {dtype}. Valid values: {', '.join(DTYPES)}.")
        raise typer.Exit(2)
    try:
        file, count = write_table(model, device, dtype, lora_augmented_ranks, output)
    except (LoramuxError, OSError) as error:
        show_error(console, str(error))
        raise typer.Exit(1) from error
    say(Console(), "Tuned ", f"{count} GEMM shapes: {file}", style="bold green")


def write_table(
    model: str, device: str, dtype: str, lora_augmented_ranks: int, output: Path | None
) -> tuple[Path, int]:
    """Return the file that was written, and the number of shapes in this run."""
    # Imported here: torch slows down `--help`.
    import torch

    from loramux.models.architectures import parse_config
    from loramux.models.folder import read_any_config
    from loramux.models.locate import locate_model
    from loramux.runner.device_choice import choose_device
    from loramux.runner.gemm.table import read_table, user_table_file
    from loramux.runner.tune import TuneOptions, tune_model

    choice = choose_device(device)
    if choice.reason is not None:
        raise UnsupportedModel(f"There is no GPU to tune for: {choice.reason}")
    with ByteView() as bar:
        config = parse_config(read_any_config(locate_model(model, sink=bar, with_weights=False)))
    options = TuneOptions(dtype=getattr(torch, dtype), augmented_ranks=lora_augmented_ranks)
    console = Console(stderr=True)
    with console.status("Tuning") as status:
        made = tune_model(
            config,
            torch.device(choice.device),
            options,
            lambda stage, done: status.update(f"{stage} {done:.0%}"),
        )
    file = output or user_table_file(made.gpu, made.cublaslt_version)
    count = len(made.entries())
    # Tables of other models stay.
    earlier = read_table(file)
    if earlier is not None and (earlier.gpu, earlier.cublaslt_version) == (
        made.gpu,
        made.cublaslt_version,
    ):
        earlier.add(made.entries())
        made = earlier
    made.write(file)
    return file, count
